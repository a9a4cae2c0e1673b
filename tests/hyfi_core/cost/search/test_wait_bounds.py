"""Bounds of what grids add to stages, against the stages themselves, lowered."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import nn

from hyfi_core.capture.program import Program
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.search.doubled import doubled
from hyfi_core.cost.search.plan_bounds import PlanBounds
from hyfi_core.cost.search.plan_family import PlanRequest
from hyfi_core.cost.search.wait_bounds import WaitBounds
from hyfi_core.cost.step.lowered_stages import LoweredPlans
from hyfi_core.cost.step.stage_cost import StageCosts
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.resnet import resnet18
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import captured_once

SIZES = {"resnet18": 100, "amoebanet": 128}  # 100 px leave uneven parts
CUTS = {"resnet18": ((), ("layer1",), ("layer2.0.bn1",)), "amoebanet": ((), ("cells.1",))}
IMAGES = {"resnet18": (1, 2), "amoebanet": (2,)}
GRIDS = ((2, 2), (1, 8), (3, 5))


@cache
def captured(name: str, images: int = 1) -> Program:
    if images == 2:  # as the planner, which captures large models once
        derived = doubled(captured(name))
        assert derived is not None
        return derived
    model: nn.Module = resnet18(2) if name == "resnet18" else amoebanet_d(2, layers=3, filters=16)
    return captured_once(model.train(), (1, 3, SIZES[name], SIZES[name]), torch.float32)


def machines(name: str) -> tuple[MachineModel, ...]:
    """Return a machine as it is, one whose messages take no time, and one whose messages take all of it."""
    machine = load_machine(name)
    links = {link: replace(getattr(machine, link), latency_s=1e-15) for link in ("node", "network")}
    return machine, replace(machine, message_s=1e-15, **links), replace(machine, message_s=1.0)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("machine", "grid"), [*(("v100-lassen", grid) for grid in GRIDS), ("cpu", (3, 5))])
def test_no_bound_is_above_what_a_stage_takes(name: str, machine: str, grid: tuple[int, int]) -> None:
    raised, known = 0, [(model, LoweredPlans()) for model in machines(machine)]
    for (model, lowered), images, cuts, fused in product(known, IMAGES[name], CUTS[name], ("auto", 1)):
        plan = ParallelPlan((grid,) * (len(cuts) + 1), cuts or "auto", fused_halo=fused)  # type: ignore[arg-type]
        request = PlanRequest(plan.ranks, images, model, 10**12)
        bounds = PlanBounds(lambda images: captured(name, images), images, plan.ranks, model)
        program = captured(name, images)
        added = WaitBounds(bounds, request, lowered).of_stages(program, plan)
        stages = StageCosts(program, plan, model, lowered_plans=lowered).stages
        for least_s, more_s, stage in zip(bounds.of_stages(plan)[0], added, stages, strict=True):
            assert least_s + more_s <= (stage.forward_s + stage.backward_s) * (1 + 1e-9)
            raised += more_s > 0
    assert raised > len(known)


class Fork(nn.Module):
    """Two windows read the result of one expensive operator."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Conv2d(3, 1024, 1), nn.Conv2d(1024, 1024, 1))
        self.left, self.right = nn.Conv2d(1024, 1, 3, padding=1), nn.Conv2d(1024, 1, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        shared = self.shared(images)
        return (self.left(shared.relu()) + self.right(shared.sigmoid())).mean((2, 3))


def test_margins_that_two_windows_share_are_counted_once() -> None:
    program = captured_once(Fork().train(), (1, 3, 64, 64), torch.float32)
    plan, model = ParallelPlan(((1, 8),)), machines("v100-lassen")[2]
    bounds = PlanBounds(lambda _: program, 1, plan.ranks, model)
    (added,) = WaitBounds(bounds, PlanRequest(plan.ranks, 1, model, 10**12), LoweredPlans()).of_stages(program, plan)
    (stage,), ((least_s,), _) = StageCosts(program, plan, model).stages, bounds.of_stages(plan)
    assert added > 0
    assert least_s + added <= stage.forward_s + stage.backward_s < 1.0  # no message


def test_long_messages_are_weighed_against_margins_and_short_ones_are_sent() -> None:
    plan, program = ParallelPlan(((1, 8),)), captured("resnet18", 1)
    seconds = []
    for model in machines("v100-lassen"):
        bounds = PlanBounds(lambda images: captured("resnet18", images), 1, plan.ranks, model)
        request = PlanRequest(plan.ranks, 1, model, 10**12)
        seconds += WaitBounds(bounds, request, LoweredPlans()).of_stages(program, plan)
    as_it_is, without_messages, with_margins = seconds
    assert without_messages < as_it_is <= with_margins < 0.1  # seconds: a message of one second is never worth it


def test_one_rank_cells_and_planes_of_branches_have_no_bound() -> None:
    model, program = load_machine("v100-lassen"), captured("resnet18", 1)
    alone = ParallelPlan(((1, 1),))
    for plan in (alone, replace(alone, cells=(2, 2)), ParallelPlan(((1, 2),), branches=2)):
        bounds = PlanBounds(lambda images: captured("resnet18", images), 1, plan.ranks, model)
        waits = WaitBounds(bounds, PlanRequest(plan.ranks, 1, model, 10**12), LoweredPlans())
        assert waits.of_stages(program, plan) == (0.0,)


def test_a_stage_with_other_layouts_than_the_whole_model_has_no_bound() -> None:
    """A third of 25 pixels is even in a stage; in the whole model, windows have made it uneven."""
    model, program = load_machine("v100-lassen"), captured("resnet18", 1)
    plan = ParallelPlan(((1, 3), (1, 3)), ("layer1",))
    bounds = PlanBounds(lambda images: captured("resnet18", images), 1, plan.ranks, model)
    first, second = WaitBounds(bounds, PlanRequest(6, 1, model, 10**12), LoweredPlans()).of_stages(program, plan)
    assert first > 0 and second == 0
