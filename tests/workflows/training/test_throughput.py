"""Pixels and operations per second of a run, and what share of which peak they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.errors import RequestError
from tests.workflows.archive import make_config
from tests.workflows.runs import run_on
from workflows.config.load import load_config
from workflows.training.inputs.flops import tile_flops
from workflows.training.metrics_log import read_metrics
from workflows.training.throughput import Throughput, describe_speed, describe_throughput, peak_flops_per_s


def test_rates_are_those_of_the_images() -> None:
    known = Throughput(2_000_000, 3e12, 24e12, torch.device("cpu"))
    found = known.of(2.0)
    assert (found["gigapixels_per_second"], found["flops_per_second"], found["utilisation"]) == (0.004, 6e12, 0.25)
    assert found["memory_bytes"] is not None and found["memory_bytes"] > 1e7
    found["memory_bytes"] = 3.14e9
    assert describe_throughput(found) == "4 MP/s, 6 TFLOP/s (25 % of peak), 3.1 GB"
    assert describe_speed(2.0, found, "images") == f"2 images/s, {describe_throughput(found)}"
    assert describe_speed(2.0, found, "slides") == f"2 slides/s, {describe_throughput(found)}"


def test_operations_of_a_tile_are_those_of_what_is_trained() -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 10), nn.Linear(10, 7))
    first, last = 2 * 48 * 10, 2 * 10 * 7
    assert tile_flops(encoder, 4) == 2 * first + 3 * last  # pixels need no gradient
    encoder[1].requires_grad_(False)
    assert tile_flops(encoder, 4) == first + 2 * last
    encoder[2].requires_grad_(False)
    assert tile_flops(encoder, 4) == first + last
    assert encoder.training and all(parameter.grad is None for parameter in encoder.parameters())


def test_large_values_have_no_exponent() -> None:
    found = {"gigapixels_per_second": 123.4, "flops_per_second": 2.5e18, "utilisation": 1.0, "memory_bytes": 139e9}
    assert describe_throughput(found) == "123 GP/s, 2500 PFLOP/s (100 % of peak), 139 GB"


def test_without_a_peak_there_is_no_percentage() -> None:
    found = Throughput(10**9, 5e8, None, torch.device("cpu")).of(0.5)
    assert found["utilisation"] is None
    assert describe_throughput({**found, "memory_bytes": 0}) == "500 MP/s, 250 MFLOP/s, 0 GB"


def test_the_peak_is_that_of_the_machine_given(tmp_path: Path) -> None:
    config = load_config(make_config(tmp_path, tmp_path), [])
    assert peak_flops_per_s(config, 4, "cpu") is None
    given = load_config(make_config(tmp_path, tmp_path, run={"machine": "cpu", "precision": "float64"}), [])
    assert peak_flops_per_s(given, 4, "cpu") == 4 * load_machine("cpu").peak_flops_per_s["float64"]
    with pytest.raises(RequestError, match=r"run.machine: given cpu, which has the peak of a cpu device.*cuda:1"):
        peak_flops_per_s(given, 4, "cuda:1")
    peaks = load_machine("h100").peak_flops_per_s
    for precision, tf32, peak in (
        ("float32", False, peaks["float32"]),
        ("float32", True, peaks["tf32"]),
        ("bfloat16", True, peaks["bfloat16"]),
    ):
        run = {"machine": "h100", "precision": precision, "tf32": tf32}
        assert peak_flops_per_s(load_config(make_config(tmp_path, tmp_path, run=run), []), 2, "cuda:0") == 2 * peak


@pytest.mark.usefixtures("in_process")
def test_a_file_that_does_not_exist_is_refused_on_all_ranks(tmp_path: Path, store: Path) -> None:
    config = make_config(tmp_path, store, plan={"grids": [[1, 2]]}, run={"steps": 1, "machine": "missing.yaml"})
    with pytest.raises(RequestError, match=r"machine 'missing.yaml': No such file"):
        run_on(2, config)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("in_process")
def test_a_run_counts_its_images_once_on_any_number_of_ranks(tmp_path: Path, store: Path) -> None:
    config = make_config(tmp_path, store, run={"steps": 2}, data={"batch_size": 4})
    flops_of = {}
    for name, ranks, plan in (("one", 1, []), ("four", 4, ["plan.grids=[[1,2]]", "plan.replicas=2"])):
        assert run_on(ranks, config, f"run.dir={tmp_path / name}", "validation.every_steps=9", *plan) == [0] * ranks
        record = read_metrics(tmp_path / name / "metrics.jsonl")[0]
        assert record["utilisation"] is None
        assert record["gigapixels_per_second"] == pytest.approx(250 * 250 * 4 / record["seconds"] / 1e9)
        flops_of[name] = record["flops_per_second"] * record["seconds"]
    assert flops_of["one"] == pytest.approx(flops_of["four"]) and flops_of["one"] > 4 * 250 * 250 * 3 * 8 * 25
