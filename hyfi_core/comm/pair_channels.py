"""A communicator for each ordered pair of ranks, for backends with one stream per communicator.

    one stream per rank    rank 0   send A ── receive B …            rank 0 cannot receive B before A has left,
                           rank 1   receive C ── receive A …         rank 1 cannot receive A before C: deadlock
    one for each pair      0 ▶ 1    send A       1 ▶ 0   receive B   each stream has the messages of one pair, in the
                                                                     order in which both sides post them

An NCCL communicator has one stream on each GPU. The messages between pipeline stages have a defined order for each pair
of ranks (``schedule.lower``), but not for all sends and receives of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hyfi_core.comm.base import Communicator, ForwardingCommunicator, Message, Pending


def with_pair_channels(comm: Communicator) -> Communicator:
    """Return ``comm`` with a channel for each ordered pair of ranks; itself if its operations need no order.

    Collective over ``comm``.
    """
    if not comm.in_order or comm.size == 1:
        return comm
    channels: dict[tuple[int, int], Communicator] = {}
    # ``split`` is collective. In each round every rank is in one pair at most: a call makes channels of many pairs.
    for pairs in _rounds(comm.size):
        partner = pairs.get(comm.rank)
        for from_lower in (True, False):
            # The lower rank serves as the pair's color: it is in no other pair of the round.
            color = None if partner is None else min(comm.rank, partner)
            channel = comm.split(color, comm.rank)
            if channel is not None and partner is not None:
                low, high = sorted((comm.rank, partner))
                channels[(low, high) if from_lower else (high, low)] = channel
    return PairChannels(comm, channels)


def _rounds(size: int) -> list[dict[int, int]]:
    """Return rounds, each as rank -> partner; over all rounds, every two ranks are paired once (the circle method).

    Ranks that face each other are a pair. Of an odd number, one has no partner in each round::

        0 1 2      0 5 1      0 4 5
        5 4 3      4 3 2      3 2 1
    """
    circle: list[int | None] = [*range(size)]
    if size % 2:
        circle.append(None)
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        partners: dict[int, int] = {}
        for one, other in zip(circle[:half], reversed(circle[half:]), strict=True):
            if one is not None and other is not None:
                partners |= {one: other, other: one}
        rounds.append(partners)
        # The first rank stays, all others move on by one place.
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


class PairChannels(ForwardingCommunicator):
    """Forwards all calls to another communicator except exchanges.

    Args:
        comm: the group.
        channels: (from, to) -> group of these two ranks, the lower one first; for all pairs with this rank.
    """

    def __init__(self, comm: Communicator, channels: dict[tuple[int, int], Communicator]) -> None:
        super().__init__(comm)
        self._channels = channels

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start sends and receives, each on the channel of its pair."""
        # One exchange for each channel, with its messages in the order given; the peer posts them in the same order.
        incoming: dict[int, list[Message]] = {}
        for message in receives:
            incoming.setdefault(message.peer, []).append(self._in_channel(message))
        outgoing: dict[int, list[Message]] = {}
        for message in sends:
            outgoing.setdefault(message.peer, []).append(self._in_channel(message))
        pending = [self._channels[peer, self.rank].exchange([], messages) for peer, messages in incoming.items()]
        pending += [self._channels[self.rank, peer].exchange(messages, []) for peer, messages in outgoing.items()]
        return JoinedPending(pending)

    def _in_channel(self, message: Message) -> Message:
        """Return a message with its peer's rank in the channel of the pair: 0 for the lower of the two."""
        return replace(message, peer=int(message.peer > self.rank))


class JoinedPending:
    """Several pending communications as one."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    @property
    def needs_polls(self) -> bool:
        """Whether any of them needs polls."""
        return any(part.needs_polls for part in self._parts)

    def test(self) -> bool:
        """Make progress on all; return whether all have completed."""
        return all([part.test() for part in self._parts])

    def wait(self) -> None:
        """Return when all have completed."""
        for part in self._parts:
            part.wait()
