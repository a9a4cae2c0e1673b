"""The bytes reserved for spilled maps are those that a step takes; and the text about a step says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.cells import paging
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.models.resnet import resnet10, resnet18
from hyfi_core.plan.box import Box


class Noise:
    """An image of random bytes."""

    pixel_dtype = torch.uint8

    def pixels(self, box: Box, first: int, stop: int) -> torch.Tensor:
        return torch.randint(0, 255, (1, 3, box.height, box.width), dtype=torch.uint8)

    def prepare(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.float().div_(255).sub_(0.5)

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        return self.prepare(self.pixels(box, first, stop))


@pytest.mark.parametrize(
    ("size", "cells", "limit_bytes", "precision"),
    [
        (512, 2, 15_000_000, "bfloat16"),
        pytest.param(1024, 4, 30_000_000, "bfloat16", marks=pytest.mark.soak),
        pytest.param(1024, 4, 80_000_000, "bfloat16", marks=pytest.mark.soak),
        pytest.param(1024, 4, 80_000_000, "float32", marks=pytest.mark.soak),
        pytest.param(2048, 4, 250_000_000, "float32", marks=pytest.mark.soak),
    ],
)
def test_what_is_reserved_is_what_a_step_takes(
    size: int, cells: int, limit_bytes: int, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "page_limit", lambda *given: limit_bytes)
    torch.manual_seed(0)
    plan = ParallelPlan(((1, 1),), cells=(cells, cells), spill=str(tmp_path))
    engine = hyfi_core.parallelize(
        resnet18(2),
        (1, 3, size, size),
        plan,
        AloneCommunicator(),
        autocast=torch.bfloat16 if precision == "bfloat16" else None,
        verify=False,
    )
    reserved = engine.reserve(pixels=torch.uint8)
    engine.accumulate(Noise(), torch.tensor([0]))
    counts = engine.spilled()
    assert reserved is not None and counts is not None
    assert 0.92 * reserved < counts.store_bytes < 1.05 * reserved


def test_a_plan_that_spills_says_what_a_step_takes(tmp_path: Path) -> None:
    plan = ParallelPlan(((1, 1),), cells=(2, 2), spill=str(tmp_path), memory_bytes=10**12)
    engine = hyfi_core.parallelize(resnet10(2, width=8), (1, 3, 512, 512), plan, AloneCommunicator(), verify=False)
    assert "expected of a step" not in engine.describe(load_machine("cpu"))  # the limit is not known yet
    reserved = engine.reserve()
    text = engine.describe(load_machine("cpu"))
    assert re.search(r"maps of [\d,]{7,} are computed again; [\d,]+ are spilled to", text) and reserved == 0
    assert re.search(r"expected .*: at least ([\d.]+) s, bound by compute \(compute \1 s, .*; spilled .* in 0 s", text)
    assert "expected of a step" not in engine.describe()


def test_the_bound_of_a_step_is_what_takes_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "page_limit", lambda *given: 1_000_000)
    plan = ParallelPlan(((1, 1),), cells=(2, 2), spill=str(tmp_path))
    engine = hyfi_core.parallelize(resnet10(2, width=8), (1, 3, 512, 512), plan, AloneCommunicator(), verify=False)
    reserved, slow = engine.reserve(), load_machine("bluefield2")
    assert reserved is not None
    told = re.search(r": at least ([\d.]+) s, bound by spill", engine.describe(slow))
    fast = load_machine("h100")
    assert told is not None and slow.spill_s(reserved) < float(told[1]) < 6 * slow.spill_s(reserved)  # so little room
    assert slow.spill_s(reserved, 2) == 2 * reserved * min(2, slow.devices_per_node) / slow.disk_bytes_per_s
    assert fast.spill_s(reserved, to_disk=False) < fast.spill_s(reserved)
