"""The check of a GPU machine: what it says without one, and all of its code on a processor."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.lowering.compiling.graph_job import GraphJob
from tests.conftest import ROOT
from workflows.benchmarks.networks import worst
from workflows.gpu_check import commands, equality
from workflows.gpu_check.__main__ import main
from workflows.gpu_check.child import BODIES
from workflows.gpu_check.parts import EQUAL_PLANS, all_parts
from workflows.gpu_check.setting import SMALL, Setting


def check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workflows.gpu_check", "--out", str(folder), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2450)


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    done = check(tmp_path / "out")
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "no GPU was found" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--only none: no part has such a name; parts are equal: resnet18, 1 rank,"):
        main(["--device", "cpu", "--out", str(tmp_path / "out"), "--only", "none"])


def test_every_part_has_a_body() -> None:
    assert {part.body for part in all_parts(SMALL)} == set(BODIES)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(torch.device("cpu"), SMALL, tmp_path)


def test_equality_compares_all_that_a_step_changes(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyfi_core.models.resnet import resnet6

    monkeypatch.setattr(equality, "resnet18", resnet6)
    (row,) = BODIES["equal"](setting, "resnet18")
    assert row["passed"] and {"gradients", "loss", "buffers", "output"} <= set(row)
    changed = lambda self, tensor, root=0: tensor.mul_(1 + 1e-6) if tensor.is_floating_point() else None  # noqa: E731
    monkeypatch.setattr(AloneCommunicator, "broadcast", changed)
    (row,) = BODIES["equal"](setting, "resnet18")
    assert not row["passed"] and row["gradients"] > equality.TOLERANCE


def test_room_and_speed_give_their_ratios(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> object:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", broken)  # takes a minute
    monkeypatch.setattr(GraphJob, "compiled", broken)
    compiled, compiled_engine = BODIES["compiled"](setting, "64")
    assert compiled["failed"] == "RuntimeError: no compiler"
    assert "uncompiled" in compiled_engine["failed"]  # it is not timed as it is
    *_, ratios = BODIES["speed"](setting, "64")
    assert {*ratios} == {"what", "engine_to_eager", "engine_without_graphs_to_eager"} and ratios["engine_to_eager"] > 0
    copies, *_ = BODIES["profile"](setting, "64")
    assert copies["what"] == "aten::copy_, calls in a step" and copies["eager"] >= 0 and copies["engine"] > 0
    assert (setting.out / "profiles" / "engine-64.txt").stat().st_size > 1000
    in_core, pieces, ratio = BODIES["pieces"](setting, "64")
    assert in_core["step_s"] > 0 and ratio["pieces_to_in_core"] > 0
    assert pieces["peak_bytes"] >= 0  # a step may find all its memory in what the process has freed
    (memory,) = BODIES["memory"](setting, "")
    assert memory["peak_to_forecast"] > 0
    assert [row["largest_px"] for row in BODIES["largest"](setting, "in core")] == list(SMALL.ladder_px)
    late = replace(setting, deadline_s=time.monotonic())
    first, then = BODIES["largest"](late, "in core")
    assert "largest_px" in first and "more than are left" in then["would take"]  # it ends by itself


def test_nan_is_the_largest_error_wherever_it_stands() -> None:
    one, nan = torch.ones(2), torch.full((2,), math.nan)
    for gradients in ({"a": one, "b": nan}, {"a": nan, "b": one}):
        assert not worst(gradients, {"a": one, "b": one}) <= equality.TOLERANCE
    assert worst({"a": one}, {"a": one}) == 0


def test_predictions_that_only_one_device_has_are_not_equal(tmp_path: Path) -> None:
    for folder, last in (("gpu", "0.2"), ("cpu", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "predictions.csv").write_text(f"slide_id,p_a\ns,0.5\nt,{last}\n")
    gpu, cpu = tmp_path / "gpu", tmp_path / "cpu"
    assert not commands._compared(gpu, cpu)["passed"] and not commands._compared(cpu, gpu)["passed"]
    row = commands._compared(gpu, gpu)
    assert (row["what"], row["passed"]) == ("probabilities of 2 slides", True)


def test_a_loader_has_an_image_for_each_step_that_is_timed(tmp_path: Path) -> None:
    done = check(tmp_path / "out", "--device", "cpu", "--minutes", "5", "--only", "feed")
    assert done.returncode == 0, done.stdout
    (part,) = json.loads((tmp_path / "out" / "gpu-check.json").read_text())["parts"]
    assert part["outcome"] == "passed" and part["rows"][0]["fed_s"] > 0


def test_every_plan_that_is_compared_has_its_ranks() -> None:
    assert {name: plan.ranks for name, plan in equality.PLANS.items()} == {
        name: ranks for name, (ranks, _) in EQUAL_PLANS.items()
    }


@pytest.mark.soak
@pytest.mark.timeout(2500)
def test_all_parts_run_on_a_processor(tmp_path: Path) -> None:
    done = check(tmp_path / "out", "--device", "cpu", "--minutes", "40")
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "out" / "gpu-check.json").read_text())
    assert {part["part"]: part["outcome"] for part in found["parts"]} == {
        part.name: "not run" if part.name == "tests of GPUs" else "passed" for part in all_parts(SMALL)
    }
    assert "no GPU: " in done.stdout
    assert (tmp_path / "out" / "gpu-check.txt").read_text() in done.stdout + "\n"
    with tarfile.open(tmp_path / "out" / "gpu-check.tar.gz") as archive:
        names = set(archive.getnames())
    assert {"gpu-check/machine.yaml", "gpu-check/gpu-check.txt", "gpu-check/profiles/engine-64.txt"} <= names
    assert {f"gpu-check/logs/{part.file_name}.txt" for part in all_parts(SMALL)} <= names
