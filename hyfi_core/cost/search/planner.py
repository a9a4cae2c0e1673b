"""Search for the fastest plans for a model, a batch and a machine, by branch and bound.

    bounds of all plans              1.0 s         1.1 s   1.3 s   2.0 s   3.0 s   …      nothing is cut or lowered
    with cuts that fit               1.5 s         1.1 s   1.4 s   │
    recomputing                      1.4 s                         │
    with halos at least              1.7 s         1.1 s   1.5 s   │
    with halos, stage after stage    1.8 s 1.6 s   1.1 s   1.5 s   │
    simulated                                      1.2 s           │ stop: no other plan can be faster than 1.2 s

Every bound is at least the one before it and at most the time of the step. The plan with the lowest bound is examined
first: it gets its next bound and goes back to its place. So the result is the same as that of simulating all plans, and
only those are lowered and simulated that might be the best. Recomputation and cuts at other places than the fastest
cost time, so they are tried only if a plan needs too much memory, each as a plan of its own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hyfi_core.cost.memory.forecast import enough_gb
from hyfi_core.cost.search.cuts import MeasuredPrograms, with_cuts
from hyfi_core.cost.search.plan_bounds import PlanBounds, Programs
from hyfi_core.cost.search.plan_family import PlanRequest, by_cells, candidates, plan_of
from hyfi_core.cost.search.plan_memory import PlanMemory, StudiedMemory
from hyfi_core.cost.search.resized import ResizedPrograms
from hyfi_core.cost.search.wait_bounds import WaitBounds
from hyfi_core.cost.step.lowered_stages import LoweredPlans
from hyfi_core.cost.step.simulator import StepForecast, forecast_step, least_step_s, step_s
from hyfi_core.cost.step.stage_cost import StageCosts
from hyfi_core.errors import MemoryLimitError, RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan, ScheduleName
from hyfi_core.plan.strategy import Strategy, plan_for


@dataclass(frozen=True)
class PlanSearch:
    """The result of a plan search.

    Attributes:
        plans: the fastest plans, in order; each has been lowered and its schedule simulated.
        alternatives: name of a simple strategy -> its forecast, or the reason why it does not work.
        simulated: number of simulated plans.
        candidates: number of plans in the family, and of further ways in which those examined fit.
    """

    plans: tuple[StepForecast, ...]
    alternatives: Mapping[str, StepForecast | str]
    simulated: int
    candidates: int


@dataclass
class StudiedModel:
    """A model, and results that searches with the same batch, machine and dtype share.

    Attributes:
        programs: captures the model, or derives its programs from others.
        measured: costs by which cuts are chosen.
        lowered: stages that have been lowered.
        memory: memory of stages.
    """

    programs: Programs
    measured: MeasuredPrograms = field(default_factory=dict)
    lowered: LoweredPlans = field(default_factory=LoweredPlans)
    memory: StudiedMemory = field(default_factory=StudiedMemory)
    _bounds: dict[bool, PlanBounds] = field(default_factory=dict)
    _waits: dict[bool, WaitBounds] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget the lowered stages, most of the memory of a search."""
        self.lowered.clear()
        self._waits.clear()

    def waits(self, request: PlanRequest) -> WaitBounds:
        """Return the lower bounds of what grids add to stages; created once, as in ``bounds``."""
        crowded = request.ranks > 1
        if crowded not in self._waits:
            self._waits[crowded] = WaitBounds(self.bounds(request), request, self.lowered)
        return self._waits[crowded]

    def bounds(self, request: PlanRequest) -> PlanBounds:
        """Return the bounds of plans for a request; they depend on whether ranks share nodes, not on their number."""
        crowded = request.ranks > 1
        if crowded not in self._bounds:
            self._bounds[crowded] = PlanBounds(
                self.programs, request.batch, request.ranks, request.machine, request.dtype
            )
        return self._bounds[crowded]


class ModelStudies:
    """A model for several searches with the same batch, machine and dtype: with derived and with captured programs.

    Args:
        programs: captures the model.
    """

    def __init__(self, programs: Programs) -> None:
        self.resized = ResizedPrograms(programs)
        self.derived, self.captured = StudiedModel(self.resized), StudiedModel(programs)

    def clear(self) -> None:
        """Forget the lowered stages, most of the memory of a search."""
        self.derived.clear()
        self.captured.clear()


