"""Stages whose layouts are read from the whole model's, against stages that are lowered to see them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from hyfi_core.capture.program import Program
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.search.doubled import doubled
from hyfi_core.cost.step.lowered_stages import LoweredPlans, lowered_stages
from hyfi_core.cost.step.stage_cost import StageCosts
from hyfi_core.cost.step.whole_layouts import WholeLayouts
from hyfi_core.lowering.lower import Target
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.resnet import resnet18
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import captured_once

SIZES = {"resnet18": 100, "amoebanet": 128}  # 100 px leave uneven parts


@cache
def captured(name: str, images: int = 1) -> Program:
    if images == 2:  # as the planner, which captures large models once
        derived = doubled(captured(name))
        assert derived is not None
        return derived
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


@pytest.mark.parametrize("name", SIZES)
def test_layouts_serve_other_numbers_of_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, lowered = load_machine("v100-lassen"), list[int]()
    of = WholeLayouts.of
    monkeypatch.setattr(WholeLayouts, "of", lambda program, target: lowered.append(1) or of(program, target))
    shared, plan = LoweredPlans(), ParallelPlan(((2, 2),))
    for images in (1, 2):
        program, for_itself = captured(name, images), LoweredPlans()
        monkeypatch.setattr(for_itself, "layouts", lambda *_: None)
        costs = [StageCosts(program, plan, machine, lowered_plans=known).stages for known in (shared, for_itself)]
        assert costs[0] == costs[1]
    assert len(lowered) == 1


class Windows(nn.Module):
    """Tiles of an image become its batch: how they are divided depends on the number of images."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tiles = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, 8, 8)
        return tiles.relu().view(images.shape[0], -1, 3, 8, 8).mean((1, 3, 4))


def test_where_the_batch_is_divided_layouts_serve_no_other_number_of_images() -> None:
    one, two = (captured_once(Windows(), (images, 3, 32, 32), torch.float32) for images in (1, 2))
    whole = WholeLayouts.of(one, Target((2, 2), 0))
    assert whole is not None and whole.serve(one) and not whole.serve(two)
