"""Generators: the order of forwards and backwards of each algorithm, as a pure function of the plan.

Each returns **one** order of all gang actions of a replica; a rank does those of its own stages in that order. Two
gangs that share ranks are therefore met in one common order by all of them, whatever the grids. The order goes from
cause to effect (of interleaved stages, which share no ranks, on each grid alone): what is generated cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import Action, Schedule, Verb, act


def generate(plan: ParallelPlan, placement: Placement) -> Schedule:
    """Return the schedule of a plan: only F and B; an action of a stage is in the list of each of its ranks.

    Of two directions, 0 has the first half of the micro-batches, 1 the second.

    Raises:
        RequestError: the algorithm cannot be run with this number of micro-batches; the message names one that can.
    """
    order: Iterable[Action]
    if plan.interleave > 1:
        order = _interleaved(len(plan.grids), plan.interleave, plan.microbatches)
    else:
        order = _ORDERS[plan.schedule](placement.stages, plan.microbatches)
    rows: list[list[Action]] = [[] for _ in range(placement.size)]
    for action in order:
        for rank in placement.group(action.stage, action.direction):
            rows[rank].append(action)
    return Schedule(plan.schedule, tuple(map(tuple, rows)))


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """Return the schedule of a prediction: the forwards of all micro-batches, in direction 0."""
    order = [action for m in range(microbatches) for action in _forward(placement.stages, 0, m)]
    rows = [[a for a in order if rank in placement.group(a.stage)] for rank in range(placement.size)]
    return Schedule("forward", tuple(map(tuple, rows)))


def _forward(stages: int, direction: int, microbatch: int) -> Iterator[Action]:
    return (act(Verb.F, stage, direction, microbatch) for stage in range(stages))


def _backward(stages: int, direction: int, microbatch: int) -> Iterator[Action]:
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
    """GEMS (Jain et al., SC'20): where a backward of direction 0 frees a place, a forward of direction 1 takes it.

    Both go from the last rank to the first, so they follow one another without waiting; then forwards of direction 0
    follow backwards of direction 1 from the first rank to the last. Two repetitions of one micro-batch per direction:

        rank 0  F0 .  .  .  .  B0 F2 B2 F1 .  .  .  .  B1 F3 B3 .  .
        rank 1  .  F0 .  .  B0 F2 .  .  B2 F1 .  .  B1 F3 .  .  B3 .
        rank 2  .  .  F0 B0 F2 .  .  .  .  B2 F1 B1 F3 .  .  .  .  B3
    """
    half = microbatches // 2
    share = half // repetitions
    for first in range(0, half, share):
        down = range(first, first + share)
        for microbatch in down:
            yield from _forward(stages, 0, microbatch)
        for microbatch in down:
            yield from _backward(stages, 0, microbatch)
            yield from _forward(stages, 1, half + microbatch)
        for microbatch in down:
            yield from _backward(stages, 1, half + microbatch)


def _gems_mast(stages: int, microbatches: int) -> Iterator[Action]:
    return _gems(stages, microbatches, 1)


def _gems_master(stages: int, microbatches: int) -> Iterator[Action]:
    return _gems(stages, microbatches, microbatches // 2)


def _one_f_one_b(stages: int, microbatches: int) -> list[Action]:
    """1F1B (PipeDream-Flush): stage s runs D − s forwards ahead, then one backward for each forward.

    In slots of one forward or one backward, B(m) of stage s is in slot 2D − 1 − s + 2m; the first D − s forwards are
    as early as they can be, each further one is just before the backward that follows it.
    """
    slots = []
    for stage in range(stages):
        for m in range(microbatches):
            slots.append(((stage + m) if m < stages - stage else (stage + 2 * m), act(Verb.F, stage, 0, m)))
            slots.append((2 * stages - 1 - stage + 2 * m, act(Verb.B, stage, 0, m)))
    return _by_slot(slots)


def _chimera(stages: int, microbatches: int) -> list[Action]:
    """Chimera (Li and Hoefler, SC'21): two 1F1B pipelines in opposite order that fill each other's gaps.

    A unit has D micro-batches, half of them in each direction. In slots of one forward or one backward, F(m) of stage
    s is in slot s + 2m and B(m) in 2D − 1 − s + 2m; for an even D the mirrored stage D − 1 − s falls exactly into the
    slots between. Units follow each other every 2D slots, the next one's forwards in the gaps that the last one's
    drain leaves. With an odd D direction 1 starts one slot later; some slots collide all the same: the order stays
    right, and the bubbles are more than the paper's.

        rank 0  F0 .  F1 F2 B2 F3 B3 B0 .  B1
        rank 1  .  F0 F2 F1 F3 B2 B0 B3 B1 .
        rank 2  .  F2 F0 F3 F1 B0 B2 B1 B3 .
        rank 3  F2 .  F3 F0 B0 F1 B1 B2 .  B3
    """
    half, unit = microbatches // 2, (stages + 1) // 2
    slots = []
    for direction in (0, 1):
        for m in range(half):
            start = 2 * stages * (m // unit) + 2 * (m % unit) + direction * (stages % 2)
            for stage in range(stages):
                microbatch = direction * half + m
                slots.append((start + stage, act(Verb.F, stage, direction, microbatch)))
                slots.append((start + 2 * stages - 1 - stage, act(Verb.B, stage, direction, microbatch)))
    return _by_slot(slots)


def _by_slot(slots: Iterable[tuple[int, Action]]) -> list[Action]:
    return [action for _, action in sorted(slots, key=lambda item: item[0])]


def _interleaved(grids: int, interleave: int, microbatches: int) -> list[Action]:
    """Interleaved 1F1B (Narayanan et al., SC'21): each grid has ``interleave`` stages, D stages apart.

    Micro-batches go in groups of D through one round of stages after the other; grid g runs 2(D − 1 − g) + (v − 1)D
    forwards ahead, then one backward for each forward.
    """
    if microbatches % grids:
        right = grids * max(1, round(microbatches / grids))
        raise RequestError(
            f"plan.interleave is {interleave} on {grids} grids, which needs a multiple of {grids} micro-batches; "
            f"plan.microbatches is {microbatches}; use {right}"
        )
    total = microbatches * interleave
    order = []
    for grid in range(grids):
        forwards, backwards = [], []
        for index in range(total):
            block, place = divmod(index, grids * interleave)
            step, member = divmod(place, grids)
            microbatch = block * grids + member
            forwards.append(act(Verb.F, step * grids + grid, 0, microbatch))
            backwards.append(act(Verb.B, (interleave - 1 - step) * grids + grid, 0, microbatch))
        ahead = min(total, 2 * (grids - 1 - grid) + (interleave - 1) * grids)
        order += forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            order += [forward, backward]
        order += backwards[total - ahead :]
    return order


_ORDERS: dict[str, Callable[[int, int], Iterable[Action]]] = {
    "sequential": _sequential,
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "gems_mast": _gems_mast,
    "gems_master": _gems_master,
    "chimera": _chimera,
}
