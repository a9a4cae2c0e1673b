"""Branches are planned where they pay, and only there."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from hyfi_core.capture.program import Program
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.search import branch_plans
from hyfi_core.cost.search.branch_plans import best_of_all_plans
from hyfi_core.cost.search.plan_family import PlanRequest
from hyfi_core.cost.search.planner import best_plans
from tests.harness import captured_once
from tests.hyfi_core.cost.search import test_planner
from tests.test_branches import SmallCells


@cache
def programs(images: int) -> Program:
    torch.manual_seed(0)
    return captured_once(SmallCells().train(), (images, 3, 64, 64), torch.float32)


def request(ranks: int, batch: int, machine: str, **more: Any) -> PlanRequest:
    return PlanRequest(ranks, batch, load_machine(machine), **{"memory_bytes": 10**9, **more})


@pytest.mark.parametrize(("ranks", "batch"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.soak), (3, 1)])
def test_planes_take_the_ranks_for_which_there_is_no_image(ranks: int, batch: int) -> None:
    """On GPUs, small maps are not worth a halo, and neither are stages: without branches more ranks hardly help."""
    asked = request(ranks, batch, "h100")
    found, without = best_of_all_plans(programs, asked, top=2), best_plans(programs, asked).plans[0]
    best = found.plans[0]
    assert best.plan.branches > 1 and best.plan.ranks == ranks
    assert best.step_s < without.step_s and best.step_s <= found.plans[1].step_s
    assert "data parallel" in found.alternatives


@pytest.mark.parametrize(
    ("ranks", "batch", "machine"),
    [(2, 1, "h100"), pytest.param(4, 2, "v100-lassen", marks=pytest.mark.soak), (2, 2, "cpu")],
)
def test_plans_that_planes_cannot_make_fast_enough_are_not_missed(ranks: int, batch: int, machine: str) -> None:
    asked = request(ranks, batch, machine)
    found = best_of_all_plans(programs, asked, top=3)
    with mock.patch.object(branch_plans, "_remaining_share", return_value=1e-9):
        every = best_of_all_plans(programs, asked, top=3)
    assert [one.step_s for one in found.plans] == [one.step_s for one in every.plans]
    assert found.simulated <= every.simulated


def test_images_for_all_ranks_need_no_branches() -> None:
    asked = request(2, 8, "cpu")
    found = best_of_all_plans(programs, asked)
    assert found.plans[0].plan == best_plans(programs, asked).plans[0].plan and found.plans[0].plan.branches == 1


def test_a_model_without_branches_is_searched_once() -> None:
    with mock.patch.object(branch_plans, "best_plans", wraps=best_plans) as search:
        best_of_all_plans(test_planner.programs, request(2, 1, "h100"))
    assert search.call_count == 1


def test_a_base_with_branches_leaves_the_choice_to_the_search() -> None:
    base = best_of_all_plans(programs, request(2, 1, "h100")).plans[0].plan
    assert base.branches == 2
    for one in best_plans(programs, request(2, 2, "cpu", base=base), top=3).plans:
        assert one.plan.ranks == 2 and one.plan.branches == 1
