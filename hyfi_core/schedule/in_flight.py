"""Micro-batches in flight: forward done, backward not, while each action of a rank runs.

    rank 0     F0  F1  F2  B0  F3  B1  B2  B3       1F1B, three stages
    waiting     0   1   2   2   2   2   1   0       other micro-batches, while the action runs

Micro-batches that wait take memory, and so do gradients, which exist from a stage's first backward on. Few moments can
need the most: those for which no other moment of the same stage has at least as much of both. Where the last stage's
backward follows its forward at once, nothing waits: to recompute it takes time and saves nothing. Where a backward has
two parts, what its weights need waits between I and W.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod

from hyfi_core.plan.parallel_plan import ParallelPlan, ScheduleName
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import COMPUTE, TO_INPUTS, TO_WEIGHTS, Action, Verb
from hyfi_core.schedule.generate import Hosted, generate


@dataclass(frozen=True, slots=True)
class Moment:
    """A forward or backward of a rank, and what each stage on the rank keeps in memory meanwhile.

    Attributes:
        running: index, among the rank's stages, of the one that runs.
        waiting: for each stage, micro-batches in flight between forward and backward, without the one that runs.
        gradients: for each stage, whether it has gradients: a B or W of it has been done before.
        between: for each stage, micro-batches between the two parts of a backward, without the one that runs; empty if
            no backward is divided.
    """

    running: int
    waiting: tuple[int, ...]
    gradients: tuple[bool, ...]
    between: tuple[int, ...] = ()

    def in_flight(self, place: int) -> int:
        """Return how many micro-batches of the rank's stage with this index have begun and not ended."""
        between = self.between[place] if self.between else 0
        return self.waiting[place] + between + (self.running == place)

    def covers(self, other: Moment) -> bool:
        """Whether ``other`` cannot need more memory: the same stage runs, and here each stage has at least as much."""
        return (
            self.running == other.running
            and all(a >= b for a, b in zip(self.waiting, other.waiting, strict=True))
            and all(a >= b for a, b in zip(self.gradients, other.gradients, strict=True))
            and all(a >= b for a, b in zip(self.between, other.between, strict=True))
        )


def fullest_moments(plan: ParallelPlan) -> dict[Hosted, tuple[Moment, ...]]:
    """Return stages of a rank -> the moments at which ranks with these stages may need the most memory.

    Args:
        plan: its cuts do not matter.

    Raises:
        RequestError: as ``generate``.
    """
    return _moments(_sizes(plan), plan.schedule, plan.microbatches, plan.interleave)


def microbatches_in_flight(plan: ParallelPlan, stage: int) -> int:
    """Return the most micro-batches that one direction of a stage has begun and whose backward has not ended."""
    return max(
        moment.in_flight(place)
        for hosted, moments in fullest_moments(plan).items()
        for place, (hosted_stage, _) in enumerate(hosted)
        if hosted_stage == stage
        for moment in moments
    )


def _sizes(plan: ParallelPlan) -> tuple[int, ...]:
    """Return the number of ranks of each grid; 1 for each if the numbers do not change which stages a rank has.

    With 1, few ranks have to be scheduled, and many plans share one schedule.
    """
    sizes = tuple(map(prod, plan.grids))
    # Direction 1 counts ranks from the end: if sizes are not symmetric, ranks of one grid hold different stages.
    sizes_matter = plan.directions > 1 and sizes != sizes[::-1]
    return sizes if sizes_matter else (1,) * len(sizes)


def followed_at_once(actions: Iterable[Action], last: int) -> frozenset[Action]:
    """Return the forwards of the last stage after which the rank computes their own backward next.

    Args:
        actions: actions of the rank, in order.
        last: number of the last stage, whose backward needs no message.
    """
    computed = [action for action in actions if action.verb in COMPUTE]
    return frozenset(
        action
        for action, following in pairwise(computed)
        if action.stage == last
        and action.verb is Verb.F
        and following in (replace(action, verb=Verb.B), replace(action, verb=Verb.I))
    )


def recomputes(plan: ParallelPlan, stage: int) -> bool:
    """Return whether a stage recomputes activations: the plan says so, and some of them wait for their backward."""
    if not plan.recomputes(stage):
        return False
    if plan.cells is not None:
        return True  # cells of a rank take turns, so that all forwards wait
    return stage in _stages_that_wait(_sizes(plan), plan.schedule, plan.microbatches, plan.interleave)


@lru_cache(maxsize=4096)
def _stages_that_wait(
    sizes: tuple[int, ...], schedule: ScheduleName, microbatches: int, interleave: int
) -> frozenset[int]:
    """Return the stages where some forward is not followed by its own backward at once."""
    last, stages = len(sizes) * interleave - 1, set[int]()
    for actions in _rows(sizes, schedule, microbatches, interleave).values():
        at_once = followed_at_once(actions, last)
        stages.update(action.stage for action in actions if action.verb is Verb.F and action not in at_once)
    return frozenset(stages)


@lru_cache(maxsize=4096)
def _moments(
    sizes: tuple[int, ...], schedule: ScheduleName, microbatches: int, interleave: int
) -> dict[Hosted, tuple[Moment, ...]]:
    rows = _rows(sizes, schedule, microbatches, interleave)
    return {hosted: tuple(_fullest(_all(hosted, actions))) for hosted, actions in rows.items()}


def _rows(
    sizes: tuple[int, ...], schedule: ScheduleName, microbatches: int, interleave: int
) -> dict[Hosted, tuple[Action, ...]]:
    """Return stages -> the actions of a rank that holds them, on grids of these numbers of ranks."""
    plan = ParallelPlan(
        tuple((1, size) for size in sizes), microbatches=microbatches, schedule=schedule, interleave=interleave
    )
    placement = Placement.of(plan)
    rows = generate(plan, placement).actions
    return {placement.hosted(rank): rows[rank] for rank in range(placement.size)}


def _all(hosted: Hosted, actions: Sequence[Action]) -> Iterator[Moment]:
    """Yield the moments of a rank; with a single stage only its backwards, which need more than its forwards."""
    # Of each stage: micro-batches between F and B or I; those between I and W; whether it has gradients.
    waiting, between, gradients = [0] * len(hosted), [0] * len(hosted), [False] * len(hosted)
    has_two_parts = any(action.verb is Verb.I for action in actions)
    for action in actions:
        running = hosted.index((action.stage, action.direction))
        verb, forward = action.verb, action.verb is Verb.F
        # The running micro-batch is not counted: one that ends is subtracted before the moment, one that begins is
        # added after it.
        waiting[running] -= verb in TO_INPUTS
        between[running] -= verb is Verb.W
        if not forward or len(hosted) > 1:
            yield Moment(running, tuple(waiting), tuple(gradients), tuple(between) if has_two_parts else ())
        waiting[running] += forward
        between[running] += verb is Verb.I
        gradients[running] |= verb in TO_WEIGHTS


def _fullest(moments: Iterable[Moment]) -> list[Moment]:
    """Return the moments that no other moment covers, each once."""
    fullest: list[Moment] = []
    for moment in dict.fromkeys(moments):
        if not any(other.covers(moment) for other in fullest):
            fullest = [other for other in fullest if not moment.covers(other)]
            fullest.append(moment)
    return fullest
