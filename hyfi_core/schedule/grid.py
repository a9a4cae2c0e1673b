"""All ranks of a schedule as lines of text, time from left to right."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from hyfi_core.schedule.action import COMPUTE
from hyfi_core.schedule.fault import MARK
from hyfi_core.schedule.trace import TraceEvent

_COLUMNS = 8  # shown of long schedules before an error


def time_grid(events: Iterable[TraceEvent], ranks: int) -> str:
    """Return forwards and backwards as text: a line for each rank, a column for each time at which one starts.

    rank 0 │ F0.s0.d0  F1.s0.d0            B0.s0.d0
    rank 1 │           F0.s1.d0  B0.s1.d0
    """
    rows = _slots(events, ranks)
    return _lines(rows, {})


def error_grid(events: Iterable[TraceEvent], current: Sequence[str], blamed: Collection[int], ranks: int) -> str:
    """Return the actions that have run and the current action of each rank as text, with a mark on ranks at fault.

    Args:
        events: forwards and backwards that have run.
        current: for each rank, its current action, "" after the last.
        blamed: ranks at fault.
        ranks: number of ranks.
    """
    rows = _slots(events, ranks)
    width = max(map(len, rows), default=0)
    for row, text in zip(rows, current, strict=True):
        row += [""] * (width - len(row)) + [text]
    return _lines(rows, dict.fromkeys(blamed, MARK))


def list_grid(rows: Sequence[Sequence[object]], places: Mapping[int, int]) -> str:
    """Return the last actions of each list up to its faulty action, which gets a mark.

    Args:
        rows: the list of each rank.
        places: rank -> index of its faulty action.
    """
    last = max(places.values())
    ends = [1 + places.get(rank, last) for rank in range(len(rows))]
    shown = [[str(action) for action in row[:end][-_COLUMNS:]] for row, end in zip(rows, ends, strict=True)]
    return _lines(shown, dict.fromkeys(places, MARK))


def _slots(events: Iterable[TraceEvent], ranks: int) -> list[list[str]]:
    """Return the names of each rank's computations, in a column for each time at which any begins."""
    compute = [event for event in events if event.kind in COMPUTE]
    columns = {start: column for column, start in enumerate(sorted({event.start_s for event in compute}))}
    rows: list[list[str]] = [[""] * len(columns) for _ in range(ranks)]
    for event in compute:
        rows[event.rank][columns[event.start_s]] = event.name
    return rows


def _lines(rows: Sequence[Sequence[str]], marks: Mapping[int, str]) -> str:
    """Return a table with a line for each rank; ``marks``: rank -> mark at the end of its line."""
    if marks:
        # The ends of long rows show where the ranks have stopped.
        rows = [row[-_COLUMNS:] for row in rows]
    width = max((len(text) for row in rows for text in row), default=0)
    digits = len(str(max(len(rows) - 1, 0)))
    lines = []
    for rank, row in enumerate(rows):
        cells = "  ".join(f"{text:<{width}}" for text in row)
        mark = f" {marks[rank]}" if rank in marks else ""
        lines.append(f"rank {rank:>{digits}} │ {cells.rstrip()}{mark}".rstrip())
    return "\n".join(lines)
