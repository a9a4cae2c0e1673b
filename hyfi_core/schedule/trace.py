"""Traces: events of ranks over time, simulated or measured, and their JSON form for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hyfi_core.schedule.action import COMPUTE

_LANES = ("compute", "communication", "data")
_LANE_OF: dict[str, int] = {**dict.fromkeys(COMPUTE, 0), "update": 0, "data": 2}


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event of one rank.

    Attributes:
        rank: number of the rank.
        name: a name to show, such as the text of an action.
        start_s: start, in seconds since a time that is the same for all ranks.
        end_s: end, in the same seconds; not before ``start_s``.
        kind: a ``Verb``; in measured traces also ``update``, ``data`` or a kind of traffic.
    """

    rank: int
    name: str
    start_s: float
    end_s: float
    kind: str


def to_chrome(events: Iterable[TraceEvent], names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return a trace in the Chrome format: a process for each rank, with a lane for each kind of work.

    Source: "Trace Event Format", complete ("X") and metadata ("M") events, microseconds.

    Args:
        events: events of all ranks; kinds other than gang actions, ``update`` and ``data`` are communication.
        names: rank -> name of its process; by default, rank 3 is named ``rank 3``.
    """
    # If two events start at the same time, the longer one comes first: viewers nest the shorter one into it.
    events = sorted(events, key=lambda event: (event.rank, event.start_s, -event.end_s))
    rows: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        name = (names or {}).get(rank, f"rank {rank}")
        rows.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        rows.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        # Computation and communication have a lane even without events.
        for lane in sorted({_LANE_OF.get(event.kind, 1) for event in events} | {0, 1}):
            rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": _LANES[lane]}})
    for event in events:
        rows.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": event.kind,
                "pid": event.rank,
                "tid": _LANE_OF.get(event.kind, 1),
                "ts": event.start_s * 1e6,
                "dur": (event.end_s - event.start_s) * 1e6,
            }
        )
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def to_json(events: Iterable[TraceEvent], names: Mapping[int, str] | None = None) -> str:
    """Return ``to_chrome`` as text."""
    return json.dumps(to_chrome(events, names))


def bubble(events: Iterable[TraceEvent]) -> float:
    """Return the fraction of all ranks' time in which they run neither a forward nor a backward.

    Time counts from the first to the last forward or backward of any rank. A rank's own events must not overlap.

    Raises:
        ValueError: there is no forward or backward.
    """
    compute = [event for event in events if event.kind in COMPUTE]
    if not compute:
        raise ValueError("a trace without forward and backward has no bubble")
    span_s = max(event.end_s for event in compute) - min(event.start_s for event in compute)
    busy_s = sum(event.end_s - event.start_s for event in compute)
    return 1.0 - busy_s / (span_s * len({event.rank for event in compute}))
