"""Analysis of deadlocks: which ranks wait for each other in a circle.

Every list is complete, so a rank that waits does so for a rank that waits, too: there is always a circle, and each
circle goes through a list whose order is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from hyfi_core.schedule.action import Verb
from hyfi_core.schedule.fault import Blame
from hyfi_core.schedule.machine import FaultFound, Machine
from hyfi_core.schedule.routes import senders

Wait = tuple[int, str]
"""The rank that is waited for, and what for."""


def find(machine: Machine) -> FaultFound | None:
    """Return the fault of a machine that has stopped before its end, None if it has ended.

    Of ranks that wait for each other in a circle, all are blamed.
    """
    if any(rank.stream for rank in machine.ranks):
        return FaultFound("deadlock of messages in one stream per rank", list(_streams(machine)))
    waits = {number: list(_waits(machine, number)) for number, rank in enumerate(machine.ranks) if rank.current}
    if waits:
        return FaultFound("deadlock", _circle(machine, waits))
    blames = [
        Blame(number, rank.reduces[0][1], f"waits for {_reduce_waits(machine, rank.reduces[0][0])}")
        for number, rank in enumerate(machine.ranks)
        if rank.reduces
    ]
    return FaultFound("the ranks start their reductions in different orders", blames) if blames else None


def _streams(machine: Machine) -> Iterator[Blame]:
    """Blame the first message of every stream: none of them can begin before another one has ended."""
    for number, rank in enumerate(machine.ranks):
        if rank.stream:
            peers = [
                pair[0] if pair[1] == number else pair[1]
                for pair, lane in machine.lanes.items()
                if any(half.batch is rank.stream[0] for half in lane)
            ]
            firsts = [f"rank {peer}, whose stream is at {_first(machine, peer)}" for peer in peers]
            yield Blame(number, rank.stream[0].index, "blocks its stream and waits for " + ", ".join(firsts))


def _first(machine: Machine, number: int) -> str:
    rank = machine.ranks[number]
    return str(rank.row[rank.stream[0].index]) if rank.stream else f"its end, and the rank at {rank.current}"


def _waits(machine: Machine, number: int) -> Iterator[Wait]:
    rank = machine.ranks[number]
    action = rank.current
    if action is None:
        return
    missing = None if rank.in_gang else rank.missing()
    if missing is not None:
        for sender in senders(machine.placement, number, missing):
            if _unsent(machine, sender, number, missing):
                yield sender, f"rank {sender} to send for {missing}; it is at {machine.ranks[sender].current}"
        return
    for other in machine.placement.group(action.stage, action.direction):
        state = machine.ranks[other]
        if other != number and not (state.in_gang and state.current == action):
            yield other, f"rank {other} of its stage, which is at {state.current}"


def _unsent(machine: Machine, sender: int, receiver: int, receive: object) -> bool:
    if sender == receiver:
        return receive not in machine.ranks[receiver].own_s
    return any(half.receive == receive for half in machine.lanes.get((sender, receiver), ()))


def _circle(machine: Machine, waits: dict[int, list[Wait]]) -> list[Blame]:
    """Follow the waits until a rank occurs twice."""
    path: list[int] = []
    number = min(waits)
    while number not in path:
        path.append(number)
        number = waits[number][0][0]
    return [
        Blame(rank, machine.ranks[rank].at, "waits for " + "; ".join(text for _, text in waits[rank]))
        for rank in path[path.index(number) :]
    ]


def _reduce_waits(machine: Machine, stage: int) -> str:
    """Say which ranks have started another reduction before this one."""
    others = []
    for number in machine.owners[stage]:
        first = machine.ranks[number].reduces[0][0]
        if first != stage:
            others.append(f"rank {number}, which is at {Verb.REDUCE}.s{first}")
    return ", ".join(others)
