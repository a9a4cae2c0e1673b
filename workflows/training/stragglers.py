"""Which trainers are slow, by kind of time: the slowest over the median.

::

    computing    rank 0 ████    rank 1 ████    rank 2 ████████    rank 3 ████      rank 2: 2 × the median
    waiting      rank 0 ████    rank 1 ████    rank 2             rank 3 ████      the others wait for it

A rank that computes, loads, validates or saves for longer than the others delays them; a rank that waits for messages
for longer is one of those that are delayed. So both are recorded, and only the first are named as stragglers.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workflows.console import plain_number
from workflows.training.bound_by import KINDS, MESSAGES, NAMES

if TYPE_CHECKING:  # `hyfi status` needs no torch
    from hyfi_core.comm.base import Communicator

MIN_OVER_MEDIAN = 1.2
MIN_DELAY = 0.05
"""A rank that is later than the median by a smaller fraction of the time is no straggler."""
_WRITES_FOR_ALL = 20
"""A rank whose saving takes more than this many times the median writes for other ranks, too; it is not slow."""
INTERVAL_STEPS = 100
"""Steps after which ranks are compared, if the epoch is not over before."""


@dataclass(frozen=True)
class TrainerPlace:
    """Where a trainer runs.

    Attributes:
        rank: Its rank as the launcher counts, by which logs and errors name it.
        host: Its host.
    """

    rank: int
    host: str


def gather_places(trainers: Communicator, rank: int) -> list[TrainerPlace]:
    """Return the places of all trainers, on trainer 0; empty elsewhere (collective)."""
    return [TrainerPlace(*fields) for fields in trainers.gather_objects([rank, socket.gethostname()]) or []]


def slowest(spent: Sequence[Mapping[str, float]], places: Sequence[TrainerPlace]) -> dict[str, dict[str, Any]]:
    """Return, for each kind of time that any trainer has spent, the trainer that spent most.

    Args:
        spent: Seconds by kind of each trainer.
        places: Where they run.

    Returns:
        Kind to ``rank``, ``host``, ``seconds`` and ``over_median``; that is None if the median is 0. The median of an
        even number of trainers is the lower one, so that one of two can be slow.
    """
    slowest_of = {}
    for kind in KINDS if len(spent) > 1 else ():
        seconds = [times[kind] for times in spent]
        most, median = max(seconds), statistics.median_low(seconds)
        if most > 0:
            trainer = places[seconds.index(most)]
            over = most / median if median > 0 else None
            slowest_of[kind] = {"rank": trainer.rank, "host": trainer.host, "seconds": most, "over_median": over}
    return slowest_of


def stragglers(spent: Sequence[Mapping[str, float]], places: Sequence[TrainerPlace]) -> list[dict[str, Any]]:
    """Return the entries of `slowest` with a relevant delay of the others, the worst first, with their ``kind``."""
    whole_s = max((sum(times.values()) for times in spent), default=0.0)
    delays = []
    for kind, entry in slowest(spent, places).items():
        over = entry["over_median"]
        # seconds − median, as over = seconds / median; all seconds if the median is 0.
        delay_s = entry["seconds"] * (1 - 1 / over) if over is not None else entry["seconds"]
        late = delay_s >= MIN_DELAY * whole_s and (over is None or over >= MIN_OVER_MEDIAN)
        # A rank that writes checkpoints for others, such as rank 0, is not slow because of that.
        writes_for_all = kind == "save" and (over is None or over > _WRITES_FOR_ALL)
        if late and kind not in MESSAGES and not writes_for_all:
            delays.append((delay_s, {"kind": kind, **entry, "delay_seconds": delay_s}))
    return [entry for _, entry in sorted(delays, key=lambda pair: -pair[0])]


def describe_stragglers(stragglers: Sequence[Mapping[str, Any]]) -> str:
    """Return the stragglers as text, ``slow: rank 3 on node2, computing 1.42 × the median``; empty without any."""
    if not stragglers:
        return ""
    return "slow: " + "; ".join(_describe(entry) for entry in stragglers)


def describe_fullest(fullest: Mapping[str, Any] | None) -> str:
    """Return the rank with the most memory as text; empty if ranks were not compared."""
    if not fullest:
        return ""
    return (
        f"most memory: {plain_number(fullest['memory_bytes'] / 1e9, 2)} GB, rank {fullest['rank']} on {fullest['host']}"
    )


def _describe(entry: Mapping[str, Any]) -> str:
    """Return one straggler as text: rank, host, kind of time, and how much more than the median."""
    over = entry["over_median"]
    by = f"{plain_number(entry['seconds'], 2)} s, most others not at all"
    if over is not None:
        by = f"{plain_number(over, 3)} × the median"
    return f"rank {entry['rank']} on {entry['host']}, {NAMES[entry['kind']]} {by}"
