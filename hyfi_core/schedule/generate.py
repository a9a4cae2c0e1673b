"""Generators: the order of forwards and backwards of each algorithm, as a pure function of the plan.

Each generator returns **one** order of all forwards and backwards of a replica; a rank runs those of its own stages in
that order. So all ranks run the gang actions of stages with common ranks in the same order, for any grids, and an
action comes after those whose results it needs: generated schedules cannot deadlock. (Interleaved stages are ordered
for each grid separately; grids have no common ranks.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import TO_INPUTS, Action, Schedule, Verb, act

Hosted = tuple[tuple[int, int], ...]
"""(stage, direction) of all stages that a rank holds."""


def generate(plan: ParallelPlan, placement: Placement) -> Schedule:
    """Return the schedule of a plan, with only gang actions, each in the lists of all ranks of its stage.

    With two directions, direction 0 has the first half of the micro-batches, direction 1 the second.

    Raises:
        RequestError: the algorithm does not work with this number of micro-batches; the message names one that works.
    """
    order: Iterable[Action]
    if plan.interleave > 1:
        order = _interleaved(len(plan.grids), plan.interleave, plan.microbatches)
    else:
        order = _ORDERS[plan.schedule](placement.stages, plan.microbatches)
    return _of_ranks(plan.schedule, placement, order)


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """Return the schedule of a prediction: the forwards of all micro-batches in direction 0."""
    return _of_ranks("forward", placement, (a for m in range(microbatches) for a in _forward(placement.stages, 0, m)))


def only_forwards(schedule: Schedule) -> Schedule:
    """Return a schedule of F and B without its backwards; each rank keeps the order of its forwards."""
    rows = tuple(tuple(action for action in row if action.verb is Verb.F) for row in schedule.actions)
    return Schedule("forward", rows)


def forwards_first(schedule: Schedule) -> bool:
    """Whether every rank runs all its forwards before its first backward."""
    for row in dict.fromkeys(schedule.actions):  # ranks of a stage mostly have equal rows
        backward_begun = False
        for action in row:
            if action.verb is Verb.F and backward_begun:
                return False
            backward_begun |= action.verb in TO_INPUTS
    return True


def _of_ranks(name: str, placement: Placement, order: Iterable[Action]) -> Schedule:
    """Return the schedule in which each rank has the actions of its stages, in the common order.

    Ranks that hold the same stages have the same list, as one object.
    """
    row_of: dict[Hosted, list[Action]] = {placement.hosted(rank): [] for rank in range(placement.size)}
    rows_with: dict[tuple[int, int], list[list[Action]]] = {}  # (stage, direction) -> the lists with its actions
    for hosted, row in row_of.items():
        for stage in hosted:
            rows_with.setdefault(stage, []).append(row)
    for action in order:
        for row in rows_with[action.stage, action.direction]:
            row.append(action)
    rows = {hosted: tuple(row) for hosted, row in row_of.items()}
    return Schedule(name, tuple(rows[placement.hosted(rank)] for rank in range(placement.size)))


def _forward(stages: int, direction: int, microbatch: int) -> Iterator[Action]:
    """Yield the forwards of one micro-batch through all stages."""
    return (act(Verb.F, stage, direction, microbatch) for stage in range(stages))


def _backward(stages: int, direction: int, microbatch: int) -> Iterator[Action]:
    """Yield the backwards of one micro-batch through all stages, the last first."""
    return (act(Verb.B, stage, direction, microbatch) for stage in reversed(range(stages)))


def _sequential(stages: int, microbatches: int) -> Iterator[Action]:
    """Layer parallelism: one micro-batch at a time.

    rank 0  F0 .  .  B0 F1 .  .  B1
    rank 1  .  F0 B0 .  .  F1 B1 .
    """
    for microbatch in range(microbatches):
        yield from _forward(stages, 0, microbatch)
        yield from _backward(stages, 0, microbatch)


def _gpipe(stages: int, microbatches: int) -> Iterator[Action]:
    """GPipe: all forwards, then all backwards (Huang et al., NeurIPS'19).

    rank 0  F0 F1 F2 .  .  .  B0 B1 B2
    rank 1  .  F0 F1 F2 .  B0 B1 B2 .
    """
    for microbatch in range(microbatches):
        yield from _forward(stages, 0, microbatch)
    for microbatch in range(microbatches):
        yield from _backward(stages, 0, microbatch)


def _gems(stages: int, microbatches: int, repetitions: int) -> Iterator[Action]:
    """GEMS (Jain et al., SC'20): each backward of direction 0 is followed by a forward of direction 1.

    Both run from the last rank to the first, so the forward never waits; then, from the first rank to the last,
    forwards of direction 0 follow backwards of direction 1. Two repetitions of one micro-batch per direction:

        rank 0  F0 .  .  .  .  B0 F2 B2 F1 .  .  .  .  B1 F3 B3 .  .
        rank 1  .  F0 .  .  B0 F2 .  .  B2 F1 .  .  B1 F3 .  .  B3 .
        rank 2  .  .  F0 B0 F2 .  .  .  .  B2 F1 B1 F3 .  .  .  .  B3
    """
    half = microbatches // 2
    count = half // repetitions
    for first in range(0, half, count):
        block = range(first, first + count)
        for microbatch in block:
            yield from _forward(stages, 0, microbatch)
        for microbatch in block:
            yield from _backward(stages, 0, microbatch)
            yield from _forward(stages, 1, half + microbatch)
        for microbatch in block:
            yield from _backward(stages, 1, half + microbatch)


def _gems_mast(stages: int, microbatches: int) -> Iterator[Action]:
    return _gems(stages, microbatches, 1)


def _gems_master(stages: int, microbatches: int) -> Iterator[Action]:
    return _gems(stages, microbatches, microbatches // 2)


def _one_f_one_b(stages: int, microbatches: int) -> list[Action]:
    """1F1B (PipeDream-Flush): stage s of D runs D − s forwards ahead, then alternates one forward and one backward.

    Time is divided into slots of one forward or one backward. B(m) of stage s is in slot 2D − 1 − s + 2m. The first
    D − s forwards are as early as possible, each later one is just before the next backward.
    """
    slots = []
    for stage in range(stages):
        for m in range(microbatches):
            slots.append(((stage + m) if m < stages - stage else (stage + 2 * m), act(Verb.F, stage, 0, m)))
            slots.append((2 * stages - 1 - stage + 2 * m, act(Verb.B, stage, 0, m)))
    return _by_slot(slots)


def _zb_h1(stages: int, microbatches: int) -> Iterator[Action]:
    """ZB-H1 (Qi et al., ICLR'24): 1F1B with backwards in two parts; stage s of D runs W s micro-batches behind I.

    Earlier stages wait only for I, about half of a backward, and the last stages have W left to do at the end. With N
    micro-batches, N ≥ D, and W not longer than I, each rank waits for (D − 1)(F + I − W); 1F1B: (D − 1)(F + I + W). No
    stage keeps more than the first one of 1F1B: D − s micro-batches from F to I, and s from I to W.

        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    for stage in range(stages):
        yield from (act(Verb.F, stage, 0, m) for m in range(min(stages - stage, microbatches)))
        for m in range(microbatches):
            yield act(Verb.I, stage, 0, m)
            if m >= stage:
                yield act(Verb.W, stage, 0, m - stage)
            if m + stages - stage < microbatches:
                yield act(Verb.F, stage, 0, m + stages - stage)
        yield from (act(Verb.W, stage, 0, m) for m in range(max(0, microbatches - stage), microbatches))


def _chimera(stages: int, microbatches: int) -> list[Action]:
    """Chimera (Li and Hoefler, SC'21): two 1F1B pipelines of D stages in opposite order fill each other's gaps.

    A unit has D micro-batches, half of them in each direction. In slots of one forward or one backward, F(m) of stage
    s is in slot s + 2m and B(m) in slot 2D − 1 − s + 2m. For an even D, the mirrored stage D − 1 − s uses exactly the
    slots between. A unit starts every 2D slots: its forwards fill the gaps at the end of the previous unit. With an odd
    D, direction 1 starts one slot later and some slots still collide: the order is valid, but there are more bubbles
    than in the paper.

        rank 0  F0 .  F1 F2 B2 F3 B3 B0 .  B1
        rank 1  .  F0 F2 F1 F3 B2 B0 B3 B1 .
        rank 2  .  F2 F0 F3 F1 B0 B2 B1 B3 .
        rank 3  F2 .  F3 F0 B0 F1 B1 B2 .  B3
    """
    # Micro-batches of one direction: in all, and in a unit.
    of_direction, of_unit = microbatches // 2, (stages + 1) // 2
    slots = []
    for direction in (0, 1):
        for m in range(of_direction):
            start = 2 * stages * (m // of_unit) + 2 * (m % of_unit) + direction * (stages % 2)
            for stage in range(stages):
                microbatch = direction * of_direction + m
                slots.append((start + stage, act(Verb.F, stage, direction, microbatch)))
                slots.append((start + 2 * stages - 1 - stage, act(Verb.B, stage, direction, microbatch)))
    return _by_slot(slots)


def _by_slot(slots: Iterable[tuple[int, Action]]) -> list[Action]:
    """Return the actions sorted by their time slots."""
    # The sort is stable: actions of one slot stay in the order in which they were generated, the same for all ranks.
    return [action for _, action in sorted(slots, key=lambda item: item[0])]


def _interleaved(grids: int, interleave: int, microbatches: int) -> list[Action]:
    """Interleaved 1F1B (Narayanan et al., SC'21): each of D = ``grids`` grids has v = ``interleave`` stages, D apart.

    Groups of D micro-batches pass through the first stage of every grid, then through the second, and so on. Grid g
    runs 2(D − 1 − g) + (v − 1)D forwards ahead, then alternates one forward and one backward.

    On one grid nothing has to wait: each micro-batch goes through all stages and back before the next one starts. With
    recomputation, memory then has the values between stages, and the maps of one stage at a time (Chen et al.,
    "Training Deep Nets with Sublinear Memory Cost", 2016).
    """
    if grids == 1:
        return list(_sequential(interleave, microbatches))
    if microbatches % grids:
        nearest = grids * max(1, round(microbatches / grids))
        raise RequestError(
            f"plan.interleave is {interleave} on {grids} grids, which needs a multiple of {grids} micro-batches; "
            f"plan.microbatches is {microbatches}; use {nearest}"
        )
    total = microbatches * interleave
    order = []
    for grid in range(grids):
        forwards, backwards = [], []
        for index in range(total):
            # index counts (group of D micro-batches, lap through the grids, micro-batch within the group), the last
            # number fastest.
            group, index_in_group = divmod(index, grids * interleave)
            lap, member = divmod(index_in_group, grids)
            microbatch = group * grids + member
            forwards.append(act(Verb.F, lap * grids + grid, 0, microbatch))
            backwards.append(act(Verb.B, (interleave - 1 - lap) * grids + grid, 0, microbatch))
        ahead = min(total, 2 * (grids - 1 - grid) + (interleave - 1) * grids)
        order += forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            order += [forward, backward]
        # The number of backwards that are left is that of the forwards that ran ahead.
        order += backwards[total - ahead :]
    return order


_ORDERS: dict[str, Callable[[int, int], Iterable[Action]]] = {
    "sequential": _sequential,
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "zb_h1": _zb_h1,
    "gems_mast": _gems_mast,
    "gems_master": _gems_master,
    "chimera": _chimera,
}
