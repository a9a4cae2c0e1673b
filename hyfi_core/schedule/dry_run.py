"""The dry run of a schedule: every rank goes through its list of actions, in modelled time.

Posting a receive and starting a send or a reduction never wait. For each ordered pair of ranks, the n-th send pairs
with the n-th receive; the message starts when both have been posted::

    rank 0   F0 ── SEND ╌╌╌╌╌╌╌╌╌╮                       SEND is posted, rank 0 continues
    rank 1        …        RECV ─┴═══════▶ F0            RECV is posted: the message starts; F0 waits for it

Gang actions (F, B, I, W) wait for the messages that their rank receives for them, and for all ranks of their stage (the
*gang*). A REDUCE waits for the gradients of the other direction if these are sent. Reductions run in the order in which
their ranks start them.

With ``one_stream``, all sends and receives of a rank also go through one stream, as on a GPU with one communicator for
all of them: a message starts when all that its rank posted before has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import COMPUTE, TO_WEIGHTS, Action, Schedule, Verb, act
from hyfi_core.schedule.check import Needs
from hyfi_core.schedule.fault import Blame
from hyfi_core.schedule.routes import counterpart, receivers, senders
from hyfi_core.schedule.trace import TraceEvent

_F, _REDUCE = Verb.F, Verb.REDUCE  # looked up once: the tests run this a million times
_SENDS = (Verb.SEND_F, Verb.SEND_B, Verb.SEND_G)


class FaultFound(Exception):  # noqa: N818 - the caller turns it into a ScheduleError
    """The schedule cannot be run to its end."""

    def __init__(self, problem: str, blames: Sequence[Blame]) -> None:
        super().__init__(problem)
        self.problem = problem
        self.blames = blames


@dataclass(frozen=True)
class Durations:
    """Seconds of each stage's forward, backward, messages and reduction.

    Attributes:
        forward_s: seconds of a forward.
        backward_s: seconds of a backward, whole or both of its parts.
        message_s: seconds of a message that the stage sends.
        reduce_s: seconds of the reduction of the stage's gradients.
        weight_s: seconds of a backward's second part, W, where it has two; included in ``backward_s``.
        edge_s: (from, to) of stages -> seconds of a message in either direction; by default ``message_s``.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    message_s: Sequence[float]
    reduce_s: Sequence[float]
    weight_s: Sequence[float]
    edge_s: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def compute_s(self, action: Action) -> float:
        """Return the seconds of a gang action."""
        stage = action.stage
        if action.verb is _F:
            return self.forward_s[stage]
        if action.verb is Verb.W:
            return self.weight_s[stage]
        return self.backward_s[stage] - (self.weight_s[stage] if action.verb is Verb.I else 0.0)

    def send_s(self, send: Action) -> float:
        """Return the seconds of a message."""
        if not self.edge_s or send.peer is None or send.verb is Verb.SEND_G:
            return self.message_s[send.stage]
        edge = min(send.stage, send.peer), max(send.stage, send.peer)
        return self.edge_s.get(edge, self.message_s[send.stage])


@dataclass(slots=True)
class Half:
    """One side, send or receive, of a message between two ranks.

    Attributes:
        is_send: which side it is.
        receive: the receive that it belongs to; of a send, its counterpart.
        index: index of the action in the list of this side's rank.
        time_s: when the side was posted.
        batch: the messages of the same action; None unless all messages of a rank go through one stream.
    """

    is_send: bool
    receive: Action
    index: int
    time_s: float
    batch: Batch | None = None


@dataclass(slots=True)
class Batch:
    """The messages of one send or receive action, in the stream of their rank.

    Attributes:
        index: index of the action in the rank's list.
        halves: (sender, receiver, half) of each message; empty once this rank has posted them.
        open: number of messages whose other side has not been posted.
        end_s: end of the messages that have started, the latest.
    """

    index: int
    halves: list[tuple[int, int, Half]]
    open: int
    end_s: float = 0.0


class PendingReduce(NamedTuple):
    """A reduction that a rank has started, and that waits for other ranks of its stage.

    Attributes:
        stage: whose gradients are summed.
        at: index of the action in the rank's list.
        start_s: when the rank was ready for it.
    """

    stage: int
    at: int
    start_s: float


