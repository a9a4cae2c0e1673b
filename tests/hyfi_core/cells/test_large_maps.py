"""Maps of 2³¹ values or more: on a GPU they are divided into cells, or a warning says that they should be."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.cells import large_maps
from hyfi_core.cells.budget import with_cells
from hyfi_core.cells.large_maps import fewest_cells, largest_map, warn_of_slow_kernels
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.runtime.calls.resolved_plan import resolved
from tests.harness import captured_once

GPU, CPU = torch.device("cuda"), torch.device("cpu")
ROOM = 1 << 42


@pytest.fixture(scope="module")
def program() -> Program:
    """One map of 16 × 16384 × 16384 values: twice 2³¹."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)
    )
    return capture(model, (1, 3, 16384, 16384), torch.float32)


def plan_of(**settings: object) -> hyfi_core.ParallelPlan:
    return replace(hyfi_core.ParallelPlan(grids=((1, 1),), memory_bytes=ROOM), **settings)  # type: ignore[arg-type]


def test_the_largest_map_of_a_rank_or_a_cell(program: Program) -> None:
    assert largest_map(program, plan_of()) == 1 << 32
    assert largest_map(program, plan_of(cells=(2, 2))) == 1 << 30
    assert largest_map(program, plan_of(grids=((1, 2),))) == 1 << 31
    stages = plan_of(grids=((2, 4), (1, 1)), cuts=("1",))  # the large map is on eight ranks
    assert largest_map(program, stages) == 1 << 29


def test_automatic_cells_make_maps_small_enough_on_a_gpu(program: Program) -> None:
    auto = plan_of(cells="auto", spill="memory")
    fewest = fewest_cells(program, auto)
    assert with_cells(auto, program, 0, CPU, fewest=fewest) == plan_of(cells=(2, 2)), "nothing has to be spilled"
    assert with_cells(auto, program, 0, CPU) == plan_of(), "a CPU has no such limit"
    short = with_cells(replace(auto, memory_bytes=24 << 30), program, 0, CPU, fewest=fewest)
    assert short.spill == "memory" and isinstance(short.cells, tuple) and short.cells[0] >= 2


def test_a_warning_names_the_cells_that_would_do(program: Program) -> None:
    with pytest.warns(UserWarning, match=r"4,294,967,296 values on one rank;.* plan\.cells=\(2, 2\) computes"):
        warn_of_slow_kernels(program, plan_of(), cells_are_possible=True)
    with pytest.warns(UserWarning, match=r"more ranks in plan\.grids compute"):
        warn_of_slow_kernels(program, plan_of(), cells_are_possible=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_slow_kernels(program, plan_of(cells=(2, 2)), cells_are_possible=True)
    assert fewest_cells(program, plan_of(grids=((1, 2),))) == 2  # 2³¹ is one too many


@pytest.mark.parametrize("in_order", [False, True])
def test_ranks_that_cannot_have_cells_choose_none(monkeypatch: pytest.MonkeyPatch, in_order: bool) -> None:
    """Messages of NCCL have no tags, which cells of several ranks need: the ranks are slow, and say so."""
    monkeypatch.setattr(large_maps, "LARGEST_VALUES", 20_000)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2))
    shape, plan = (1, 3, 32, 32), plan_of(grids=((1, 2),), cells="auto", spill="memory")
    program = captured_once(model, shape, torch.float32)

    subject: Any = SimpleNamespace(program=lambda shape: program, shapes=SimpleNamespace(widest=shape))

    class Ranks(AloneCommunicator):
        """Two ranks, by what they say of themselves."""

        size = 2

    monkeypatch.setattr(Ranks, "in_order", in_order, raising=False)
    with pytest.warns(UserWarning) if in_order else contextlib.nullcontext():
        chosen = resolved(plan, subject, Ranks(), GPU, True)
    assert chosen.cells == (None if in_order else (2, 2))
