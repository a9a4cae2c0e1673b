"""The family of plans that a search compares: replicas, stages, grids, micro-batches, schedules.

With up to five ranks in a replica, every division into stages is tried; with more, only equal stages, stages of half
the size of the one before, and one large grid before single ranks. Recomputation and cuts are left to the search.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.step.spilling import SpillRule
from hyfi_core.plan.parallel_plan import BIDIRECTIONAL, ParallelPlan, ScheduleName
from hyfi_core.plan.strategy import squarest

_ONE_WAY: tuple[ScheduleName, ...] = ("1f1b", "zb_h1")
_BOTH_WAYS: tuple[ScheduleName, ...] = ("chimera", "gems_master")
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
        ranks: number of trainers; all are used.
        batch: images of a step, over all replicas.
        machine: the machine model.
        memory_bytes: memory limit of a rank.
        held_bytes: the part of ``memory_bytes`` that a rank uses before its first step.
        dtype: of convolutions and matrix products under autocast; None: the dtype of their values.
        base: plan with the fields that the search does not choose.
        spill: ``plan.spill`` to try if no plan fits otherwise; None: plans do not spill.
        spills: computes what leaves memory in such plans; None: the time of moving is not counted.
    """

    ranks: int
    batch: int
    machine: MachineModel
    memory_bytes: int
    held_bytes: int = 0
    dtype: str | None = None
    base: ParallelPlan = field(default_factory=lambda: ParallelPlan(grids=((1, 1),)))
    spill: str | None = None
    spills: SpillRule | None = None


def candidates(request: PlanRequest) -> Iterator[ParallelPlan]:
    """Yield every plan of the family, without recomputation and with cuts "auto"."""
    for replicas in divisors(request.ranks):
        if request.batch % replicas:
            continue
        for grids in _arrangements(request.ranks // replicas):
            for microbatches in divisors(request.batch // replicas):
                # With several stages, more micro-batches than this hardly shorten the bubble.
                if len(grids) > 1 and microbatches > _MOST_ROUNDS * len(grids):
                    continue
                for schedule in _schedules(grids):
                    if schedule not in BIDIRECTIONAL or microbatches % 2 == 0:
                        yield plan_of(request, grids, microbatches, replicas, schedule)
                if microbatches > 1 and len(grids) > 1:  # slow, but only one micro-batch is in memory
                    yield plan_of(request, grids, microbatches, replicas, "sequential")


def _schedules(grids: tuple[tuple[int, int], ...]) -> tuple[ScheduleName, ...]:
    """Return the schedules to try: those with two directions only if stages are equal, or small.

    In two directions, large stages of unequal sizes would wait for each other.
    """
    if len(grids) == 1:  # with one stage, the order of all schedules is the same
        return _ONE_WAY[:1]
    sizes = {rows * columns for rows, columns in grids}
    few = sum(rows * columns for rows, columns in grids) <= _MOST_UNEQUAL
    return (*_ONE_WAY, *_BOTH_WAYS) if len(sizes) == 1 or few else _ONE_WAY


def plan_of(
    request: PlanRequest, grids: tuple[tuple[int, int], ...], microbatches: int, replicas: int, schedule: ScheduleName
) -> ParallelPlan:
    """Return a plan of the family; fields that the search does not choose are those of ``request.base``."""
    return replace(
        request.base,
        grids=grids,
        cuts="auto",
        microbatches=microbatches,
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


def by_cells(request: PlanRequest) -> Iterator[ParallelPlan]:
    """Yield the plans with one stage in cells, which spill as ``request.spill`` says."""
    for plan, cells in product(candidates(request), _CELLS):
        if plan.stages == 1:
            yield replace(plan, cells=cells, spill=request.spill, memory_bytes=request.memory_bytes)


def _arrangements(ranks: int) -> list[tuple[tuple[int, int], ...]]:
    """Return divisions of ``ranks`` ranks into stages, such as `((2, 2), (1, 2))`: nearly square grids, and rows."""
    arrangements: dict[tuple[tuple[int, int], ...], None] = {}
    for sizes in _compositions(ranks):
        arrangements[tuple(squarest(size) for size in sizes)] = None
        arrangements[tuple((1, size) for size in sizes)] = None
    return list(arrangements)


def _compositions(ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield the number of ranks of each stage, such as `(4, 2, 1, 1)` for 8 ranks.

    All divisions for few ranks; else equal stages, one large stage before single ranks, and halves of halves.
    """
    if ranks <= _ALL_COMPOSITIONS:
        yield from _all_compositions(ranks)
        return
    for stages in range(1, min(ranks, _MOST_STAGES) + 1):
        if ranks % stages == 0:
            yield (ranks // stages,) * stages
        yield (ranks - stages + 1, *(1,) * (stages - 1))
    halves, remaining = [], ranks
    while remaining > 1:
        halves.append(remaining - remaining // 2)
        remaining //= 2
        yield (*halves, remaining)


def _all_compositions(ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield all tuples of numbers from 1 whose sum is ``ranks``."""
    if ranks == 0:
        yield ()
    for first in range(1, ranks + 1):
        for later in _all_compositions(ranks - first):
            yield (first, *later)


def divisors(number: int) -> list[int]:
    """Return all divisors, in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]
