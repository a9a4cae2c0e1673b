"""Search for the fastest plans for a model, a batch and a machine, by branch and bound.

    plans of the family, by lower bound    1.0 s   1.1 s   1.3 s   2.0 s   …
    simulated                              1.6 s   1.2 s   1.4 s   │ stop: no later plan can be faster than 1.6 s

The lower bound is the time of all operators, divided over the ranks, and of the pipeline's filling. Plans are examined
in ascending order of the bound, until it is above the slowest plan to be returned: first whether they fit, then by the
time of their stages (a higher bound), then by a dry run. So the result is the same as that of simulating all plans.
Recomputation always costs time, so it is tried only if a plan needs too much memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from hyfi_core.cost.cuts import with_cuts
from hyfi_core.cost.lowered_stages import LoweredPlans
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.memory import FORECAST_OFF
from hyfi_core.cost.plan_bounds import PlanBounds, Programs
from hyfi_core.cost.simulator import StepForecast, forecast_step, least_step_s, rank_bytes, step_s
from hyfi_core.cost.stage_cost import StageCosts
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan, Schedule
from hyfi_core.plan.strategy import Strategy, plan_for, squarest

_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "chimera", "gems_master")
_ALL_COMPOSITIONS = 5
"""Up to this number of ranks of a replica, every division into stages is tried; beyond it, only regular ones."""
_MOST_UNEQUAL = 16
"""Up to this number of ranks of a replica, stages of unequal sizes are tried with two directions."""
_MOST_STAGES = 8
_MOST_ROUNDS = 8
"""Largest number of micro-batches, divided by the number of stages."""
_CELLS = ((2, 2), (4, 4), (8, 8), (16, 16))


@dataclass(frozen=True)
class PlanRequest:
    """The input of a plan search.

    Attributes:
        ranks: number of trainers, all of which are used.
        batch: images of a step, over all replicas.
        machine: the machine model.
        memory_bytes: memory limit of a rank.
        held_bytes: the part of it that a rank uses before its first step.
        dtype: of convolutions and matrix products under autocast; None: the dtype of their values.
        base: plan with the fields that the search does not choose.
        spill: ``plan.spill`` to try if no plan fits otherwise; None: none.
    """

    ranks: int
    batch: int
    machine: MachineModel
    memory_bytes: int
    held_bytes: int = 0
    dtype: str | None = None
    base: ParallelPlan = field(default_factory=lambda: ParallelPlan(grids=((1, 1),)))
    spill: str | None = None


@dataclass(frozen=True)
class PlanSearch:
    """The result of a plan search.

    Attributes:
        plans: the fastest plans, in order; each has been lowered and its schedule simulated.
        alternatives: name of a simple strategy -> its forecast, or the reason why it does not work.
        simulated: number of simulated plans.
        candidates: number of plans in the family.
    """

    plans: tuple[StepForecast, ...]
    alternatives: Mapping[str, StepForecast | str]
    simulated: int
    candidates: int


def best_plans(programs: Programs, request: PlanRequest, top: int = 1) -> PlanSearch:
    """Return the fastest plans that fit.

    Args:
        programs: captures the model.
        request: ranks, batch, machine and limits.
        top: number of plans.

    Raises:
        RequestError: no plan fits or works; the message says how much memory is needed, or what is not supported.
    """
    search = _PlanTrials(programs, request)
    plans = list(candidates(request))
    found = search.best(plans, top)
    if not found and request.spill is not None:
        plans = list(_by_cells(request))
        found = search.best(plans, top)
    if not found:
        raise RequestError(search.why_none())
    return PlanSearch(tuple(found), search.alternatives(), search.simulated, len(plans))


def candidates(request: PlanRequest) -> Iterator[ParallelPlan]:
    """Yield every plan of the family: replicas, stages, grids, micro-batches, schedules; without recomputation."""
    for replicas in _divisors(request.ranks):
        if request.batch % replicas:
            continue
        for grids in _arrangements(request.ranks // replicas):
            for rounds in _divisors(request.batch // replicas):
                if rounds > _MOST_ROUNDS * len(grids) > _MOST_ROUNDS:
                    continue  # the bubble is small already
                for schedule in _schedules(grids):
                    if schedule == "1f1b" or rounds % 2 == 0:
                        yield _made(request, grids, rounds, replicas, schedule)


def _schedules(grids: tuple[tuple[int, int], ...]) -> tuple[Schedule, ...]:
    """Return the schedules to try; in two directions, large stages of unequal sizes would wait for each other."""
    sizes = {rows * columns for rows, columns in grids}
    both = len(grids) > 1 and (len(sizes) == 1 or sum(rows * columns for rows, columns in grids) <= _MOST_UNEQUAL)
    return _SCHEDULES if both else _SCHEDULES[:1]


def _made(
    request: PlanRequest, grids: tuple[tuple[int, int], ...], rounds: int, replicas: int, schedule: Schedule
) -> ParallelPlan:
    return replace(
        request.base,
        grids=grids,
        cuts="auto",
        microbatches=rounds,
        schedule=schedule,
        replicas=replicas,
        interleave=1,
        recompute=False,
        mirror="all_reduce",
        memory_bytes=None,
        shares=None,
        cells=None,
        spill=None,
        branches=1,
    )


def _by_cells(request: PlanRequest) -> Iterator[ParallelPlan]:
    for plan, cells in product(candidates(request), _CELLS):
        if plan.stages == 1:
            yield replace(plan, cells=cells, spill=request.spill, memory_bytes=request.memory_bytes)


def _arrangements(ranks: int) -> list[tuple[tuple[int, int], ...]]:
    """Return divisions of the ranks of a replica into stages with grids."""
    found: dict[tuple[tuple[int, int], ...], None] = {}
    for sizes in _compositions(ranks):
        found[tuple(squarest(size) for size in sizes)] = None
        found[tuple((1, size) for size in sizes)] = None
    return list(found)


def _compositions(ranks: int) -> Iterator[tuple[int, ...]]:
    if ranks <= _ALL_COMPOSITIONS:
        yield from _all_compositions(ranks)
        return
    for stages in range(1, min(ranks, _MOST_STAGES) + 1):
        if ranks % stages == 0:
            yield (ranks // stages,) * stages
        yield (ranks - stages + 1, *(1,) * (stages - 1))
    halves, left = [], ranks
    while left > 1:
        halves.append(left - left // 2)
        left //= 2
        yield (*halves, left)


def _all_compositions(ranks: int) -> Iterator[tuple[int, ...]]:
    if ranks == 0:
        yield ()
    for first in range(1, ranks + 1):
        for rest in _all_compositions(ranks - first):
            yield (first, *rest)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


class _PlanTrials:
    """Simulates plans; the model is captured once for each micro-batch size."""

    def __init__(self, programs: Programs, request: PlanRequest) -> None:
        self._programs = programs
        self._request = request
        self._least_bytes: int | None = None
        self._refusal = ""
        self._bounds = PlanBounds(programs, request.batch, request.ranks, request.machine, request.dtype)
        self._cut: dict[tuple[int, ...], tuple[str, ...] | Literal["auto"] | RequestError] = {}
        self._lowered: LoweredPlans = {}
        self.simulated = 0

    def best(self, plans: list[ParallelPlan], top: int) -> list[StepForecast]:
        """Return the ``top`` fastest of the plans that fit, fastest first."""
        found: list[tuple[float, int, ParallelPlan]] = []
        for bound_s, number, plan in sorted((self.bound_s(plan), n, plan) for n, plan in enumerate(plans)):
            limit_s = found[-1][0] if len(found) == top else math.inf
            if bound_s >= limit_s:
                break
            one = self._fitting(plan)
            if one is None:
                continue
            seconds = self._step_s(one, limit_s)
            if seconds < limit_s:
                found = sorted([*found, (seconds, number, one)])[:top]
        return [self._forecast(plan) for _, _, plan in found]

    def bound_s(self, plan: ParallelPlan) -> float:
        """Return a lower bound of a plan's step."""
        return self._bounds.of(plan)

    def alternatives(self) -> dict[str, StepForecast | str]:
        """Return the forecasts of simple strategies, or the reasons why they do not work."""
        request, batch = self._request, self._request.batch
        found: dict[str, StepForecast | str] = {}
        words: dict[str, tuple[Strategy, Schedule, int]] = {
            "data parallel": ("data", "1f1b", batch),
            "spatial only": ("spatial", "1f1b", batch),
            "layer parallel": ("model", "sequential", batch),
            "pipeline": ("model", "1f1b", batch),
        }
        for name, (strategy, schedule, images) in words.items() if request.ranks > 1 else ():
            plan = plan_for(strategy, request.ranks, images)
            if batch % plan.replicas:
                found[name] = f"a batch of {batch} cannot be divided among {plan.replicas} replicas"
                continue
            rounds = 1 if schedule == "sequential" else plan.microbatches
            found[name] = self._tried(_made(request, plan.grids, rounds, plan.replicas, schedule))
        return found

    def why_none(self) -> str:
        """Return the message if no plan was found."""
        if self._least_bytes is None:
            return f"no plan can be run: {self._refusal}"
        return (
            f"no plan of {self._request.ranks} rank(s) fits into {self._request.memory_bytes / 1e9:.3g} GB a rank; the "
            f"smallest needs {self._least_bytes / 1e9:.3g} GB: give more memory (--memory), more ranks (--ranks), or "
            "smaller images"
        )

    def _tried(self, plan: ParallelPlan) -> StepForecast | str:
        try:
            cut = self._with_cuts(plan)
            needed = self._needed_bytes(cut)
            if needed > self._request.memory_bytes:
                return f"needs {needed / 1e9:.3g} GB a rank"
            return self._forecast(cut)
        except RequestError as error:
            return f"refused: {error}"

    def _fitting(self, plan: ParallelPlan) -> ParallelPlan | None:
        """Return a plan with its cuts, with recomputation if it does not fit without; None if it does not work."""
        try:
            cut = self._with_cuts(plan)
            for one in (cut, replace(cut, recompute=True)):
                needed = self._needed_bytes(one)
                if needed <= self._request.memory_bytes:
                    return one
                self._least_bytes = min(needed, self._least_bytes or needed)
        except RequestError as error:
            self._refusal = str(error)
        return None

    def _step_s(self, plan: ParallelPlan, limit_s: float) -> float:
        """Return the time of a step; infinity if the plan does not work or is certainly not below the limit."""
        request = self._request
        try:
            program = self._programs(self._images(plan))
            costs = StageCosts(program, plan, request.machine, request.dtype, self._lowered)
        except RequestError as error:
            self._refusal = str(error)
            return math.inf
        if self.least_s(plan, costs) >= limit_s:
            return math.inf
        self.simulated += 1
        return step_s(plan, costs)

    def least_s(self, plan: ParallelPlan, costs: StageCosts) -> float:
        """Return a lower bound of a plan's step from the times of its stages."""
        return least_step_s(plan, costs)

    def _forecast(self, plan: ParallelPlan) -> StepForecast:
        request, program = self._request, self._programs(self._images(plan))
        return forecast_step(program, plan, request.machine, request.dtype, self._lowered)

    def _with_cuts(self, plan: ParallelPlan) -> ParallelPlan:
        """Return the plan with cuts; they depend on the sizes of its stages, and hardly on the images."""
        sizes = tuple(rows * columns for rows, columns in plan.grids)
        if sizes not in self._cut:
            try:
                program = self._programs(self._images(plan))
                self._cut[sizes] = with_cuts(replace(plan, memory_bytes=None), program, self._request.machine).cuts
            except RequestError as error:
                self._cut[sizes] = error
        known = self._cut[sizes]
        if isinstance(known, RequestError):
            raise known
        return replace(plan, cuts=known)

    def _needed_bytes(self, plan: ParallelPlan) -> int:
        most = max(rank_bytes(self._programs(self._images(plan)), plan))
        return self._request.held_bytes + (most if plan.spill is not None else int(FORECAST_OFF * most))

    def _images(self, plan: ParallelPlan) -> int:
        return self._request.batch // plan.replicas // plan.microbatches
