"""Search for the fastest plans for a model, a batch and a machine, by branch and bound.

    bounds of all plans              1.0 s   1.1 s   1.3 s   2.0 s   3.0 s   …      nothing is cut or lowered
    with the cuts between stages     1.4 s   1.1 s   1.3 s   │
    recomputed if it must            1.5 s   1.1 s   1.4 s   │
    with halos, stage after stage    1.8 s   1.1 s   1.5 s   │
    simulated                                1.2 s           │ stop: no other plan can be faster than 1.2 s

Every bound is at least the one before it and at most the time of the step. The plan with the lowest bound is examined
first: it gets its next bound, the third one only if it fits, and goes back to its place. So the result is the
same as that of simulating all plans, and only those are lowered and simulated that might be the best.
Recomputation always costs time, so it is tried only if a plan needs too much memory.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
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
from hyfi_core.errors import MemoryLimitError, RequestError
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


def best_plans(programs: Programs, request: PlanRequest, top: int = 1, below_s: float = math.inf) -> PlanSearch:
    """Return the fastest plans that fit.

    Args:
        programs: captures the model.
        request: ranks, batch, machine and limits.
        top: number of plans.
        below_s: only plans whose step is shorter are looked for, and alternatives are left out; there may be none.

    Raises:
        RequestError: no plan fits or works; the message says how much memory is needed, or what is not supported.
    """
    resized = ResizedPrograms(programs)
    try:
        found = _searched(resized, request, top, below_s)
    except RequestError:
        if resized.as_captured(max(1, request.batch // request.ranks)):
            raise
        return _searched(programs, request, top, below_s)
    if all(resized.as_captured(images_of(request, one.plan)) for one in found.plans):
        return found
    return _searched(programs, request, top, below_s)


def images_of(request: PlanRequest, plan: ParallelPlan) -> int:
    """Return the images of a micro-batch."""
    return request.batch // plan.replicas // plan.microbatches


def _searched(programs: Programs, request: PlanRequest, top: int, below_s: float) -> PlanSearch:
    search = _PlanTrials(programs, request)
    plans = list(candidates(request))
    found = search.best(plans, top, below_s)
    if not found and request.spill is not None:
        plans = list(by_cells(request))
        found = search.best(plans, top, below_s)
    if below_s < math.inf:
        return PlanSearch(tuple(found), {}, search.simulated, len(plans))
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
        each_s: time of a forward and a backward of each stage; for the first ones with halos, for others less.
        update_s: time of the optimizer step, or less.
        fits: whether it is known to fit, with recomputation if it needs that.
        known: number of stages of which the time with halos is known.
        costs: of its stages, once all are known; None before.
    """

    bound_s: float
    number: int
    plan: ParallelPlan = field(compare=False)
    each_s: list[float] = field(default_factory=list, compare=False)
    update_s: float = field(default=0.0, compare=False)
    fits: bool = field(default=False, compare=False)
    known: int = field(default=0, compare=False)
    costs: StageCosts | None = field(default=None, compare=False)


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

    def best(self, plans: Iterable[ParallelPlan], top: int, below_s: float = math.inf) -> list[StepForecast]:
        """Return the ``top`` fastest of the plans that fit and take less than ``below_s``, fastest first."""
        queue = self._queue(plans)
        found: list[tuple[float, int, ParallelPlan]] = []
        while queue:
            one = heapq.heappop(queue)
            if one.bound_s >= (found[-1][0] if len(found) == top else below_s):
                break
            if one.costs is None:
                if self._examine(one):
                    heapq.heappush(queue, one)
                continue
            self.simulated += 1
            seconds = step_s(one.plan, one.costs)
            if seconds < below_s:
                found = sorted([*found, (seconds, one.number, one.plan)])[:top]
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
            if not one.each_s:
                one.plan = self._with_cuts(one.plan)
                bound_s = self._bounded(one)
            elif not one.fits:
                if not self._made_to_fit(one):
                    return False
                one.fits, bound_s = True, self._bounded(one)
            elif one.known + 1 < one.plan.stages:
                (stage,) = self._costs(one.plan, one.known).stages
                one.each_s[one.known] = stage.forward_s + stage.backward_s
                one.update_s = max(one.update_s, stage.update_s)
                bound_s = self.least_s(one.plan, one.each_s, one.update_s)
                one.known += 1
            else:
                one.costs = self._costs(one.plan)
                each_s = [stage.forward_s + stage.backward_s for stage in one.costs.stages]
                bound_s = self.least_s(one.plan, each_s, max(stage.update_s for stage in one.costs.stages))
        except RequestError as error:
            self._refusal = str(error)
            if isinstance(error, MemoryLimitError):
                self._least_bytes = min(error.least_bytes, self._least_bytes or error.least_bytes)
            return False
        one.bound_s = max(one.bound_s, bound_s)
        return True

    def _bounded(self, one: _Examined) -> float:
        """Set the times of a plan's stages to lower bounds, and return one of its step."""
        each_s, one.update_s = self._bounds.of_stages(one.plan)
        one.each_s = list(each_s)
        return self.cut_bound_s(one.plan)

    def _costs(self, plan: ParallelPlan, only: int | None = None) -> StageCosts:
        """Return the costs of a plan's stages, or of one of them; those before it are lowered, too."""
        request, program = self._request, self._programs(images_of(self._request, plan))
        return StageCosts(program, plan, request.machine, request.dtype, self._lowered, only, request.spills)

    def bound_s(self, plan: ParallelPlan) -> float:
        """Return a lower bound of a plan's step."""
        return self._bounds.of(plan)

    def cut_bound_s(self, plan: ParallelPlan) -> float:
        """Return a higher bound of a plan's step, from the operators of its stages."""
        return least_step_s(plan, *self._bounds.of_stages(plan))

    def least_s(self, plan: ParallelPlan, each_s: Sequence[float], update_s: float) -> float:
        """Return a lower bound of a plan's step from the times of its stages; see ``least_step_s``."""
        return least_step_s(plan, each_s, update_s)

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
        return forecast_step(program, plan, request.machine, request.dtype, self._lowered, request.spills)

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
