"""Tables that users hand in as CSV: read whole, with errors that name file, line and column."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.files import write_atomically
from hyfi_core.errors import RequestError

KEYS = ("slide_id", "case_id")


@dataclass(frozen=True)
class Table:
    """A CSV: its columns in order and its rows; values are stripped, a missing value is ``""``."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]
    lines: tuple[int, ...]

    def require(self, column: str, what: str) -> None:
        """Check that ``column`` exists.

        Raises:
            RequestError: it does not; names it, what it should hold, and the columns that exist.
        """
        if column not in self.columns:
            raise RequestError(f"{self.name}: no column {column!r} ({what}); it has: {', '.join(self.columns)}")

    @property
    def key(self) -> str:
        """The column that says whom a row is about: ``slide_id`` where there is one, else ``case_id``.

        Raises:
            RequestError: neither is there.
        """
        for key in KEYS:
            if key in self.columns:
                return key
        raise RequestError(f"{self.name}: no column 'slide_id' or 'case_id'; it has: {', '.join(self.columns)}")


def read_table(path: Path, what: str) -> Table:
    """Read a CSV (UTF-8, with or without a byte order mark; first line: columns; empty lines are skipped).

    Args:
        path: the file.
        what: what the file is to the user, for the message ("labels", "splits").

    Raises:
        RequestError: it is missing, not text, or has no rows, two columns of one name or a row of more values than
            columns.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, [value.strip() for value in row]) for row in reader if any(map(str.strip, row))]
    except OSError as error:
        raise RequestError(f"{what}: cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise RequestError(f"{what}: {path} is not a CSV in UTF-8: {error}") from error
    if len(lines) < 2:
        raise RequestError(f"{what}: {path} has no rows; it needs a line of column names and one line for each slide")
    return _table(path, lines[0][1], lines[1:])


def _table(path: Path, columns: list[str], lines: list[tuple[int, list[str]]]) -> Table:
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise RequestError(f"{path}: two columns are named {twice[0]!r}")
    for line, values in lines:
        if len(values) > len(columns):
            raise RequestError(f"{path}, line {line}: {len(values)} values for {len(columns)} columns")
    rows = tuple(dict(zip(columns, values + [""] * (len(columns) - len(values)), strict=True)) for _, values in lines)
    return Table(str(path), tuple(columns), rows, tuple(line for line, _ in lines))


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a CSV that is there whole or not at all: beside, synced, renamed. None becomes an empty value.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def natural_key(text: str) -> tuple[int, float, list[tuple[int, int, str]], str]:
    """Return a sort key under which ``2 < 10``, ``-1 < 0.5`` and ``grade2 < grade10``; numbers come before words."""
    parts = [(0, int(p), "") if p.isdecimal() else (1, 0, p.casefold()) for p in re.split(r"([0-9]+)", text) if p]
    try:
        number = float(text)
    except ValueError:
        return 1, 0.0, parts, text
    return (0, number, parts, text) if number == number else (1, 0.0, parts, text)
