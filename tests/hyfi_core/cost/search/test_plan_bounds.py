"""Bounds of stages from their operators alone, against the stages themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.search.plan_bounds import PlanBounds
from hyfi_core.cost.step.stage_cost import StageCosts
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import captured_once


class Shortcut(nn.Module):
    """A map that two operators use: both of them in the second stage, one in each, or both in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(c, 4, 1) for c in (3, 4, 4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.first(images)
        return self.third(self.second(x) + x).mean((2, 3))  # type: ignore[no-any-return]


@pytest.mark.parametrize("cut", ["first", "second", "third"])
@pytest.mark.parametrize("machine", ["v100-lassen", "cpu"])
def test_sums_of_cotangents_are_in_no_bound_if_another_stage_has_them(machine: str, cut: str) -> None:
    program = captured_once(Shortcut().train(), (1, 3, 256, 256), torch.float32)
    measured = replace(load_machine(machine), overhead_s={"convolution": (1e-6, 1e-6)})
    plan = ParallelPlan(((1, 1), (1, 1)), (cut,))
    bounds, _ = PlanBounds(lambda _: program, 1, plan.ranks, measured).of_stages(plan)
    for least_s, stage in zip(bounds, StageCosts(program, plan, measured).stages, strict=True):
        assert 0 < least_s <= (stage.forward_s + stage.backward_s) * (1 + 1e-9)
