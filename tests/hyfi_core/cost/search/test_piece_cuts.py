"""Cuts into pieces that are computed again: no others need less memory, and the last piece is large."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.cost.memory.stage_table import StageTable
from hyfi_core.cost.search.cuts import with_cuts
from hyfi_core.cost.step.simulator import rank_bytes
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan


def plan_of(pieces: int, grid: tuple[int, int] = (1, 1), **settings: Any) -> ParallelPlan:
    return hyfi_core.ParallelPlan(grids=(grid,), interleave=pieces, recompute=True, **settings)


@pytest.fixture(scope="module")
def program() -> Program:
    layers: list[nn.Module] = []
    for channels, out in ((3, 8), (8, 8), (8, 16), (16, 4), (4, 12)):
        layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Conv2d(12, 24, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return capture(nn.Sequential(model, nn.Linear(24, 2)), (1, 3, 32, 32), torch.float32)


@pytest.mark.parametrize(("pieces", "grid"), [(2, (1, 1)), (3, (1, 1)), (4, (2, 2))])
def test_no_cuts_need_less(program: Program, pieces: int, grid: tuple[int, int]) -> None:
    def needed(cuts: tuple[str, ...]) -> int:
        return max(rank_bytes(program, plan_of(pieces, grid, cuts=cuts)))

    chosen = with_cuts(plan_of(pieces, grid), program).cuts
    assert isinstance(chosen, tuple)
    each = {cuts: needed(cuts) for cuts in combinations(StageTable.of(program).names, pieces - 1)}
    least = min(each.values())
    assert least <= needed(chosen) <= 1.03 * least
    # Of those that need as little, no other has a last piece that begins earlier.
    names = StageTable.of(program).names
    assert all(names.index(chosen[-1]) <= names.index(cuts[-1]) for cuts, size in each.items() if size == least)


def test_too_little_memory_is_refused_with_the_least_that_would_do(program: Program) -> None:
    least = max(rank_bytes(program, with_cuts(plan_of(3), program)))
    with pytest.raises(RequestError, match="3 pieces of this model need"):
        with_cuts(plan_of(3, memory_bytes=least // 2), program)
    assert with_cuts(plan_of(3, memory_bytes=least), program).cuts == with_cuts(plan_of(3), program).cuts
    in_cells = plan_of(3, cells=(2, 2), memory_bytes=least)
    assert with_cuts(in_cells, program).cuts == with_cuts(plan_of(3), program).cuts, "cells run in lockstep"
