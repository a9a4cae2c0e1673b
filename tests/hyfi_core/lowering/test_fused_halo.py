"""Runs that are planned with remembered answers are those that are planned anew at every question."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.cost.fused_depth import cost
from hyfi_core.lowering import fused_halo as fused
from hyfi_core.lowering.fused_halo import margins_of, unfused
from hyfi_core.lowering.fused_sketch import sketch_of
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.models.resnet import resnet_v2
from hyfi_core.plan import layout

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
