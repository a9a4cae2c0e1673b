"""Routes of messages: for two stages that exchange values, any rank of one may send to any rank of the other."""

from __future__ import annotations

from collections.abc import Iterable

from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import Action, Verb, act

_RECEIVES = {Verb.SEND_F: Verb.RECV_F, Verb.SEND_B: Verb.RECV_B, Verb.SEND_G: Verb.RECV_G}


class Edges:
    """The pairs of stages that exchange values.

    Attributes:
        sources: for each stage, the earlier stages that it takes values from, ascending.
        targets: for each stage, the later stages that take values from it, ascending.
    """

    def __init__(self, edges: Iterable[tuple[int, int]], stages: int) -> None:
        self.sources: list[list[int]] = [[] for _ in range(stages)]
        self.targets: list[list[int]] = [[] for _ in range(stages)]
        for source, target in sorted(set(edges)):
            if not 0 <= source < target < stages:
                raise ValueError(f"edge ({source}, {target}) does not go forward among stages 0 to {stages - 1}")
            self.sources[target].append(source)
            self.targets[source].append(target)


def counterpart(send: Action) -> Action:
    """Return the receive that matches a send."""
    verb = _RECEIVES[send.verb]
    if send.peer is None:
        raise ValueError(f"{send} has no peer")
    if verb is Verb.RECV_G:
        return act(verb, send.stage, send.peer, None, send.direction)
    return act(verb, send.peer, send.direction, send.microbatch, send.stage)


def receivers(placement: Placement, rank: int, send: Action) -> tuple[int, ...]:
    """Return the possible receivers of a rank's send; the rank itself if it holds both stages."""
    receive = counterpart(send)
    group = placement.group(receive.stage, receive.direction)
    # Values: any rank of the receiving stage may need part of this rank's box. Gradients: the rank with the same part.
    if send.verb is not Verb.SEND_G:
        return group
    return (group[placement.group(send.stage, send.direction).index(rank)],)


def senders(placement: Placement, rank: int, receive: Action) -> tuple[int, ...]:
    """Return the possible senders of a rank's receive; the rank itself if it holds both stages."""
    if receive.peer is None:
        raise ValueError(f"{receive} has no peer")
    if receive.verb is not Verb.RECV_G:
        return placement.group(receive.peer, receive.direction)
    part = placement.group(receive.stage, receive.direction).index(rank)
    return (placement.group(receive.stage, receive.peer)[part],)
