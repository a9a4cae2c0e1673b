"""Runs that are planned with remembered answers are those that are planned anew at every question."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.cost import fused_depth
from hyfi_core.cost.fused_depth import cost
from hyfi_core.lowering import fused_halo as fused
from hyfi_core.lowering.fused_halo import margins_of, unfused
from hyfi_core.lowering.fused_sketch import sketch_of
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.models.resnet import resnet_v2
from hyfi_core.plan import layout
from tests.harness import assert_equal_to_one_process

GRIDS = [(2, 2), (1, 3), (3, 1)]


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(resnet_v2(20, classes=2), (1, 3, 75, 90), torch.float32)


@pytest.mark.parametrize("grid", GRIDS)
def test_remembered_answers_are_those_that_would_be_given(program: Program, grid: tuple[int, int]) -> None:
    def planned() -> tuple[Any, ...]:
        trial = lower(program, Target(grid, 0))
        sketch = sketch_of(program, program.operators, trial.splits, trial.fusible, ())
        plans = [unfused(sketch), *(margins_of(sketch, depth) for depth in (2, 3, 6))]
        return sketch, plans, [cost(sketch, plan) for plan in plans]

    remembered = planned()
    with (
        mock.patch.object(fused, "_need", fused._need.__wrapped__),
        mock.patch.object(fused, "_owned", fused._owned.__wrapped__),
        mock.patch.object(fused, "_widened", fused._widened.__wrapped__),
        mock.patch.object(layout, "_through", layout._through.__wrapped__),
    ):
        assert planned() == remembered
    assert fused._need.cache_info().hits and layout._through.cache_info().hits
    assert any(plan.computed for plan in remembered[1])


@pytest.mark.parametrize("grid", [*GRIDS, (4, 5)])
def test_the_cost_of_an_exchange_is_that_of_its_slowest_rank(program: Program, grid: tuple[int, int]) -> None:
    trial = lower(program, Target(grid, 0))
    sketch = sketch_of(program, program.operators, trial.splits, trial.fusible, ())
    plans = [unfused(sketch), *(margins_of(sketch, depth) for depth in (2, 3, 6))]
    quick = [cost(sketch, plan) for plan in plans]
    with mock.patch.object(fused_depth, "_exchange_s", fused_depth._exchange_by_rank_s):
        assert quick == [cost(sketch, plan) for plan in plans]


class StripsAndGrid(nn.Module):
    """A map in strips (a sum along its rows) is combined with one on the grid, between two windows."""

    def __init__(self, strips_first: bool) -> None:
        super().__init__()
        self.before, self.behind = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)
        self.strips_first = strips_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x).relu()
        sums = y.cumsum(2) / 8
        y = self.behind(sums + y if self.strips_first else y + sums).relu()
        return self.head((y + self.behind(y)).mean((2, 3)))


@pytest.mark.parametrize("strips_first", [False, True])
@pytest.mark.parametrize("fused_halo", [2, 3])
def test_runs_meet_maps_that_are_cut_in_another_way(strips_first: bool, fused_halo: int) -> None:
    torch.manual_seed(0)
    assert_equal_to_one_process(StripsAndGrid(strips_first), (1, 3, 11, 13), (2, 2), fused_halo=fused_halo)
