"""The machine that runs lists of actions dry: gangs, messages that pair in order, reductions.

Every rank goes through its list. Posting a receive and starting a send or a reduction never wait. On each ordered
pair of ranks the n-th send pairs with the n-th receive, and the message starts when both are there. F and B wait for
what their rank receives for them and for all ranks of their stage; a REDUCE waits for gradients of the other direction
where they are sent. Reductions run in the order in which their ranks start them.

With ``one_stream`` all sends and receives of a rank go through one stream besides, as on a GPU whose ranks have one
communicator for all of them: a message begins when all that the rank posted or started before it has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import Action, Schedule, Verb, act
from hyfi_core.schedule.check import Needs
from hyfi_core.schedule.fault import Blame
from hyfi_core.schedule.routes import counterpart, receivers, senders
from hyfi_core.schedule.trace import TraceEvent

_F, _B, _REDUCE = Verb.F, Verb.B, Verb.REDUCE  # looked up once: the tests run this a million times
_SENDS = (Verb.SEND_F, Verb.SEND_B, Verb.SEND_G)


class FaultFound(Exception):  # noqa: N818 - a note to the caller, who turns it into the error
    """The lists cannot be run to their end."""

    def __init__(self, problem: str, blames: Sequence[Blame]) -> None:
        super().__init__(problem)
        self.problem = problem
        self.blames = blames


@dataclass(frozen=True)
class Durations:
    """Seconds of a forward, a backward, a message that the stage sends, and a reduction: one for each stage.

    Attributes:
        edge_s: (from, to) of stages -> seconds of a message between them, in either direction, where it is known.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    message_s: Sequence[float]
    reduce_s: Sequence[float]
    edge_s: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def send_s(self, send: Action) -> float:
        """Return the seconds of a message."""
        if not self.edge_s or send.peer is None or send.verb is Verb.SEND_G:
            return self.message_s[send.stage]
        edge = min(send.stage, send.peer), max(send.stage, send.peer)
        return self.edge_s.get(edge, self.message_s[send.stage])


@dataclass(slots=True)
class Half:
    """One side of a message whose other side has not been posted yet."""

    is_send: bool
    receive: Action
    index: int
    time_s: float
    batch: Batch | None = None  # of a rank that has one stream


@dataclass(slots=True)
class Batch:
    """The messages of one send or receive, in the stream of their rank.

    Attributes:
        index: of the action in the rank's list.
        halves: (sender, receiver, half) of each; empty once they have begun.
        open: messages that have not met their other side.
    """

    index: int
    halves: list[tuple[int, int, Half]]
    open: int


@dataclass(slots=True)
class RankState:
    """The state of one rank."""

    row: tuple[Action, ...]
    needs: Needs
    at: int = 0
    clock_s: float = 0.0
    in_gang: bool = False  # its data have arrived; it waits for the other ranks of its stage
    open: dict[Action, int] = field(default_factory=dict)  # receives posted: messages that each still waits for
    come_s: dict[Action, float] = field(default_factory=dict)  # when the last of them came
    own_s: dict[Action, float] = field(default_factory=dict)  # when this rank sent something to itself
    stream: deque[Batch] = field(default_factory=deque)  # messages that have not ended, where all go through one stream
    reduces: deque[tuple[int, int, float]] = field(default_factory=deque)  # stage, index, time: not yet run
    reduced_s: float = 0.0
    live: int = 0
    peak_live: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0

    @property
    def current(self) -> Action | None:
        """The action that the rank is at, None at its end."""
        return self.row[self.at] if self.at < len(self.row) else None

    def missing(self) -> Action | None:
        """Return a receive that the current action waits for, None if all has come."""
        return next((need for need in self.needs[self.row[self.at]] if self.open.get(need)), None)


