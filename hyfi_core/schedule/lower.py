"""Lowering: passes that add to a schedule of forwards and backwards the communication between them.

Messages between two ranks have no tags, and a send may end only when its receive is posted. So on every ordered pair
of ranks receives are posted in the order of the sends. Nothing that posts or starts waits: where the computations have
an order that all ranks can follow, so has the whole. A receive is posted before the computation that precedes the one
that needs it, or earlier where the order of the pair asks for that (1F1B, two stages, three micro-batches):

    rank 0  F0 SEND_F0 RECV_B0 F1 SEND_F1 B0 RECV_B1 F2 SEND_F2 RECV_B2 B1 B2 REDUCE.s0
    rank 1  RECV_F0 F0 RECV_F1 B0 SEND_B0 F1 RECV_F2 B1 SEND_B1 F2 B2 SEND_B2 REDUCE.s1

The messages inside of a stage (halos, sums) are not in here; as receives are posted ahead, they need a communicator of
their own, one for each stage and direction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hyfi_core.plan.parallel_plan import Mirror
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import Action, Schedule, Verb, act
from hyfi_core.schedule.order import Timed, common_order
from hyfi_core.schedule.routes import Edges, senders


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
        schedule: only F and B.
        placement: which ranks hold which stage.
        edges: pairs (from, to) of stages, from < to, that exchange values; skips over several stages too.
        mirror: of two directions, whether REDUCE sums the gradients of both, or those of direction 1 are first sent
            to the ranks of direction 0, which alone reduce them: part i of the stage's grid to part i.
        overlap_reduce: start each REDUCE as soon as the stage's last local backward is done, which must then not
            block; or all of them at the end, where they may.

    Raises:
        ScheduleError: the lists of the ranks have no common order.
    """
    links = Edges(edges, placement.stages)
    order = common_order(schedule, placement, links)
    lowering = _Lowering(schedule, placement, links, order, mirror == "point_to_point" and placement.directions == 2)
    rows = []
    for rank, row in enumerate(schedule.actions):
        slots = [_Slot() for _ in range(len(row) + 1)]
        reduces = lowering.reduces(rank, overlap_reduce)
        for index, action in enumerate(row):
            slots[index + 1].sends += lowering.sends(action)
        for stage, index in reduces:
            slots[index].reduces.append(act(Verb.REDUCE, stage, 0))
        for index, action in lowering.receives(rank, dict(reduces)):
            slots[index].receives.append(action)
        rows.append(tuple(_joined(row, slots)))
    return Schedule(schedule.name, tuple(rows))


@dataclass(slots=True)
class _Slot:
    """What stands between two computations of a rank."""

    sends: list[Action] = field(default_factory=list)
    reduces: list[Action] = field(default_factory=list)
    receives: list[Action] = field(default_factory=list)


def _joined(row: tuple[Action, ...], slots: list[_Slot]) -> Iterator[Action]:
    for index, slot in enumerate(slots):
        yield from slot.sends
        yield from slot.reduces
        yield from slot.receives
        if index < len(row):
            yield row[index]


class _Lowering:
    """What the passes share: the common order, and when each stage has its last backward."""

    def __init__(
        self, schedule: Schedule, placement: Placement, edges: Edges, order: list[Timed], point_to_point: bool
    ) -> None:
        self._rows = schedule.actions
        self._placement = placement
        self._edges = edges
        self._point_to_point = point_to_point
        self._place = {timed.action: index for index, timed in enumerate(order)}
        self._start = {timed.action: timed.start for timed in order}
        self._last: dict[tuple[int, int], Timed] = {}
        for timed in order:
            if timed.action.verb is Verb.B:
                self._last[timed.action.stage, timed.action.direction] = timed
        ends: dict[int, tuple[int, int]] = {}
        for (stage, _), timed in self._last.items():
            ends[stage] = max(ends.get(stage, (0, 0)), (timed.end, self._place[timed.action]))
        self._reduce_order = sorted(ends, key=lambda stage: ends[stage])
        self._over = {stage: end for stage, (end, _) in ends.items()}

    def sends(self, action: Action) -> Iterator[Action]:
        """Return what a computation sends, in the order in which all of its ranks send it."""
        stage, direction, microbatch = action.stage, action.direction, action.microbatch
        if action.verb is Verb.F:
            for target in self._edges.targets[stage]:
                yield act(Verb.SEND_F, stage, direction, microbatch, target)
            return
        for source in reversed(self._edges.sources[stage]):  # the nearest stage needs it first
            yield act(Verb.SEND_B, stage, direction, microbatch, source)
        if self._point_to_point and direction == 1 and self._last[stage, 1].action == action:
            yield act(Verb.SEND_G, stage, 1, None, 0)

    def reduces(self, rank: int, overlap: bool) -> list[tuple[int, int]]:
        """Return (stage, slot) for the reductions of a rank, in the order that all ranks share."""
        row = self._rows[rank]
        found, slot = [], 0
        for stage in self._reduce_order:
            directions = range(1 if self._point_to_point else self._placement.directions)
            if not any(rank in self._placement.group(stage, direction) for direction in directions):
                continue
            slot = max(slot, self._reduce_slot(row, stage)) if overlap else len(row)
            found.append((stage, slot))
        return found

    def _reduce_slot(self, row: tuple[Action, ...], stage: int) -> int:
        if self._point_to_point:
            # It waits for gradients from elsewhere: behind all that starts before they are there, so nothing that
            # they depend on is behind it on any rank.
            return max(index + 1 for index, action in enumerate(row) if self._start[action] < self._over[stage])
        return max(index + 1 for index, action in enumerate(row) if action.stage == stage)

    def receives(self, rank: int, reduces: dict[int, int]) -> list[tuple[int, Action]]:
        """Return (slot, receive) for a rank: on each pair of ranks in the order of the sends."""
        wanted = sorted(self._wanted(rank, reduces), key=lambda item: item[0])
        latest: dict[int, int] = {}  # for each sending rank, the slot of the earliest of the receives that follow
        placed = []
        for key, slot, action in reversed(wanted):
            others = [sender for sender in senders(self._placement, rank, action) if sender != rank]
            slot = min([slot, *(latest[sender] for sender in others if sender in latest)])
            latest.update(dict.fromkeys(others, slot))
            placed.append((slot, key, action))
        return [(slot, action) for slot, _, action in sorted(placed, key=lambda item: item[:2])]

    def _wanted(self, rank: int, reduces: dict[int, int]) -> Iterator[tuple[tuple[int, int], int, Action]]:
        """Return ((place of what sends it, place among what that sends), slot at the latest, receive)."""
        for index, action in enumerate(self._rows[rank]):
            forward = action.verb is Verb.F
            stage, direction, microbatch = action.stage, action.direction, action.microbatch
            verb = Verb.RECV_F if forward else Verb.RECV_B
            for peer in self._edges.sources[stage] if forward else self._edges.targets[stage]:
                sender = act(action.verb, peer, direction, microbatch)
                yield (
                    (self._place[sender], self._rank_of_send(sender, stage)),
                    max(0, index - 1),
                    act(verb, stage, direction, microbatch, peer),
                )
        if self._point_to_point:
            for stage, slot in reduces.items():
                key = (self._place[self._last[stage, 1].action], self._placement.stages)
                yield key, max(0, slot - 1), act(Verb.RECV_G, stage, 0, None, 1)

    def _rank_of_send(self, sender: Action, peer: int) -> int:
        if sender.verb is Verb.F:
            return self._edges.targets[sender.stage].index(peer)
        return -self._edges.sources[sender.stage].index(peer)
