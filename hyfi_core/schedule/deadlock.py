"""Analysis of deadlocks: which ranks wait for each other in a cycle.

    rank 0   F1 waits for data that rank 1 has not sent ──▶ rank 1
    rank 1   B0 waits for data that rank 0 has not sent ──▶ rank 0

No list lacks an action, so a rank that waits forever waits for a rank that also waits: there is always a cycle, and at
least one of its ranks has a list in a wrong order.
"""

from __future__ import annotations

from collections.abc import Iterator

from hyfi_core.schedule.action import Verb
from hyfi_core.schedule.dry_run import DryRun, FaultFound
from hyfi_core.schedule.fault import Blame
from hyfi_core.schedule.routes import senders

Wait = tuple[int, str]
"""(rank that is waited for, description of what it has to do)."""


def find(run: DryRun) -> FaultFound | None:
    """Return the fault of a dry run that has stopped before its end, None if it has ended.

    In a deadlock, all ranks of the cycle are blamed.
    """
    # Messages that are left in a stream come first: gangs that wait for these messages are only a consequence.
    if any(rank.stream for rank in run.ranks):
        return FaultFound("deadlock of messages in one stream per rank", list(_streams(run)))
    # ``current`` is the action at which a rank has stopped, None if it has ended its list.
    waits = {number: list(_waits(run, number)) for number, rank in enumerate(run.ranks) if rank.current}
    if waits:
        return FaultFound("deadlock", _cycle(run, waits))
    # All ranks have ended their lists, but a reduction that was started may not have run: then the ranks of its stage
    # have started their reductions in different orders.
    firsts = {number: rank.reduces[0] for number, rank in enumerate(run.ranks) if rank.reduces}
    blames = [
        Blame(number, first.at, f"waits for {_reduce_waits(run, first.stage)}") for number, first in firsts.items()
    ]
    return FaultFound("the ranks start their reductions in different orders", blames) if blames else None


def _streams(run: DryRun) -> Iterator[Blame]:
    """Yield a blame for the first messages of each stream that has any: each waits for another stream."""
    for number, rank in enumerate(run.ranks):
        if rank.stream:
            blocking = rank.stream[0]  # the messages of one action; those behind them in the stream cannot start
            peers = [
                sender if receiver == number else receiver
                for (sender, receiver), waiting in run.lanes.items()
                if any(half.batch is blocking for half in waiting)
            ]
            firsts = [f"rank {peer}, whose stream is at {_first(run, peer)}" for peer in peers]
            yield Blame(number, blocking.index, "blocks its stream and waits for " + ", ".join(firsts))


def _first(run: DryRun, number: int) -> str:
    rank = run.ranks[number]
    return str(rank.row[rank.stream[0].index]) if rank.stream else f"its end, and the rank at {rank.current}"


def _waits(run: DryRun, number: int) -> Iterator[Wait]:
    """Yield (rank, what for) for each rank that rank ``number`` waits for before its current action."""
    rank = run.ranks[number]
    action = rank.current
    if action is None:
        return
    # A rank that has joined its gang has all its data, and waits for the other ranks of the stage.
    missing = None if rank.in_gang else rank.missing()
    if missing is not None:
        for sender in senders(run.placement, number, missing):
            if _unsent(run, sender, number, missing):
                yield sender, f"rank {sender} to send for {missing}; it is at {run.ranks[sender].current}"
        return
    for other in run.placement.group(action.stage, action.direction):
        state = run.ranks[other]
        if other != number and not (state.in_gang and state.current == action):
            yield other, f"rank {other} of its stage, which is at {state.current}"


def _unsent(run: DryRun, sender: int, receiver: int, receive: object) -> bool:
    """Whether a posted receive still lacks the message of one of its senders."""
    if sender == receiver:
        return receive not in run.ranks[receiver].own_s
    return any(half.receive == receive for half in run.lanes.get((sender, receiver), ()))


def _cycle(run: DryRun, waits: dict[int, list[Wait]]) -> list[Blame]:
    """Return a blame for each rank of a cycle, found by following the waits until a rank occurs twice."""
    path: list[int] = []
    number = min(waits)
    while number not in path:
        path.append(number)
        # Any wait leads to a cycle, because every rank that is waited for waits as well.
        number, _ = waits[number][0]
    return [
        Blame(rank, run.ranks[rank].at, "waits for " + "; ".join(text for _, text in waits[rank]))
        for rank in path[path.index(number) :]
    ]


def _reduce_waits(run: DryRun, stage: int) -> str:
    """Return a description of the ranks that have started another reduction before this one."""
    others = []
    for number in run.owners[stage]:
        first = run.ranks[number].reduces[0].stage
        if first != stage:
            others.append(f"rank {number}, which is at {Verb.REDUCE}.s{first}")
    return ", ".join(others)
