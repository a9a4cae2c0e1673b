"""Time of a step whose ranks are more than the cores of their node.

Ranks that compute at the same time have equal parts of the cores; ranks that wait poll MPI and take a smaller part. A
dry run in which each rank has its own core is stretched wherever there are too few cores; the order of events stays::

    each a core      rank 0  ███████        shared, 1 core      ██████████
                     rank 1  ···████████                        ···███████████████
                                ↑   ↑ both: half as fast
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from hyfi_core.cost.machine import SharedCores
from hyfi_core.schedule.action import COMPUTE
from hyfi_core.schedule.simulate import Simulation

_COMPUTES = COMPUTE | {"REDUCE"}
"""What takes a core; a reduction on one node copies and adds in memory."""


def on_shared_cores(run: Simulation, weights: Sequence[float], cores: SharedCores) -> Simulation:
    """Return a dry run, stretched in time for ranks that share the cores of a node.

    Args:
        run: the dry run, each rank with its own core.
        weights: for each rank of the dry run, the number of a node's ranks that it stands for.
        cores: the cores of the node.
    """
    times_s, stretched_s = _stretched(_changes(run, weights, cores), run.makespan_s, cores)

    def stretch(time_s: float) -> float:
        """Return a time of the dry run as it is with shared cores: linear between two changes."""
        index = min(bisect_right(times_s, time_s), len(times_s) - 1)
        begin_s, end_s = times_s[index - 1], times_s[index]
        part = (time_s - begin_s) / (end_s - begin_s) if end_s > begin_s else 0.0
        return stretched_s[index - 1] + part * (stretched_s[index] - stretched_s[index - 1])

    events = tuple(replace(event, start_s=stretch(event.start_s), end_s=stretch(event.end_s)) for event in run.events)
    busy_s = [0.0] * len(run.busy_s)
    for event in events:
        if event.kind in COMPUTE:
            busy_s[event.rank] += event.end_s - event.start_s
    return replace(run, events=events, makespan_s=stretched_s[-1], busy_s=tuple(busy_s))


def _changes(run: Simulation, weights: Sequence[float], cores: SharedCores) -> dict[float, float]:
    """Return time -> by how many cores the need of a node's ranks changes at that time.

    Args:
        run: the dry run, each rank with its own core.
        weights: for each rank of the dry run, the number of a node's ranks that it stands for.
        cores: the cores of the node.
    """
    changes: dict[float, float] = {}
    for rank, weight in enumerate(weights):
        for start_s, end_s, share in _shares(_busy(run, rank), run.makespan_s, cores.waiting):
            changes[start_s] = changes.get(start_s, 0.0) + weight * share
            changes[end_s] = changes.get(end_s, 0.0) - weight * share
    return changes


def _stretched(
    changes: Mapping[float, float], makespan_s: float, cores: SharedCores
) -> tuple[list[float], list[float]]:
    """Return (times of the dry run at which the need of cores changes, the same moments with shared cores).

    Args:
        changes: time -> by how many cores the need of a node's ranks changes at that time.
        makespan_s: end of the dry run.
        cores: the cores of the node.
    """
    times_s = sorted({0.0, makespan_s, *changes})
    needed_cores, stretched_s = changes.get(0.0, 0.0), [0.0]
    # Time passes more slowly while more cores are needed than there are.
    for begin_s, end_s in pairwise(times_s):
        stretched_s.append(stretched_s[-1] + (end_s - begin_s) * max(1.0, needed_cores / cores.count))
        needed_cores += changes.get(end_s, 0.0)
    return times_s, stretched_s


def _shares(
    busy: Sequence[tuple[float, float]], makespan_s: float, waiting: float
) -> Iterator[tuple[float, float, float]]:
    """Yield (start, end, fraction of a core that a rank takes) until the makespan; ``busy``: when the rank computes."""
    free_s = 0.0
    # The empty interval at the end makes the loop yield the last wait.
    for start_s, end_s in (*busy, (makespan_s, makespan_s)):
        yield free_s, start_s, waiting
        yield start_s, end_s, 1.0
        free_s = end_s


def _busy(run: Simulation, rank: int) -> list[tuple[float, float]]:
    """Return the intervals in which a rank computes, without overlaps, in order."""
    intervals: list[tuple[float, float]] = []
    events = (event for event in run.events if event.rank == rank and event.kind in _COMPUTES)
    for event in sorted(events, key=lambda event: event.start_s):
        # A reduction may overlap a backward: together they take one core.
        if intervals and event.start_s <= intervals[-1][1]:
            intervals[-1] = intervals[-1][0], max(intervals[-1][1], event.end_s)
        elif event.end_s > event.start_s:
            intervals.append((event.start_s, event.end_s))
    return intervals