@dataclass(slots=True)
class RankState:
    """The state of one rank."""

    row: tuple[Action, ...]
    needs: Needs
    at: int = 0  # index of the current action in ``row``
    clock_s: float = 0.0
    in_gang: bool = False  # its data has arrived; it waits for the other ranks of its stage
    open: dict[Action, int] = field(default_factory=dict)  # posted receive -> messages that have not arrived
    arrived_s: dict[Action, float] = field(default_factory=dict)  # receive -> arrival of its last message
    own_s: dict[Action, float] = field(default_factory=dict)  # receive -> time at which this rank sent to itself
    stream: deque[Batch] = field(default_factory=deque)  # pending messages, with one stream
    stream_s: float = 0.0  # when those before them have ended
    reduces: deque[PendingReduce] = field(default_factory=deque)  # in the order in which the rank has started them
    reduced_s: float = 0.0
    live: int = 0  # forwards whose activations are kept
    peak_live: int = 0
    busy_s: float = 0.0
    end_s: float = 0.0

    @property
    def current(self) -> Action | None:
        """The current action, None after the last."""
        return self.row[self.at] if self.at < len(self.row) else None

    def missing(self) -> Action | None:
        """Return a receive that the current action waits for, None if all data has arrived."""
        return next((need for need in self.needs[self.row[self.at]] if self.open.get(need)), None)


