"""Survival as labels: the time of each slide or case, and whether it ended with the event or was censored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

from data.csv_table import Table, read_table
from data.missing import MISSING
from data.samples.labels import Labels, Target, named_entries, one_of_each
from data.samples.names import cases_of, with_one_name_each, without_missing
from data.samples.numbers import numbers_by_key
from data.spelling import canonical, shown
from hyfi_core.errors import RequestError

_EVENT = ("1", "true", "yes", "event", "dead", "deceased", "died", "1:deceased", "1:dead", "1:event")
_CENSORED = ("0", "false", "no", "censored", "alive", "living", "0:living", "0:alive", "0:censored")
_NAMED = 3


def load_survival(
    csv: Path | Table,
    time: str,
    event: str,
    *,
    rows: Iterable[Mapping[str, str]] = (),
    merge_alike: bool = False,
    missing: Iterable[str] = MISSING,
) -> Labels:
    """Read the label (time, event) of each slide or case from two columns of a CSV; event is 1.0, or 0.0 if censored.

    A slide or case that lacks its time or its event is unlabelled, and a note says so.

    Args:
        csv: The file.
        time: The column of times, numbers ≥ 0.
        event: The column of events: 1, true, yes, dead, deceased; 0, false, no, alive, living, censored.
        rows: Rows of the store's manifest; its spellings of slides and cases are used.
        merge_alike: Whether several spellings of one slide or case are joined.
        missing: Words that mean that a value is missing.

    Raises:
        RequestError: The file or a column is missing, a value is impossible, two rows of a slide differ (the message
            names lines), or no slide has both time and event.
    """
    table = read_table(csv, "labels")
    table.require(time, "the time of each slide: the first of data.target")
    table.require(event, "whether the time ended with the event: the second of data.target")
    words = tuple(missing)
    named = with_one_name_each(table, rows, merge=merge_alike, missing=words)
    for column in (time, event):
        named = without_missing(named, column, words)
    events, table = _events_by_key(named.table, event), named.table
    times = numbers_by_key(table, time)
    _refuse_negative(table, time)
    # Several rows of a slide agree: both columns have been checked.
    pairs = {item: (at, events.get(item)) for item, at in times.items()}
    labelled = {item: (at, ended) for item, (at, ended) in pairs.items() if at is not None and ended is not None}
    if not labelled:
        raise RequestError(f"{table.name}: no slide has both {time!r} and {event!r}")
    count, ended = len(labelled), [at for at, event in labelled.values() if event]
    at_times = f", at times up to {max(ended):g}, median {median(ended):g}" if ended else ""
    note = f"{time}, {event}: {len(ended)} events of {count}{at_times}"
    halves = [line for line, row in zip(table.lines, table.rows, strict=True) if bool(row[time]) != bool(row[event])]
    notes = [f"{table.name}: {_rows_of(halves)} only one of {time} and {event}: not used"] if halves else []
    indices: dict[str, Target | None] = {item: labelled.get(item) for item in times}
    return Labels(f"{time}, {event}", table.key, (), indices, cases_of(table), table.rows, (*named.notes, *notes, note))


def event_of(text: str) -> float | None:
    """Return 1.0 for words of an event (``dead``), 0.0 for words of a censored time (``alive``); None for others."""
    # Without spaces: files have both "0: living" and "0:LIVING".
    word = canonical(text).replace(" ", "")
    if word in _EVENT:
        return 1.0
    return 0.0 if word in _CENSORED else None


def _events_by_key(table: Table, column: str) -> dict[str, float | None]:
    """Return slide or case -> its event, 1.0 or 0.0 (see `event_of`); None if its cell is empty.

    Raises:
        RequestError: A value is neither an event nor a censored time, a slide or case has two, or a row has an event
            but no key.
    """
    cells = [(line, row[column]) for line, row in zip(table.lines, table.rows, strict=True)]
    wrong = [(line, shown(text)) for line, text in cells if text and event_of(text) is None]
    if wrong:
        raise RequestError(
            f"{table.name}: {column}: {named_entries(wrong)}: write 1 for an event (also true, yes, dead) and 0 for a "
            f"censored time (also false, no, alive){_hint({text for _, text in cells if text})}"
        )
    return one_of_each(table, column, (event_of(text) for _, text in cells), str, f"values of {column}")


def _hint(values: set[str]) -> str:
    """Return what is probably wrong with the values of a column, as the end of a message; empty if unknown."""
    if values <= {"1", "2", "1.0", "2.0"}:
        return "; 1 and 2, as some programs write them, are not told apart: recode them"
    if len(values) > 2 and all(value.replace(".", "", 1).isdigit() for value in values):
        return "; these are numbers: data.target is [time, event], in this order"
    return ""


def _refuse_negative(table: Table, time: str) -> None:
    """Refuse negative times."""
    rows = zip(table.lines, table.rows, strict=True)
    negative = [(line, row[time]) for line, row in rows if row[time] and float(row[time]) < 0]
    if negative:
        raise RequestError(
            f"{table.name}: {time}: {named_entries(negative)}: a time is not negative; leave the cell empty if it is "
            "unknown"
        )


def _rows_of(lines: list[int]) -> str:
    """Return the beginning of a sentence about rows: ``2 rows have (line 3, 7)``."""
    listed = ", ".join(map(str, lines[:_NAMED])) + (" …" if len(lines) > _NAMED else "")
    return f"{len(lines)} row{'s have' if len(lines) > 1 else ' has'} (line {listed})"