class Machine:
    """One dry run of lists that are right each for itself (``check.find_faults``)."""

    def __init__(
        self,
        schedule: Schedule,
        placement: Placement,
        needs: Sequence[Needs],
        durations: Durations,
        sum_directions: bool,
        one_stream: bool = False,
    ) -> None:
        self.placement = placement
        self._one_stream = one_stream
        self.ranks = [RankState(row, need) for row, need in zip(schedule.actions, needs, strict=True)]
        self.lanes: dict[tuple[int, int], deque[Half]] = {}
        self.spans: list[tuple[int, Action, float, float]] = []
        self._durations = durations
        self._come: dict[Action, int] = {}
        self._ready = list(range(len(self.ranks)))
        directions = range(placement.directions if sum_directions else 1)
        self.owners = [
            sorted({rank for direction in directions for rank in placement.group(stage, direction)})
            for stage in range(placement.stages)
        ]

    @property
    def events(self) -> tuple[TraceEvent, ...]:
        """Events so far, with readable names."""
        return tuple(TraceEvent(n, str(action), start, end, action.verb) for n, action, start, end in self.spans)

    def run(self) -> None:
        """Run until every rank has ended or waits forever, see ``deadlock.find``.

        Raises:
            FaultFound: the two sides of a pair of ranks have different messages in the same place.
        """
        while self._ready:
            self._advance(self._ready.pop())

    def _advance(self, number: int) -> None:
        """Run a rank until it waits."""
        rank = self.ranks[number]
        while rank.at < len(rank.row) and not rank.in_gang:
            action = rank.row[rank.at]
            verb = action.verb
            if (verb is _F or verb is _B or verb is _REDUCE) and rank.missing() is not None:
                return  # the arrival wakes it
            if verb is _F or verb is _B:
                self._meet(number, action)
                return  # the last rank of the gang wakes all
            if verb is _REDUCE:
                self._start_reduce(number, action)
            elif verb in _SENDS:
                self._send(number, action)
            else:
                self._post(number, action)
            rank.at += 1

    def _meet(self, number: int, action: Action) -> None:
        """Join the gang of a stage; the last rank to come runs the action for all."""
        self.ranks[number].in_gang = True
        gang = self.placement.group(action.stage, action.direction)
        self._come[action] = self._come.get(action, 0) + 1
        if self._come[action] < len(gang):
            return
        start_s = 0.0
        for n in gang:
            rank = self.ranks[n]
            start_s = max(start_s, rank.clock_s, *(rank.come_s.get(need, 0.0) for need in rank.needs[action]))
        seconds = self._durations.forward_s if action.verb is _F else self._durations.backward_s
        for n in gang:
            self._compute(n, action, start_s, start_s + seconds[action.stage])
        self._ready += gang

    def _compute(self, number: int, action: Action, start_s: float, end_s: float) -> None:
        rank = self.ranks[number]
        rank.live += 1 if action.verb is _F else -1
        rank.peak_live = max(rank.peak_live, rank.live)
        rank.in_gang = False
        rank.at += 1
        rank.clock_s = end_s
        rank.busy_s += end_s - start_s
        self._record(number, action, start_s, end_s)

    def _record(self, number: int, action: Action, start_s: float, end_s: float) -> None:
        self.ranks[number].end_s = max(self.ranks[number].end_s, end_s)
        self.spans.append((number, action, start_s, end_s))

    def _send(self, number: int, action: Action) -> None:
        rank = self.ranks[number]
        receive = counterpart(action)
        halves = []
        for receiver in receivers(self.placement, number, action):
            if receiver != number:
                halves.append((number, receiver, Half(True, receive, rank.at, rank.clock_s)))
            elif receive in rank.open:
                self._deliver(number, receive, rank.clock_s)
            else:
                rank.own_s[receive] = rank.clock_s
        self._begin(number, halves)

    def _post(self, number: int, action: Action) -> None:
        rank = self.ranks[number]
        sending = senders(self.placement, number, action)
        rank.open[action] = len(sending)
        halves = []
        for sender in sending:
            if sender != number:
                halves.append((sender, number, Half(False, action, rank.at, rank.clock_s)))
            elif action in rank.own_s:
                self._deliver(number, action, rank.own_s[action])
        self._begin(number, halves)

    def _begin(self, number: int, halves: list[tuple[int, int, Half]]) -> None:
        """Begin one side of some messages, or let them wait for their turn in the rank's stream."""
        if not self._one_stream:
            for sender, receiver, half in halves:
                self._pair(sender, receiver, half)
        elif halves:
            batch = Batch(halves[0][2].index, halves, len(halves))
            for _, _, half in halves:
                half.batch = batch
            self.ranks[number].stream.append(batch)
            while any([self._moved(rank.stream) for rank in self.ranks]):
                pass

    def _moved(self, stream: deque[Batch]) -> bool:
        """Begin and end operations of one stream; return whether there were any."""
        moved = False
        while stream:
            batch = stream[0]
            halves, batch.halves = batch.halves, []
            for sender, receiver, half in halves:
                self._pair(sender, receiver, half)
                moved = True
            if batch.open:
                break
            stream.popleft()
            moved = True
        return moved

    def _pair(self, sender: int, receiver: int, half: Half) -> None:
        """Join the first half that waits on this pair of ranks, or wait behind the others."""
        lane = self.lanes.setdefault((sender, receiver), deque())
        if not lane or lane[0].is_send == half.is_send:
            lane.append(half)
            return
        other = lane.popleft()
        send, receive = (half, other) if half.is_send else (other, half)
        if send.receive != receive.receive:
            raise FaultFound(
                "a pair of ranks sends and receives its messages in different orders",
                [
                    Blame(receiver, receive.index, f"is posted while rank {sender} sends for {send.receive}"),
                    Blame(sender, send.index, f"is sent while rank {receiver} posts {receive.receive}"),
                ],
            )
        for side in (send, receive):
            if side.batch is not None:
                side.batch.open -= 1
        start_s = max(send.time_s, receive.time_s)
        action = self.ranks[sender].row[send.index]
        end_s = start_s + self._durations.send_s(action)
        self._record(sender, action, start_s, end_s)
        self._deliver(receiver, receive.receive, end_s)

    def _deliver(self, number: int, receive: Action, time_s: float) -> None:
        rank = self.ranks[number]
        rank.open[receive] -= 1
        rank.come_s[receive] = max(rank.come_s.get(receive, 0.0), time_s)
        if not rank.open[receive]:
            self._ready.append(number)

    def _start_reduce(self, number: int, action: Action) -> None:
        rank = self.ranks[number]
        start_s = max(rank.clock_s, *(rank.come_s.get(need, 0.0) for need in rank.needs[action]))
        rank.reduces.append((action.stage, rank.at, start_s))
        self._reduce(action.stage)

    def _reduce(self, stage: int) -> None:
        """Run a stage's reduction if it is the next one on all of its ranks; then what it held up."""
        owners = [self.ranks[number] for number in self.owners[stage]]
        if not all(rank.reduces and rank.reduces[0][0] == stage for rank in owners):
            return
        start_s = max(max(rank.reduces[0][2], rank.reduced_s) for rank in owners)
        end_s = start_s + self._durations.reduce_s[stage]
        for number in self.owners[stage]:
            self._record(number, act(_REDUCE, stage, 0), start_s, end_s)
            self.ranks[number].reduced_s = end_s
            self.ranks[number].reduces.popleft()
        for rank in owners:
            if rank.reduces:
                self._reduce(rank.reduces[0][0])
