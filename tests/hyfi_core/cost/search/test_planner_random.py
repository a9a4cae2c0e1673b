"""Plans of random models, machines and memories: each that is returned fits, passes the dry run, and runs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.machines.machine_file import load_machine, machine_names
from hyfi_core.cost.memory.forecast import FORECAST_OFF
from hyfi_core.cost.search.plan_family import PlanRequest
from hyfi_core.cost.search.planner import best_plans
from hyfi_core.cost.step.stage_cost import StageCosts
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.lower import lower
from hyfi_core.schedule.simulate import validate
from tests.harness import run_copies
from tests.hyfi_core.cost.search.test_planner_exhaustive import Case

_CHANNELS = ((4, 8), (8, 4, 8), (16, 16, 32), (4, 8, 16, 32))  # few: a capture takes longer than a search


def random_cases(count: int, seed: int, small: bool = False) -> Iterator[tuple[Case, PlanRequest]]:
    rng = random.Random(seed)
    for _ in range(count):
        channels, px = rng.choice(_CHANNELS[: 1 if small else None]), 32 if small else rng.choice((17, 32, 48))
        ranks, batch = rng.randint(1, 3 if small else 8), rng.choice((1, 2) if small else (1, 2, 3, 4, 8))
        case = Case(channels, px, ranks, batch, rng.choice(machine_names()), 1.0)
        memory_bytes, spill = int(10 ** rng.uniform(4.5, 7)), rng.choice((None, "memory"))
        yield case, PlanRequest(ranks, batch, load_machine(case.machine), memory_bytes, spill=spill)


def planned(case: Case, request: PlanRequest) -> list[ParallelPlan]:
    """Return the plans of a case, checked; none if the planner says that there is none."""
    try:
        found = best_plans(case.program, request, top=3)
    except RequestError as refused:
        assert "no plan" in str(refused)
        return []
    for one in found.plans:
        plan = one.plan
        assert plan.ranks == request.ranks and request.batch % (plan.replicas * plan.microbatches) == 0
        assert (
            plan.spill is not None
            or FORECAST_OFF[request.machine.device] * max(one.memory_bytes) <= request.memory_bytes + 1
        )
        program = case.program(request.batch // plan.replicas // plan.microbatches)
        edges, placement = tuple(StageCosts(program, plan, request.machine).edges), Placement.of(plan)
        actions = lower(generate(plan, placement), placement, edges, mirror=plan.mirror)
        validate(actions, placement, edges, mirror=plan.mirror, microbatches=plan.microbatches)
    return [one.plan for one in found.plans]


def runs(case: Case, plan: ParallelPlan) -> None:
    """Train one step on thread-ranks."""
    each = case.batch // plan.replicas
    shape = each, 3, case.px, case.px

    def train(comm: Communicator, model: nn.Module) -> float:
        engine = hyfi_core.parallelize(model, shape, plan, comm)
        return engine.accumulate(torch.ones(shape), torch.zeros(each, dtype=torch.long))

    losses = run_copies(case.model(), plan.ranks, train)
    assert len(set(losses)) == 1 and losses[0] > 0


def test_plans_of_random_cases_pass_the_dry_run() -> None:
    found = [planned(*each) for each in random_cases(20, seed=0, small=True)]
    assert sum(map(bool, found)) > 0


def test_a_plan_of_a_random_case_runs() -> None:
    for case, request in random_cases(4, seed=3, small=True):
        for plan in planned(case, request)[:1]:
            runs(case, plan)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_plans_of_a_thousand_random_cases_pass_the_dry_run_and_forty_run() -> None:
    left, served = 40, 0
    for number, (case, request) in enumerate(random_cases(1000, seed=1)):
        plans = planned(case, request)
        served += bool(plans)
        if plans and left and number % 10 == 0:
            runs(case, random.Random(number).choice(plans))
            left -= 1
    assert left == 0 and served > 500
