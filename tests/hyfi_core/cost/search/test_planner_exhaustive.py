"""The planner against all legal plans of small cases: any division, grid, cut, schedule, and recomputation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import get_args

import pytest
import torch
from torch import nn

from hyfi_core.capture.program import Program
from hyfi_core.cost.machines.machine_file import load_machine
from hyfi_core.cost.memory.forecast import FORECAST_OFF
from hyfi_core.cost.search.plan_family import PlanRequest
from hyfi_core.cost.search.planner import best_plans
from hyfi_core.cost.step.lowered_stages import LoweredPlans
from hyfi_core.cost.step.simulator import forecast_step
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import BIDIRECTIONAL, ParallelPlan, ScheduleName
from tests.harness import captured_once

WITHIN = 1.02


class Blocks(nn.Module):
    """Convolutions with the given channels, half the size after each second one, and a head."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        sizes = (3, *channels)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 1 + index % 2, 1), nn.BatchNorm2d(b), nn.ReLU())
                for index, (a, b) in enumerate(zip(sizes, channels, strict=False))
            )
        )
        self.head = nn.Linear(channels[-1], 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.blocks(images).mean((2, 3)))
        return answer


@dataclass(frozen=True)
class Case:
    """A model, an image, and a machine."""

    channels: tuple[int, ...]
    px: int
    ranks: int
    batch: int
    machine: str
    share: float  # of the memory of the fastest plan without limit

    def model(self) -> nn.Module:
        return Blocks(self.channels).train()

    def program(self, images: int) -> Program:
        return _program(self, images)

    def request(self, memory_bytes: int) -> PlanRequest:
        return PlanRequest(self.ranks, self.batch, load_machine(self.machine), memory_bytes)


@cache
def _program(case: Case, images: int) -> Program:
    return captured_once(case.model(), (images, 3, case.px, case.px), torch.float32)


def cases(count: int) -> list[Case]:
    rng = random.Random(1)
    return [
        Case(
            tuple(rng.choice((4, 8, 16, 64, 128)) for _ in range(3 if number % 4 == 3 else rng.randint(3, 4))),
            rng.choice((32, 64, 96, 256, 1024)),
            ranks=1 + number % 4,
            batch=rng.choice((1, 2, 2, 4)),
            machine=rng.choice(("cpu", "v100-lassen", "bluefield2", "h100")),
            share=rng.choice((1.3, 1.0, 0.8)),
        )
        for number in range(count)
    ]


def every_plan(case: Case, ends: tuple[str, ...]) -> Iterator[ParallelPlan]:
    """Yield all legal plans, with cuts after blocks or, with more ``ends``, after the modules in them."""
    names = [f"blocks.{index}{end}" for index in range(len(case.channels)) for end in ends]
    for replicas in divisors(case.ranks):
        if case.batch % replicas:
            continue
        for sizes in compositions(case.ranks // replicas):
            shapes = product(*([(n, size // n) for n in divisors(size)] for size in sizes))
            for grids, cuts in product(shapes, combinations(names, len(sizes) - 1)):
                for rounds, schedule in product(divisors(case.batch // replicas), get_args(ScheduleName)):
                    if schedule in BIDIRECTIONAL and rounds % 2:
                        continue
                    plan = ParallelPlan(
                        grids=grids, cuts=cuts, microbatches=rounds, schedule=schedule, replicas=replicas
                    )
                    yield plan
                    if rounds > 1 or len(sizes) > 1:
                        yield replace(plan, recompute=True)


def compositions(ranks: int) -> Iterator[tuple[int, ...]]:
    if ranks == 0:
        yield ()
    for first in range(1, ranks + 1):
        for rest in compositions(ranks - first):
            yield (first, *rest)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def best_of_all(case: Case, memory_bytes: int, ends: tuple[str, ...]) -> tuple[float, ParallelPlan | None]:
    best, chosen = float("inf"), None
    known = LoweredPlans()
    machine = load_machine(case.machine)
    for plan in every_plan(case, ends):
        program = case.program(case.batch // plan.replicas // plan.microbatches)
        try:
            found = forecast_step(program, plan, machine, lowered_plans=known)
        except RequestError:
            continue
        if FORECAST_OFF[machine.device] * max(found.memory_bytes) <= memory_bytes and found.step_s < best:
            best, chosen = found.step_s, plan
    return best, chosen


def check(case: Case, ends: tuple[str, ...]) -> float:
    """Return how much slower the planner's best plan is than the best of all."""
    free = best_plans(case.program, case.request(10**12)).plans[0]
    memory_bytes = int(case.share * FORECAST_OFF[load_machine(case.machine).device] * max(free.memory_bytes))
    wanted, plan = best_of_all(case, memory_bytes, ends)
    try:
        found = best_plans(case.program, case.request(memory_bytes)).plans[0].step_s
    except RequestError as refused:
        assert plan is None, f"{case}: {refused}, but {plan} fits"
        return 1.0
    assert found <= WITHIN * wanted, f"{case}: {found / wanted:.3f} of {plan}"
    return found / wanted


_ENDS = (".0", ".1", "")
_FEW = [next(case for case in cases(40) if case.ranks == ranks and case.batch == 2) for ranks in (2, 3)]


@pytest.mark.parametrize("case", _FEW)
def test_the_best_plan_is_as_fast_as_the_best_of_all(case: Case) -> None:
    check(case, ("",))


def test_a_cut_at_another_place_fits() -> None:
    """After a whole block, 1F1B would not fit; the sequential schedule would take 1.18 times as long."""
    check(cases(40)[25], _ENDS)


@pytest.mark.soak
@pytest.mark.parametrize("case", cases(40))
def test_forty_best_plans_are_as_fast_as_the_best_of_all(case: Case) -> None:
    check(case, _ENDS)