def best_plans(
    programs: Programs,
    request: PlanRequest,
    top: int = 1,
    below_s: float = math.inf,
    studies: ModelStudies | None = None,
) -> PlanSearch:
    """Return the fastest plans that fit.

    Args:
        programs: captures the model.
        request: ranks, batch, machine and limits.
        top: number of plans.
        below_s: return only plans with a shorter step, perhaps none, and no alternatives.
        studies: results of earlier searches with the same programs, batch, machine and dtype.

    Raises:
        RequestError: no plan fits or works; the message says how much memory is needed, or what is not supported.
    """
    studies = ModelStudies(programs) if studies is None else studies
    resized = studies.resized
    # First with derived programs, which are quick to make. If one that matters differs from a capture with the same
    # number of images, search again with captures.
    try:
        result = _searched(studies.derived, request, top, below_s)
    except RequestError:
        if resized.as_captured(max(1, request.batch // request.ranks)):
            raise
        return _searched(studies.captured, request, top, below_s)
    if all(resized.as_captured(images_of(request, forecast.plan)) for forecast in result.plans):
        return result
    return _searched(studies.captured, request, top, below_s)


def images_of(request: PlanRequest, plan: ParallelPlan) -> int:
    """Return the images of a micro-batch."""
    return request.batch // plan.replicas // plan.microbatches


def _searched(model: StudiedModel, request: PlanRequest, top: int, below_s: float) -> PlanSearch:
    """Return the fastest plans of the family that take less than ``below_s``.

    Raises:
        RequestError: no plan fits, and there is no limit ``below_s``.
    """
    search = _PlanTrials(model, request)
    plans = list(candidates(request))
    fastest = search.best(plans, top, below_s)
    # Cells that spill are slow: only where nothing else fits.
    if not fastest and request.spill is not None:
        plans = list(by_cells(request))
        fastest = search.best(plans, top, below_s)
    if not fastest and below_s == math.inf:
        raise RequestError(search.why_none())
    return PlanSearch(
        plans=tuple(fastest),
        alternatives=search.alternatives() if below_s == math.inf else {},
        simulated=search.simulated,
        candidates=len(plans) + search.further,
    )


@dataclass(order=True)
class _Examined:
    """A plan in the queue, ordered by its best lower bound so far, then by its position in the family.

    Attributes:
        bound_s: lower bound of the step.
        number: (position in the family, index of the way in which this plan fits).
        plan: the plan; from the second bound on, with cuts and recomputation with which it fits.
        each_s: lower bound of a forward and a backward of each stage; empty before the second bound.
        update_s: lower bound of the optimizer step.
        has_waits: whether ``each_s`` contains the least time that grids add.
        lowered: number of stages, from the first, whose ``each_s`` is exact: they have been lowered.
        costs: the costs of its stages once all are exact; None before.
    """

    bound_s: float
    number: tuple[int, int]
    plan: ParallelPlan = field(compare=False)
    each_s: list[float] = field(default_factory=list, compare=False)
    update_s: float = field(default=0.0, compare=False)
    has_waits: bool = field(default=False, compare=False)
    lowered: int = field(default=0, compare=False)
    costs: StageCosts | None = field(default=None, compare=False)


class _PlanTrials:
    """Simulates plans; the model is captured once for each micro-batch size.

    Attributes:
        simulated: number of plans that were simulated.
        further: number of ways in which plans fit, beyond the first of each.
    """

    def __init__(self, model: StudiedModel, request: PlanRequest) -> None:
        self._programs = model.programs
        self._request = request
        self._last_refusal = ""
        self._bounds, self._wait_bounds = model.bounds(request), model.waits(request)
        # Number of ranks of each stage -> cuts of such plans, or why there are none.
        self._cuts_of: dict[tuple[int, ...], tuple[str, ...] | Literal["auto"] | RequestError] = {}
        self._measured = model.measured
        self._memory = PlanMemory(model.programs, request, self._bounds, model.memory)
        self._lowered = model.lowered
        self.simulated = self.further = 0  # counts, see the class

    def best(self, plans: Iterable[ParallelPlan], top: int, below_s: float = math.inf) -> list[StepForecast]:
        """Return the ``top`` fastest of the plans that fit and take less than ``below_s``, fastest first."""
        queue = self._queue(plans)
        fastest: list[tuple[float, tuple[int, int], ParallelPlan]] = []
        while queue:
            examined = heapq.heappop(queue)
            # All plans left in the queue have at least this bound, so none can be faster. Of equal times the first in
            # the family counts, so the result does not depend on the order of the queue.
            slowest = fastest[-1][:2] if len(fastest) == top else (below_s, (0, 0))
            if (examined.bound_s, examined.number) >= slowest:
                break
            if examined.costs is None:
                for each in self._examined(examined):
                    heapq.heappush(queue, each)
                continue
            self.simulated += 1
            seconds = step_s(examined.plan, examined.costs)
            if seconds < below_s:
                fastest = sorted([*fastest, (seconds, examined.number, examined.plan)])[:top]
        return [self._forecast(plan) for _, _, plan in fastest]

    def _queue(self, plans: Iterable[ParallelPlan]) -> list[_Examined]:
        """Return the plans as a heap with the lowest bound first."""
        queue: list[_Examined] = []
        for number, plan in enumerate(plans):
            try:
                queue.append(_Examined(self.bound_s(plan), (number, 0), plan))  # 0: no way in which it fits yet
            except RequestError as error:  # this micro-batch size cannot be captured
                self._last_refusal = str(error)
        heapq.heapify(queue)
        return queue

    def _examined(self, examined: _Examined) -> list[_Examined]:
        """Compute the next lower bound of a plan's step; return the plan, each way in which it fits, or none.

        Each bound takes longer and is closer. Its basis, in this order: cuts that fit; the least time that grids add;
        one stage after the other lowered; all stages lowered.
        """
        try:
            if not examined.each_s:  # seconds of a forward and a backward of each stage; none before the plan is cut
                return list(self._that_fit(examined))
            if not examined.has_waits:
                added = self.waits_s(examined.plan)
                examined.each_s = [seconds + more_s for seconds, more_s in zip(examined.each_s, added, strict=True)]
                examined.has_waits, bound_s = True, self.least_s(examined.plan, examined.each_s, examined.update_s)
            # Before stages are lowered, which takes longer than to count the bytes of exactly these stages.
            elif not examined.lowered and not self._memory.fits(examined.plan):
                return []
            # One stage at a time: the first may show already that the plan is not among the best.
            elif examined.lowered + 1 < examined.plan.stages:
                (stage,) = self._costs(examined.plan, examined.lowered).stages
                examined.each_s[examined.lowered] = stage.forward_s + stage.backward_s
                examined.update_s = max(examined.update_s, stage.update_s)
                bound_s = self.least_s(examined.plan, examined.each_s, examined.update_s)
                examined.lowered += 1
            else:
                examined.costs = self._costs(examined.plan)
                each_s = [stage.forward_s + stage.backward_s for stage in examined.costs.stages]
                bound_s = self.least_s(examined.plan, each_s, max(stage.update_s for stage in examined.costs.stages))
        except RequestError as error:
            self._last_refusal = str(error)
            if isinstance(error, MemoryLimitError):
                self._memory.counted(error.least_bytes)
            return []
        examined.bound_s = max(examined.bound_s, bound_s)
        return [examined]

    def _that_fit(self, examined: _Examined) -> Iterator[_Examined]:
        """Yield each way in which a plan fits, with a bound from the operators of its stages."""
        for way, plan in enumerate(self._memory.ways(self._with_cuts(examined.plan))):
            try:
                each_s, update_s = self._bounds.of_stages(plan)
                bound_s = max(examined.bound_s, self.cut_bound_s(plan))
            except RequestError as error:  # a buffer would be used in two stages
                self._last_refusal = str(error)
                continue
            self.further += way > 0  # for the number of plans: each plan counts already with its first way
            yield _Examined(bound_s, (examined.number[0], way), plan, list(each_s), update_s)

    def _costs(self, plan: ParallelPlan, only: int | None = None) -> StageCosts:
        """Return the costs of all stages of a plan, or of stage ``only``, for which earlier stages are lowered, too."""
        request, program = self._request, self._programs(images_of(self._request, plan))
        return StageCosts(program, plan, request.machine, request.dtype, self._lowered, only, request.spills)

    def bound_s(self, plan: ParallelPlan) -> float:
        """Return a lower bound of a plan's step."""
        return self._bounds.of(plan)

    def cut_bound_s(self, plan: ParallelPlan) -> float:
        """Return a lower bound of a plan's step that uses its cuts, so it is closer than ``bound_s``."""
        return least_step_s(plan, *self._bounds.of_stages(plan))

    def waits_s(self, plan: ParallelPlan) -> tuple[float, ...]:
        """Return, for each stage, the least seconds that its grid adds to a micro-batch."""
        return self._wait_bounds.of_stages(self._programs(images_of(self._request, plan)), plan)

    def least_s(self, plan: ParallelPlan, each_s: Sequence[float], update_s: float) -> float:
        """Return a lower bound of a plan's step from the times of its stages; see ``least_step_s``."""
        return least_step_s(plan, each_s, update_s)

    def alternatives(self) -> dict[str, StepForecast | str]:
        """Return name of a simple strategy -> its forecast, or the reason why it does not work."""
        request, batch = self._request, self._request.batch
        forecasts: dict[str, StepForecast | str] = {}
        simple: dict[str, tuple[Strategy, ScheduleName]] = {
            "data parallel": ("data", "1f1b"),
            "spatial only": ("spatial", "1f1b"),
            "layer parallel": ("model", "sequential"),
            "pipeline": ("model", "1f1b"),
        }
        for name, (strategy, schedule) in simple.items() if request.ranks > 1 else ():
            plan = plan_for(strategy, request.ranks, batch)
            if batch % plan.replicas:
                forecasts[name] = f"a batch of {batch} cannot be divided among {plan.replicas} replicas"
                continue
            rounds = 1 if schedule == "sequential" else plan.microbatches
            forecasts[name] = self._tried(plan_of(request, plan.grids, rounds, plan.replicas, schedule))
        return forecasts

    def why_none(self) -> str:
        """Return the message if no plan was found."""
        least_bytes = self._memory.least_bytes()
        if least_bytes is None:
            return f"no plan can be run: {self._last_refusal}"
        return (
            f"no plan of {self._request.ranks} rank(s) fits into {self._request.memory_bytes / 1e9:.3g} GB a rank; the "
            f"smallest needs {enough_gb(least_bytes)} GB: give more memory (--memory), more ranks (--ranks), or "
            "smaller images"
        )

    def _tried(self, plan: ParallelPlan) -> StepForecast | str:
        """Return the forecast of a plan with the best cuts; a text if it does not fit or is refused."""
        try:
            cut = self._with_cuts(plan)
            rank_bytes = self._memory.needed_bytes(cut)
            if rank_bytes > self._request.memory_bytes:
                return f"needs {rank_bytes / 1e9:.3g} GB a rank"
            return self._forecast(cut)
        except RequestError as error:
            return f"refused: {error}"

    def _forecast(self, plan: ParallelPlan) -> StepForecast:
        request, program = self._request, self._programs(images_of(self._request, plan))
        return forecast_step(program, plan, request.machine, request.dtype, self._lowered, request.spills)

    def _with_cuts(self, plan: ParallelPlan) -> ParallelPlan:
        """Return the plan with its fastest cuts; plans with the same numbers of ranks in their stages share them."""
        sizes = tuple(rows * columns for rows, columns in plan.grids)
        if sizes not in self._cuts_of:
            without_limit = replace(plan, memory_bytes=None)
            try:
                # From the program for a replica's whole batch: the size of micro-batches hardly changes the cuts.
                program = self._programs(self._request.batch // plan.replicas)
                self._cuts_of[sizes] = with_cuts(without_limit, program, self._request.machine, self._measured).cuts
            except RequestError as error:
                self._cuts_of[sizes] = error
        cuts = self._cuts_of[sizes]
        if isinstance(cuts, RequestError):
            raise cuts
        return replace(plan, cuts=cuts)