class DryRun:
    """One dry run of lists of actions in which ``check.find_faults`` has found no fault.

    Args:
        schedule: lowered.
        placement: which ranks hold which stage.
        needs: for each rank, the actions that must precede each of its actions.
        durations: how long actions take.
        sum_directions: whether a reduction sums the gradients of both directions.
        one_stream: whether all messages of a rank go through one stream.

    Attributes:
        placement: which ranks hold which stage.
        ranks: the state of each rank.
        lanes: (sender, receiver) -> sides of messages that wait for their other side, in order.
        spans: (rank, action, start, end) of each event.
        owners: for each stage, the ranks that reduce its gradients.
    """

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
        self.lanes: dict[tuple[int, int], deque[Half]] = {}  # (sender, receiver) -> sends or receives without partner
        self.spans: list[tuple[int, Action, float, float]] = []  # (rank, action, start, end)
        self._durations = durations
        self._in_gang: dict[Action, int] = {}  # gang action -> number of ranks that have come to it
        # Ranks that may be able to continue: first all, later those whose data has arrived or whose gang has ended.
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
        """Run until every rank has ended or waits forever; see ``deadlock.find``.

        Raises:
            FaultFound: two ranks send and receive their messages in different orders.
        """
        while self._ready:
            self._advance(self._ready.pop())

    def _advance(self, number: int) -> None:
        """Run a rank until it waits."""
        rank = self.ranks[number]
        while rank.at < len(rank.row) and not rank.in_gang:
            action = rank.row[rank.at]
            verb = action.verb
            if (verb in COMPUTE or verb is _REDUCE) and rank.missing() is not None:
                return  # `_deliver` puts the rank back into `_ready`
            if verb in COMPUTE:
                self._join_gang(number, action)
                return  # the last rank of the gang puts all of its ranks back into `_ready`
            if verb is _REDUCE:
                self._start_reduce(number, action)
            elif verb in _SENDS:
                self._send(number, action)
            else:
                self._post(number, action)
            rank.at += 1

    def _join_gang(self, number: int, action: Action) -> None:
        """Join the gang of a stage; the last rank to arrive runs the action for all."""
        self.ranks[number].in_gang = True
        gang = self.placement.group(action.stage, action.direction)
        self._in_gang[action] = self._in_gang.get(action, 0) + 1
        if self._in_gang[action] < len(gang):
            return
        start_s = 0.0
        for n in gang:
            rank = self.ranks[n]
            start_s = max(start_s, rank.clock_s, *(rank.arrived_s.get(need, 0.0) for need in rank.needs[action]))
        end_s = start_s + self._durations.compute_s(action)
        for n in gang:
            self._compute(n, action, start_s, end_s)
        self._ready += gang

    def _compute(self, number: int, action: Action, start_s: float, end_s: float) -> None:
        """Run a gang action on one rank, from ``start_s`` to ``end_s``."""
        rank = self.ranks[number]
        # ``live`` counts forwards whose activations are kept: until B or, of a backward in two parts, until W.
        rank.live += (action.verb is _F) - (action.verb in TO_WEIGHTS)
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
        """Start a send: one message to each of its receivers."""
        rank = self.ranks[number]
        receive = counterpart(action)
        halves = []
        for receiver in receivers(self.placement, number, action):
            if receiver != number:
                halves.append(
                    (number, receiver, Half(is_send=True, receive=receive, index=rank.at, time_s=rank.clock_s))
                )
            else:
                # A rank sends no message to itself: the receive has its data at once, or as soon as it is posted.
                rank.own_s[receive] = rank.clock_s
                if receive in rank.open:
                    self._deliver(number, receive, rank.clock_s)
        self._start(number, halves)

    def _post(self, number: int, action: Action) -> None:
        """Post a receive: one message from each of its senders."""
        rank = self.ranks[number]
        sending = senders(self.placement, number, action)
        rank.open[action] = len(sending)
        halves = []
        for sender in sending:
            if sender != number:
                halves.append((sender, number, Half(is_send=False, receive=action, index=rank.at, time_s=rank.clock_s)))
            elif action in rank.own_s:  # this rank has sent to itself already, without a message
                self._deliver(number, action, rank.own_s[action])
        self._start(number, halves)

    def _start(self, number: int, halves: list[tuple[int, int, Half]]) -> None:
        """Start a rank's halves of the messages of its current action, or queue them in its stream."""
        rank = self.ranks[number]
        if not self._one_stream:
            for sender, receiver, half in halves:
                self._pair(sender, receiver, half)
        elif halves:
            batch = Batch(index=rank.at, halves=halves, open=len(halves))
            for _, _, half in halves:
                half.batch = batch
            rank.stream.append(batch)
            # Advance all streams until none moves. A list: with a generator, ``any`` would end at the first that moves.
            while any([self._advance_stream(each) for each in self.ranks]):
                pass

    def _advance_stream(self, rank: RankState) -> bool:
        """Start and end messages of a rank's stream while possible; return whether there were any."""
        moved = False
        while rank.stream:
            batch = rank.stream[0]
            halves, batch.halves = batch.halves, []
            for sender, receiver, half in halves:
                # In one stream, a message starts after the rank's earlier messages have ended.
                half.time_s = max(half.time_s, rank.stream_s)
                self._pair(sender, receiver, half)
                moved = True
            if batch.open:
                break
            rank.stream.popleft()
            rank.stream_s = max(rank.stream_s, batch.end_s)
            moved = True
        return moved

    def _pair(self, sender: int, receiver: int, half: Half) -> None:
        """Pair a half with the first opposite one that waits between these ranks; if there is none, it waits itself."""
        lane = self.lanes.setdefault((sender, receiver), deque())
        # A lane has sends only or receives only, because opposite halves are paired at once.
        if not lane or lane[0].is_send == half.is_send:
            lane.append(half)
            return
        other = lane.popleft()
        send, receive = (half, other) if half.is_send else (other, half)
        # Messages have no tags: the n-th send meets the n-th receive, even if they belong to different actions.
        if send.receive != receive.receive:
            raise FaultFound(
                "a pair of ranks sends and receives its messages in different orders",
                [
                    Blame(receiver, receive.index, f"is posted while rank {sender} sends for {send.receive}"),
                    Blame(sender, send.index, f"is sent while rank {receiver} posts {receive.receive}"),
                ],
            )
        start_s = max(send.time_s, receive.time_s)
        action = self.ranks[sender].row[send.index]
        end_s = start_s + self._durations.send_s(action)
        for side in (send, receive):
            if side.batch is not None:
                side.batch.open -= 1
                side.batch.end_s = max(side.batch.end_s, end_s)
        self._record(sender, action, start_s, end_s)
        self._deliver(receiver, receive.receive, end_s)

    def _deliver(self, number: int, receive: Action, time_s: float) -> None:
        rank = self.ranks[number]
        rank.open[receive] -= 1
        rank.arrived_s[receive] = max(rank.arrived_s.get(receive, 0.0), time_s)
        if not rank.open[receive]:
            self._ready.append(number)

    def _start_reduce(self, number: int, action: Action) -> None:
        rank = self.ranks[number]
        start_s = max(rank.clock_s, *(rank.arrived_s.get(need, 0.0) for need in rank.needs[action]))
        # Started without waiting: the rank continues before the other ranks have started theirs.
        rank.reduces.append(PendingReduce(action.stage, rank.at, start_s))
        self._reduce(action.stage)

    def _reduce(self, stage: int) -> None:
        """Run a stage's reduction if it is the next one on all of its ranks, then those that waited for it."""
        owners = [self.ranks[number] for number in self.owners[stage]]
        # A reduction is collective: all owners must have started it, and none may have an earlier one pending.
        if not all(rank.reduces and rank.reduces[0].stage == stage for rank in owners):
            return
        start_s = max(max(rank.reduces[0].start_s, rank.reduced_s) for rank in owners)
        end_s = start_s + self._durations.reduce_s[stage]
        for number in self.owners[stage]:
            self._record(number, act(_REDUCE, stage, 0), start_s, end_s)
            self.ranks[number].reduced_s = end_s
            self.ranks[number].reduces.popleft()
        for rank in owners:
            if rank.reduces:
                self._reduce(rank.reduces[0].stage)
