"""Micro-batches in flight: forward done, backward not, while each action of a rank runs.

    rank 0     F0  F1  F2  B0  F3  B1  B2  B3       1F1B, three stages
    waiting     0   1   2   2   2   2   1   0       others, meanwhile

What waits takes memory, and so do gradients, which exist from a stage's first backward on. A rank needs most at one of
few moments: those in which no more waits, nor has more gradients, while the same stage runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.parallel_plan import Schedule as ScheduleName
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import Action, Verb
from hyfi_core.schedule.generate import generate

Hosted = tuple[tuple[int, int], ...]
"""(stage, direction) of all stages that a rank holds."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A forward or backward of a rank, and what it has meanwhile of each stage that it holds.

    Attributes:
        running: index of the stage that runs.
        waiting: micro-batches in flight, without the one that runs.
        gradients: whether there are any, because a backward has been done before.
    """

    running: int
    waiting: tuple[int, ...]
    gradients: tuple[bool, ...]

    def covers(self, other: Moment) -> bool:
        """Whether at least as much waits, and there are as many gradients, while the same stage runs."""
        return (
            self.running == other.running
            and all(a >= b for a, b in zip(self.waiting, other.waiting, strict=True))
            and all(a >= b for a, b in zip(self.gradients, other.gradients, strict=True))
        )


def fullest_moments(plan: ParallelPlan) -> dict[Hosted, tuple[Moment, ...]]:
    """Return, for all ranks that hold the same stages, the moments of which one needs the most memory.

    Args:
        plan: its cuts do not matter.

    Raises:
        RequestError: as ``generate``.
    """
    sizes = tuple(map(prod, plan.grids))
    alike = plan.directions == 1 or sizes == sizes[::-1]  # then the sizes do not change which stages ranks hold
    return _moments((1,) * len(sizes) if alike else sizes, plan.schedule, plan.microbatches, plan.interleave)


def microbatches_in_flight(plan: ParallelPlan, stage: int) -> int:
    """Return the most micro-batches of a stage and direction between forward and backward, the running one included."""
    return max(
        moment.waiting[at] + (moment.running == at)
        for hosted, moments in fullest_moments(plan).items()
        for at, (held, _) in enumerate(hosted)
        if held == stage
        for moment in moments
    )


@lru_cache(maxsize=4096)
def _moments(
    sizes: tuple[int, ...], schedule: ScheduleName, microbatches: int, interleave: int
) -> dict[Hosted, tuple[Moment, ...]]:
    plan = ParallelPlan(
        tuple((1, size) for size in sizes), microbatches=microbatches, schedule=schedule, interleave=interleave
    )
    placement = Placement.of(plan)
    rows = generate(plan, placement).actions
    ranks = {placement.hosted(rank): rank for rank in range(placement.size)}
    return {hosted: tuple(_fullest(_all(hosted, rows[rank]))) for hosted, rank in ranks.items()}


def _all(hosted: Hosted, actions: Sequence[Action]) -> Iterator[Moment]:
    """Yield the moments of a rank; of one with a single stage only backwards, which need more than its forwards."""
    waiting, gradients = [0] * len(hosted), [False] * len(hosted)
    for action in actions:
        at = hosted.index((action.stage, action.direction))
        backward = action.verb is Verb.B
        waiting[at] -= backward
        if backward or len(hosted) > 1:
            yield Moment(at, tuple(waiting), tuple(gradients))
        waiting[at] += not backward
        gradients[at] |= backward


def _fullest(moments: Iterable[Moment]) -> list[Moment]:
    """Return the moments that no other covers."""
    found: list[Moment] = []
    for moment in dict.fromkeys(moments):
        if not any(other.covers(moment) for other in found):
            found = [other for other in found if not moment.covers(other)]
            found.append(moment)
    return found
