"""Stages whose layouts are read from the whole model's, against stages that are lowered to see them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from hyfi_core.capture.program import Program
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.step.lowered_stages import LoweredPlans, lowered_stages
from hyfi_core.cost.step.stage_cost import StageCosts
from hyfi_core.cost.step.whole_layouts import WholeLayouts
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.resnet import resnet18
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import captured_once

SIZES = {"resnet18": 100, "amoebanet": 128}  # 100 px leave uneven parts


@cache
def captured(name: str) -> Program:
    model: nn.Module = resnet18(2) if name == "resnet18" else amoebanet_d(2, layers=3, filters=16)
    return captured_once(model.train(), (1, 3, SIZES[name], SIZES[name]), torch.float32)


@pytest.mark.parametrize(
    ("name", "cut"), [("resnet18", "layer1"), ("resnet18", "layer2.0.bn1"), ("amoebanet", "cells.1"), ("resnet18", "")]
)
@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (1, 3)])
def test_layouts_of_the_whole_model_change_no_stage(
    name: str, cut: str, grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, machine = captured(name), load_machine("v100-lassen")
    plan = ParallelPlan((grid,) * 2, (cut,)) if cut else ParallelPlan((grid,))
    from_whole, for_itself, asked = LoweredPlans(), LoweredPlans(), list[bool]()
    hold_for = WholeLayouts.hold_for

    def noted(layouts: WholeLayouts, *stage: object) -> bool:
        asked.append(hold_for(layouts, *stage))  # type: ignore[arg-type]
        return asked[-1]

    monkeypatch.setattr(WholeLayouts, "hold_for", noted)
    monkeypatch.setattr(for_itself, "layouts", lambda *_: None)
    costs = [StageCosts(program, plan, machine, lowered_plans=known).stages for known in (from_whole, for_itself)]
    assert costs[0] == costs[1]
    assert asked[0], "the first stage begins at the image, as the whole model does"
    for stage in range(plan.stages):
        pair = [
            lowered_stages(program, plan, plan, machine, known).stage(stage)[1].planes[0]
            for known in (from_whole, for_itself)
        ]
        assert pair[0].splits == pair[1].splits
        assert [one.outputs for one in pair[0].instructions] == [one.outputs for one in pair[1].instructions]


def test_a_stage_that_receives_other_parts_is_lowered_for_itself() -> None:
    program = captured("resnet18")
    known, machine = LoweredPlans(), load_machine("v100-lassen")
    plan = ParallelPlan(((1, 3), (1, 3)), ("layer1",))
    stages = lowered_stages(program, plan, plan, machine, known)
    piece, lowered, operators = stages.stage(1)
    (received,) = (name for names in piece.entries.values() for name in names)
    ((_, whole),) = known._layouts.values()
    assert whole is not None and whole.hold_for(operators, {received: whole.ranked.splits[received]})
    assert whole.ranked.splits[received] != lowered.planes[0].splits[received]
    assert not whole.hold_for(operators, {received: lowered.planes[0].splits[received]})
