from __future__ import annotations

import json
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from data.loading.rates import core_bytes_per_s
from data.samples.augment import Augment
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.memory.forecast import forecast_memory, rank_peaks
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import captured_once
from workflows.commands import simulate
from workflows.console import counted
from workflows.training.memory import PROCESS_BYTES


def config(folder: Path, **changes: object) -> Path:
    """A run that could not start: there is no store. What its plan takes can be said nevertheless."""
    tree = {
        "data": {"store": str(folder / "store"), "target": "label", "size_px": 64, "mpp": 1.0, "batch_size": 4},
        "model": {"name": "resnet6", "classes": 2, "options": {"width": 8}},
        "plan": {"grids": [[1, 2], [1, 1]], "microbatches": 2},
        "run": {"dir": str(folder / "run"), "steps": 1},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**tree, **changes}))
    return path


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_step_is_forecast_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert simulate.run(config(tmp_path), [], None, None, trace, as_json=True) == 0
    text = capsys.readouterr().out
    found = json.loads(text.splitlines()[-1])
    assert "bound by" in text and "exposed communication: stage" in text
    assert found["ranks"] == 3 and found["plan"]["grids"] == [[1, 2], [1, 1]] and len(found["plan"]["cuts"]) == 1
    assert found["images_per_s"] == pytest.approx(4 / found["step_s"]) and 0 < found["bubble"] < 1
    images, pixels = found["images_per_s"], yaml.safe_load((tmp_path / "run.yaml").read_text())["data"]["size_px"] ** 2
    assert found["input_bytes_per_s"] == pytest.approx(3 * pixels * images)
    cores = ceil(found["input_bytes_per_s"] / core_bytes_per_s(Augment()))
    assert f"loaders need about {counted(cores, 'core')} (" in text
    assert found["memory_bytes"] == max(found["rank_memory_bytes"]) > 400_000_000
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["name"] for event in events if event.get("cat") == "F"} == {
        f"F{m}.s{s}.d0" for m in (0, 1) for s in (0, 1)
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml", "trace.json"]


def test_more_ranks_are_more_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path)
    simulate.run(path, [], "v100-lassen", None, None, as_json=True)
    alone = said(capsys)
    simulate.run(path, [], "v100-lassen", 1536, None, as_json=True)
    many = said(capsys)
    assert many["ranks"] == 1536 and many["step_s"] > alone["step_s"]  # type: ignore[operator]
    assert many["images_per_s"] > 100 * alone["images_per_s"]  # type: ignore[operator]
    with pytest.raises(RequestError, match="one replica of the plan takes 3; give a multiple"):
        simulate.run(path, [], None, 4, None, as_json=True)


def test_overrides_and_machines_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path)
    simulate.run(path, ["plan.grids=[[1,1]]", "plan.cells=[2,2]"], "bluefield2", None, None, as_json=True)
    slow = said(capsys)
    simulate.run(path, ["plan.grids=[[1,1]]", "run.device=cuda"], None, None, None, as_json=True)
    fast = said(capsys)
    assert slow["plan"]["cells"] == [2, 2] and "BlueField" in str(slow["machine"])  # type: ignore[index]
    assert "H100" in str(fast["machine"]) and fast["step_s"] < slow["step_s"]  # type: ignore[operator]


def test_spilled_maps_take_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, plan={"grids": [[1, 1]], "cells": [2, 2], "spill": "memory"})
    large = ["data.size_px=2048", "data.batch_size=1", "model.options.width=64"]
    found = {}
    for least, memory in {"little": 1200, "much": 100_000}.items():
        simulate.run(path, [*large, f"plan.memory_bytes={memory}000000"], "p40", None, None, as_json=True)
        text = capsys.readouterr().out
        found[least] = json.loads(text.splitlines()[-1])
        assert "not counted" not in text and "go to the host's memory and back in" in text
    little, much = found["little"], found["much"]
    assert much["moved_bytes"] == much["moving_s"] == much["exposed_s"]["spill"] == 0
    assert little["moving_s"] == pytest.approx(little["moved_bytes"] / 12e9) and little["moved_bytes"] > 10**8
    assert little["recomputing_s"] == pytest.approx(much["recomputing_s"]) and much["recomputing_s"] > 0
    assert little["step_s"] == pytest.approx(much["step_s"] + little["exposed_s"]["spill"])
    simulate.run(
        path, [*large, "plan.memory_bytes=1200000000", f"plan.spill={tmp_path}"], "p40", None, None, as_json=True
    )
    disk = said(capsys)
    assert disk["bound_by"] == "spill" and disk["step_s"] > little["step_s"]
    with pytest.raises(RequestError, match="a rank needs at least"):
        simulate.run(path, [*large, "plan.memory_bytes=500000000"], "p40", None, None, as_json=True)


def test_automatic_cells_are_those_of_the_declared_machine() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))
    program = captured_once(net, (1, 3, 16384, 16384), torch.float32)  # a map of 2³² values
    gpu, cpu = load_machine("h100"), load_machine("cpu")
    auto = ParallelPlan(((1, 1),), cells="auto", spill="memory", memory_bytes=1 << 42)
    assert simulate.resolved(auto, program, gpu).cells == (2, 2)
    assert simulate.resolved(auto, program, cpu).cells is None
    # A heap keeps more than a GPU does: between both, only the CPU needs cells.
    small = captured_once(net, (1, 3, 4096, 4096), torch.float32)
    whole = replace(auto, cells=None, spill=None)
    (peak,) = rank_peaks(whole, forecast_memory(small, whole))
    between = replace(auto, memory_bytes=PROCESS_BYTES + int(1.25 * peak))
    assert simulate.resolved(between, small, gpu).cells is None
    assert simulate.resolved(between, small, cpu).cells is not None
    half = replace(auto, memory_bytes=None)
    assert simulate.resolved(half, program, gpu).memory_bytes == gpu.memory_bytes // 2, "as a run without a limit"


def test_classes_come_from_the_labels_where_the_configuration_has_none(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="store"):
        simulate.run(config(tmp_path, model={"name": "resnet6"}), [], None, None, None, as_json=True)
