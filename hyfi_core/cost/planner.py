"""Search for the fastest plans for a model, a batch and a machine, by branch and bound.

    bounds of all plans              1.0 s   1.1 s   1.3 s   2.0 s   3.0 s   …      nothing is cut or lowered
    with the cuts between stages     1.5 s   1.1 s   1.4 s   │
    with halos, by lowering          1.8 s   1.1 s   1.5 s   │
    simulated                                1.2 s           │ stop: no other plan can be faster than 1.2 s

Every bound is at least the one before it and at most the time of the step. The plan with the lowest bound is examined
first: it gets its next bound, after the second one only if it fits, and goes back to its place. So the result is the
same as that of simulating all plans, and only those are lowered and simulated that might be the best.
Recomputation always costs time, so it is tried only if a plan needs too much memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from hyfi_core.cost.cuts import MeasuredPrograms, with_cuts
from hyfi_core.cost.lowered_stages import LoweredPlans
from hyfi_core.cost.memory import FORECAST_OFF, StageMaps
from hyfi_core.cost.plan_bounds import PlanBounds, Programs
from hyfi_core.cost.plan_family import PlanRequest, by_cells, candidates, plan_of
from hyfi_core.cost.resized import ResizedPrograms
from hyfi_core.cost.simulator import StepForecast, forecast_step, least_step_s, rank_bytes, step_s
from hyfi_core.cost.stage_cost import StageCosts
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan, Schedule
from hyfi_core.plan.strategy import Strategy, plan_for


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
    resized = ResizedPrograms(programs)
    try:
        found = _searched(resized, request, top)
    except RequestError:
        if resized.as_captured(max(1, request.batch // request.ranks)):
            raise
        return _searched(programs, request, top)
    if all(resized.as_captured(images_of(request, one.plan)) for one in found.plans):
        return found
    return _searched(programs, request, top)


def images_of(request: PlanRequest, plan: ParallelPlan) -> int:
    """Return the images of a micro-batch."""
    return request.batch // plan.replicas // plan.microbatches


def _searched(programs: Programs, request: PlanRequest, top: int) -> PlanSearch:
    search = _PlanTrials(programs, request)
    plans = list(candidates(request))
    found = search.best(plans, top)
    if not found and request.spill is not None:
        plans = list(by_cells(request))
        found = search.best(plans, top)
    if not found:
        raise RequestError(search.why_none())
    return PlanSearch(tuple(found), search.alternatives(), search.simulated, len(plans))


@dataclass(order=True)
class _Examined:
    """A plan in the queue, with the highest bound that is known; of equal ones, the first in the family.

    Attributes:
        bound_s: lower bound of the step.
        number: position in the family.
        plan: with cuts, except before the second bound.
        costs: of its stages, for the last bound; None before.
        known: number of bounds that were computed.
    """

    bound_s: float
    number: int
    plan: ParallelPlan = field(compare=False)
    costs: StageCosts | None = field(default=None, compare=False)
    known: int = field(default=1, compare=False)


class _PlanTrials:
    """Simulates plans; the model is captured once for each micro-batch size."""

    def __init__(self, programs: Programs, request: PlanRequest) -> None:
        self._programs = programs
        self._request = request
        self._least_bytes: int | None = None
        self._refusal = ""
        self._bounds = PlanBounds(programs, request.batch, request.ranks, request.machine, request.dtype)
        self._cut: dict[tuple[int, ...], tuple[str, ...] | Literal["auto"] | RequestError] = {}
        self._measured: MeasuredPrograms = {}
        self._maps: dict[tuple[int, tuple[str, ...] | Literal["auto"]], list[StageMaps]] = {}
        self._lowered: LoweredPlans = {}
        self.simulated = 0

    def best(self, plans: Iterable[ParallelPlan], top: int) -> list[StepForecast]:
        """Return the ``top`` fastest of the plans that fit, fastest first."""
        queue = self._queue(plans)
        found: list[tuple[float, int, ParallelPlan]] = []
        while queue:
            one = heapq.heappop(queue)
            if len(found) == top and one.bound_s >= found[-1][0]:
                break
            if one.costs is None:
                if self._examine(one):
                    heapq.heappush(queue, one)
                continue
            self.simulated += 1
            found = sorted([*found, (step_s(one.plan, one.costs), one.number, one.plan)])[:top]
        return [self._forecast(plan) for _, _, plan in found]

    def _queue(self, plans: Iterable[ParallelPlan]) -> list[_Examined]:
        queue: list[_Examined] = []
        for number, plan in enumerate(plans):
            try:
                queue.append(_Examined(self.bound_s(plan), number, plan))
            except RequestError as error:  # this micro-batch size cannot be captured
                self._refusal = str(error)
        heapq.heapify(queue)
        return queue

    def _examine(self, one: _Examined) -> bool:
        """Compute the next bound of a plan; return whether it is still to be considered."""
        try:
            if one.known == 1:
                one.plan = self._with_cuts(one.plan)
                bound_s = self.cut_bound_s(one.plan)
            else:
                if not self._made_to_fit(one):
                    return False
                program = self._programs(images_of(self._request, one.plan))
                one.costs = StageCosts(program, one.plan, self._request.machine, self._request.dtype, self._lowered)
                bound_s = self.least_s(one.plan, one.costs)
        except RequestError as error:
            self._refusal = str(error)
            return False
        one.known += 1
        one.bound_s = max(one.bound_s, bound_s)
        return True

    def bound_s(self, plan: ParallelPlan) -> float:
        """Return a lower bound of a plan's step."""
        return self._bounds.of(plan)

    def cut_bound_s(self, plan: ParallelPlan) -> float:
        """Return a higher bound of a plan's step, from the operators of its stages."""
        return least_step_s(plan, *self._bounds.of_stages(plan))

    def least_s(self, plan: ParallelPlan, costs: StageCosts) -> float:
        """Return a lower bound of a plan's step from the times of its stages."""
        each_s = [stage.forward_s + stage.backward_s for stage in costs.stages]
        return least_step_s(plan, each_s, max(stage.update_s for stage in costs.stages))

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
            found[name] = self._tried(plan_of(request, plan.grids, rounds, plan.replicas, schedule))
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

    def _made_to_fit(self, one: _Examined) -> bool:
        """Let a plan recompute if it does not fit without; return whether it fits."""
        for plan in (one.plan, replace(one.plan, recompute=True)):
            needed = self._needed_bytes(plan)
            if needed <= self._request.memory_bytes:
                one.plan = plan
                return True
            self._least_bytes = min(needed, self._least_bytes or needed)
        return False

    def _forecast(self, plan: ParallelPlan) -> StepForecast:
        request, program = self._request, self._programs(images_of(self._request, plan))
        return forecast_step(program, plan, request.machine, request.dtype, self._lowered)

    def _with_cuts(self, plan: ParallelPlan) -> ParallelPlan:
        """Return the plan with cuts; they depend on the sizes of its stages, and hardly on the images."""
        sizes = tuple(rows * columns for rows, columns in plan.grids)
        if sizes not in self._cut:
            free = replace(plan, memory_bytes=None)
            try:
                program = self._programs(self._request.batch // plan.replicas)
                self._cut[sizes] = with_cuts(free, program, self._request.machine, self._measured).cuts
            except RequestError as error:
                self._cut[sizes] = error
        known = self._cut[sizes]
        if isinstance(known, RequestError):
            raise known
        return replace(plan, cuts=known)

    def _needed_bytes(self, plan: ParallelPlan) -> int:
        program = self._programs(images_of(self._request, plan))
        key = images_of(self._request, plan), plan.cuts
        if key not in self._maps:
            self._maps[key] = [StageMaps.of(program, piece) for piece in self._bounds.pieces(plan)]
        most = max(rank_bytes(program, plan, self._maps[key]))
        return self._request.held_bytes + int(FORECAST_OFF * most)
