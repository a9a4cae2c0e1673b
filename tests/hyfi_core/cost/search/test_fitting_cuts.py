"""The search for cuts that fit against rating all of them."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations
from unittest import mock

import numpy as np
import pytest
import torch

from hyfi_core.capture.program import Program
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.memory.stage_table import StageTable
from hyfi_core.cost.search import fitting_cuts
from hyfi_core.cost.search.fitting_cuts import CutRows, FittingCuts, StagesAnywhere, average_bytes
from hyfi_core.cost.search.plan_bounds import PlanBounds
from hyfi_core.cost.search.plan_family import PlanRequest
from hyfi_core.cost.search.plan_memory import PlanMemory
from hyfi_core.models.resnet import resnet6
from hyfi_core.plan.parallel_plan import BIDIRECTIONAL, ParallelPlan, ScheduleName
from tests.harness import captured_once

GRIDS = ([(1, 1)] * 2, [(1, 1)] * 3, [(1, 2), (1, 1)], [(2, 2), (1, 1), (1, 1)], [(1, 2)] * 3)


@cache
def programs(images: int) -> Program:
    torch.manual_seed(0)
    return captured_once(resnet6(2).train(), (images, 3, 64, 64), torch.float32)


def search(plan: ParallelPlan, share: float) -> FittingCuts:
    """Return one with so much of the memory between the least and the most that cuts need."""
    asked = PlanRequest(plan.ranks, 2 * plan.microbatches, load_machine("v100-lassen"), 10**9)
    memory = PlanMemory(programs, asked, PlanBounds(programs, asked.batch, asked.ranks, asked.machine))
    stages = StagesAnywhere.of(plan, programs(2), StageTable.of(programs(2)), 1.15)
    needed = stages.needed(every(stages))
    return FittingCuts(stages, memory._seconds(plan), int(needed.min() + share * (needed.max() - needed.min())))


def every(stages: StagesAnywhere) -> CutRows:
    return np.array(list(combinations(range(1, len(stages.names) + 1), stages.plan.stages - 1)))


def plans() -> list[ParallelPlan]:
    rng = random.Random(0)
    schedules: tuple[ScheduleName, ...] = ("1f1b", "sequential", "gpipe", "chimera", "gems_master")
    each = [(grids, schedule) for grids in GRIDS for schedule in schedules]
    return [ParallelPlan(tuple(g), "auto", 4, s, recompute=rng.random() < 0.3) for g, s in each]


@pytest.mark.parametrize("plan", plans(), ids=lambda plan: f"{len(plan.grids)}-{plan.schedule}")
@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
def test_cuts_are_as_fast_as_the_best_of_all_that_fit(plan: ParallelPlan, share: float) -> None:
    found = search(plan, share)
    rows, names = every(found.stages), found.stages.names
    cuts, needed = found.fastest()
    assert cuts is not None and found.stages.least_bytes() <= needed <= found.room_bytes
    fits = found.stages.needed(rows) <= found.room_bytes
    each_s = found.stages.at(found.seconds, rows[fits])
    own_s = found.stages.at(found.seconds, np.array([[names.index(cut) + 1 for cut in cuts]]))
    if plan.schedule in BIDIRECTIONAL:
        best = rows[found._order(rows)[0]]
        assert cuts == tuple(names[place - 1] for place in best)
    elif plan.schedule == "sequential":
        assert own_s.sum(0) == pytest.approx(each_s.sum(0).min())
    else:
        assert own_s.max(0) == pytest.approx(each_s.max(0).min()) or own_s.sum(0) == pytest.approx(each_s.sum(0).min())


@pytest.mark.parametrize("plan", plans(), ids=lambda plan: f"{len(plan.grids)}-{plan.schedule}")
def test_where_nothing_fits_the_least_is_named(plan: ParallelPlan) -> None:
    found = search(plan, -0.01)
    cuts, needed = found.fastest()
    least = found.stages.needed(every(found.stages)).min()
    assert cuts is None and needed >= least >= found.stages.least_bytes() > 0
    assert average_bytes(plan, programs(2), StageTable.of(programs(2))) <= least
    if plan.directions == 1:
        assert needed == least == found.stages.least_bytes()


def test_too_many_cuts_are_rated_near_the_best_of_a_few() -> None:
    plan = ParallelPlan(((1, 1),) * 4, "auto", 4, "chimera")
    for share in (0.0, 0.1, 0.5):
        found = search(plan, share)
        with mock.patch.object(fitting_cuts, "_MOST_ROWS", 10**6):
            exact = found._near_best()
        with mock.patch.object(fitting_cuts, "_MOST_ROWS", 60):
            near = found._near_best()
        both = np.concatenate([exact, near])
        assert found._order(both)[0] == 0
        exact_s, near_s = found.stages.most_of_a_rank(found.stages.at(found.seconds, both))
        assert near_s <= 1.05 * exact_s
        assert (found.stages.needed(near) <= found.room_bytes).all() or share == 0.0


@pytest.mark.parametrize("plan", plans(), ids=lambda plan: f"{len(plan.grids)}-{plan.schedule}")
def test_cuts_beside_the_fastest_fit_and_differ_by_one_place(plan: ParallelPlan) -> None:
    found = search(plan, 0.5)
    (cuts, _), beside = found.fastest(), found.beside()
    rows, names = every(found.stages), found.stages.names
    best = np.array([names.index(cut) + 1 for cut in cuts or ()])
    near = rows[(np.abs(rows - best).sum(1) == 1) & (found.stages.needed(rows) <= found.room_bytes)]
    assert len(beside) == min(1, len(near))
    for one in beside:
        row = np.array([names.index(cut) + 1 for cut in one])
        assert (near == row).all(1).any() and found._order(np.concatenate([row[None], near]))[0] == 0
