"""Lowering: adds communication to a schedule of forwards and backwards, the latter whole or in two parts.

Messages between two ranks have no tags, and a send may complete only after its receive has been posted. So, for every
ordered pair of ranks, receives are posted in the order of the sends. Posting and starting never wait, so if the
computations have a common order, the lowered schedule has one, too. A receive is posted one computation before the one
that needs it, or earlier if the order of the pair requires it (1F1B, two stages, three micro-batches):

    rank 0  F0 SEND_F0 RECV_B0 F1 SEND_F1 B0 RECV_B1 F2 SEND_F2 RECV_B2 B1 B2 REDUCE.s0
    rank 1  RECV_F0 F0 RECV_F1 B0 SEND_B0 F1 RECV_F2 B1 SEND_B1 F2 B2 SEND_B2 REDUCE.s1

Messages within a stage (halos, sums) are not part of a schedule. Since receives are posted ahead, these need separate
communicators, one for each stage and direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hyfi_core.plan.parallel_plan import Mirror
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import TO_INPUTS, TO_WEIGHTS, Action, Schedule, Verb, act
from hyfi_core.schedule.fault import ScheduleError
from hyfi_core.schedule.order import Timed, backwards_to_inputs, common_order
from hyfi_core.schedule.routes import Edges, senders
from hyfi_core.schedule.symmetry import represented


def lower(
    schedule: Schedule,
    placement: Placement,
    edges: Iterable[tuple[int, int]],
    *,
    mirror: Mirror = "all_reduce",
    overlap_reduce: bool = True,
) -> Schedule:
    """Return a schedule with its sends, receives and gradient reductions.

    Args:
        schedule: only F, B, I and W.
        placement: which ranks hold which stage.
        edges: pairs (from, to) of stages that exchange values, from < to; also of stages that are not neighbours.
        mirror: with two directions: "all_reduce": REDUCE sums the gradients of both; "point_to_point": each rank of
            direction 1 first sends its gradients to the rank with the same part in direction 0, which reduces them.
        overlap_reduce: whether REDUCE starts after the stage's last B or W on the rank, which requires that it does
            not block; otherwise all start at the end.

    Raises:
        ScheduleError: the ranks' lists have no common order.
    """
    links = Edges(edges, placement.stages)
    point_to_point = mirror == "point_to_point" and placement.directions == 2
    # Of the many ranks with equal lists, a few represent the others, which saves time.
    few = represented(schedule, placement, point_to_point)
    try:
        order = common_order(few.schedule, few.placement, links)
    except ScheduleError:
        common_order(schedule, placement, links)  # raises the same error, with all ranks
        raise
    lowering = _Lowering(few.schedule, few.placement, links, order, point_to_point)
    return few.for_all([_row(lowering, rank, row, overlap_reduce) for rank, row in enumerate(few.schedule.actions)])


def _row(lowering: _Lowering, rank: int, row: tuple[Action, ...], overlap_reduce: bool) -> tuple[Action, ...]:
    """Return a rank's list with its communication."""
    slots = [_Slot() for _ in range(len(row) + 1)]  # slot i is before computation i; the last slot is after all
    reduces = lowering.reduces(rank, overlap_reduce)
    for index, action in enumerate(row):
        slots[index + 1].sends += lowering.sends(action)
    for stage, slot in reduces:
        slots[slot].reduces.append(act(Verb.REDUCE, stage, 0))
    for slot, action in lowering.receives(rank, dict(reduces)):
        slots[slot].receives.append(action)
    return tuple(_joined(row, slots))


@dataclass(slots=True)
class _Slot:
    """The communication between two computations of a rank."""

    sends: list[Action] = field(default_factory=list)
    reduces: list[Action] = field(default_factory=list)
    receives: list[Action] = field(default_factory=list)


def _joined(row: tuple[Action, ...], slots: list[_Slot]) -> Iterator[Action]:
    """Yield the actions of a rank: those of each slot, and the computation after it."""
    for index, slot in enumerate(slots):
        # Sends come first, because other ranks wait for them.
        yield from slot.sends
        yield from slot.reduces
        yield from slot.receives
        if index < len(row):
            yield row[index]


class _NeededReceive(NamedTuple):
    """A receive that a rank needs.

    Attributes:
        order: position of its send among all sends of the schedule: (place of the computation, order of the peer).
        latest_slot: the rank's last slot in which it may be posted.
        action: the receive.
    """

    order: tuple[int, int]
    latest_slot: int
    action: Action


class _Lowering:
    """Placement of sends, receives and reductions, from the common order of all computations."""

    def __init__(
        self, schedule: Schedule, placement: Placement, edges: Edges, order: list[Timed], point_to_point: bool
    ) -> None:
        self._actions_of_rank = schedule.actions
        self._placement = placement
        self._edges = edges
        self._point_to_point = point_to_point
        self._place = {timed.action: index for index, timed in enumerate(order)}  # in the common order
        self._start = {timed.action: timed.start for timed in order}
        self._backward_of = backwards_to_inputs(schedule)
        self._last_backward: dict[tuple[int, int], Timed] = {}  # (stage, direction) -> its last B or W
        for timed in order:
            if timed.action.verb in TO_WEIGHTS:
                self._last_backward[timed.action.stage, timed.action.direction] = timed
        ends: dict[int, tuple[int, int]] = {}
        for (stage, _), timed in self._last_backward.items():
            # By time, then by place in the common order, so that all ranks reduce stages in the same order.
            ends[stage] = max(ends.get(stage, (0, 0)), (timed.end, self._place[timed.action]))
        self._reduce_order = sorted(ends, key=lambda stage: ends[stage])
        self._gradients_end = {stage: end for stage, (end, _) in ends.items()}

    def sends(self, action: Action) -> Iterator[Action]:
        """Yield the sends after a computation, in the same order on all of its ranks."""
        stage, direction, microbatch = action.stage, action.direction, action.microbatch
        if action.verb is Verb.F:
            for target in self._edges.targets[stage]:
                yield act(Verb.SEND_F, stage, direction, microbatch, target)
            return
        sources = self._edges.sources[stage] if action.verb in TO_INPUTS else []
        for source in reversed(sources):  # the nearest stage needs it first
            yield act(Verb.SEND_B, stage, direction, microbatch, source)
        if self._point_to_point and direction == 1 and self._last_backward[stage, 1].action == action:
            yield act(Verb.SEND_G, stage, 1, None, 0)

    def reduces(self, rank: int, overlap: bool) -> list[tuple[int, int]]:
        """Return (stage, slot) of the reductions of a rank, in the same order on all ranks.

        Args:
            rank: rank whose reductions are returned.
            overlap: whether a reduction starts as soon as its gradients are complete; otherwise after all computations.
        """
        row = self._actions_of_rank[rank]
        slots, slot = [], 0
        for stage in self._reduce_order:
            directions = range(1 if self._point_to_point else self._placement.directions)
            if not any(rank in self._placement.group(stage, direction) for direction in directions):
                continue
            # Not before the previous reduction: ranks that start collectives in different orders deadlock.
            slot = max(slot, self._reduce_slot(row, stage)) if overlap else len(row)
            slots.append((stage, slot))
        return slots

    def _reduce_slot(self, row: tuple[Action, ...], stage: int) -> int:
        """Return the slot in which a rank with the computations ``row`` starts to reduce a stage's gradients."""
        if self._point_to_point:
            # The reduction waits for gradients of other ranks, so what these depend on must not wait behind it on any
            # rank: all computations that start before the gradients are complete come first.
            end = self._gradients_end[stage]
            return max(index + 1 for index, action in enumerate(row) if self._start[action] < end)
        # After the stage's last computation on this rank, in either direction.
        return max(index + 1 for index, action in enumerate(row) if action.stage == stage)

    def receives(self, rank: int, reduces: dict[int, int]) -> list[tuple[int, Action]]:
        """Return (slot, receive) for each receive of a rank; those from one sender in the order of its sends."""
        needed = sorted(self._needed_receives(rank, reduces), key=lambda receive: receive.order)
        earliest: dict[int, int] = {}  # sender -> slot of its earliest receive so far
        placed: list[tuple[int, _NeededReceive]] = []
        # From the last to the first: a receive is posted no later than those of later messages of the same sender.
        for receive in reversed(needed):
            peers = [sender for sender in senders(self._placement, rank, receive.action) if sender != rank]
            slot = min([receive.latest_slot, *(earliest[peer] for peer in peers if peer in earliest)])
            earliest.update(dict.fromkeys(peers, slot))
            placed.append((slot, receive))
        placed.sort(key=lambda item: (item[0], item[1].order))
        return [(slot, receive.action) for slot, receive in placed]

    def _needed_receives(self, rank: int, reduces: dict[int, int]) -> Iterator[_NeededReceive]:
        """Yield the receives of a rank, in any order."""
        for index, action in enumerate(self._actions_of_rank[rank]):
            forward = action.verb is Verb.F
            stage, direction, microbatch = action.stage, action.direction, action.microbatch
            if action.verb is Verb.W:  # needs no message: its I has received the gradients
                continue
            verb = Verb.RECV_F if forward else Verb.RECV_B
            for peer in self._edges.sources[stage] if forward else self._edges.targets[stage]:
                of_peer = peer, direction, microbatch
                # The computation whose result is sent.
                sender = act(Verb.F, *of_peer) if forward else self._backward_of[of_peer]
                yield _NeededReceive(
                    order=(self._place[sender], self._order_of_send(sender, stage)),
                    # One computation before the one that needs it, so that the message arrives meanwhile.
                    latest_slot=max(0, index - 1),
                    action=act(verb, stage, direction, microbatch, peer),
                )
        if self._point_to_point:
            for stage, slot in reduces.items():
                # SEND_G is the last send after its computation: the second number of all others is below `stages`.
                order = (self._place[self._last_backward[stage, 1].action], self._placement.stages)
                yield _NeededReceive(order, max(0, slot - 1), act(Verb.RECV_G, stage, 0, None, 1))

    def _order_of_send(self, sender: Action, peer: int) -> int:
        """Return the sort key of the send to stage ``peer`` among the sends after the computation ``sender``."""
        if sender.verb is Verb.F:
            return self._edges.targets[sender.stage].index(peer)
        # Cotangents leave in the opposite order: see ``sends``.
        return -self._edges.sources[sender.stage].index(peer)
