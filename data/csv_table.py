"""CSV tables given by users, with errors that name file, line and column."""

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
    """The contents of a CSV file.

    Attributes:
        name: Path of the file, for messages.
        columns: Column names in the file's order.
        rows: Values by column name; stripped, ``""`` where a value is missing.
        lines: Line number of each row in the file, from 1.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]
    lines: tuple[int, ...]

    def require(self, column: str, what: str) -> None:
        """Check that ``column`` exists.

        Raises:
            RequestError: It does not; the message names its purpose ``what`` and the existing columns.
        """
        if column not in self.columns:
            raise RequestError(f"{self.name}: no column {column!r} ({what}); it has: {', '.join(self.columns)}")

    @property
    def key(self) -> str:
        """The key column: ``slide_id`` if it exists, else ``case_id``.

        Raises:
            RequestError: Neither exists.
        """
        for key in KEYS:
            if key in self.columns:
                return key
        raise RequestError(f"{self.name}: no column 'slide_id' or 'case_id'; it has: {', '.join(self.columns)}")


def read_table(path: Path, what: str) -> Table:
    """Read a CSV in UTF-8, with or without a byte order mark; its first line names the columns.

    The separator is a comma, a semicolon or a tab. Cells and column names are stripped. Empty lines are skipped, and so
    are the empty cells without a column that spreadsheets write at the end of lines.

    Args:
        path: The file.
        what: Purpose of the file, for messages ("labels", "splits", "manifest").

    Raises:
        RequestError: The file is missing, not UTF-8 text or not CSV, has no rows, has two columns of the same name, or
            has a value without a column.
    """
    table = parse_table(path, what)
    if not table.rows:
        raise RequestError(f"{what}: {path} has no rows; it needs a line of column names and one line for each slide")
    return table


def parse_table(path: Path, what: str) -> Table:
    """Read a CSV as `read_table` does, but accept one without rows."""
    text = _text_of(path, what)
    separator = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise RequestError(f"{what}: {path}, line {reader.line_num} is not valid CSV ({error})") from error
    columns = lines[0][1] if lines else []
    twice = sorted({name for name in columns if name and columns.count(name) > 1})
    if twice:
        raise RequestError(f"{path}: two columns are named {twice[0]!r}; column names must be unique")
    rows = tuple(_row(path, line, columns, values) for line, values in lines[1:])
    named = tuple(name for name in columns if name)
    return Table(str(path), named, rows, tuple(line for line, _ in lines[1:]))


def _text_of(path: Path, what: str) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise RequestError(f"{what}: cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{what}: {path} is not a CSV in UTF-8 ({error.reason} at byte {error.start})") from error
    if "\0" in text:
        number = text.count("\n", 0, text.index("\0")) + 1
        raise RequestError(f"{what}: {path}, line {number} has a NUL character; save the file as a CSV in UTF-8")
    return text


def _row(path: Path, line: int, columns: list[str], values: list[str]) -> dict[str, str]:
    """Return one line's values by column name."""
    padded = values + [""] * (len(columns) - len(values))
    names = columns + [""] * (len(values) - len(columns))
    nameless = [value for name, value in zip(names, padded, strict=True) if value and not name]
    if nameless:
        raise RequestError(
            f"{path}, line {line}: the value {nameless[0]!r} has no column name; put values that contain the "
            f"separator into quotes"
        )
    return {name: value for name, value in zip(names, padded, strict=True) if name}


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a CSV atomically. None becomes an empty value.

    Raises:
        OSError: The folder cannot be created or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode("utf-8", "surrogateescape"))


def natural_key(text: str) -> tuple[int, float, list[tuple[int, int, str]], str]:
    """Return a sort key under which ``2 < 10``, ``-1 < 0.5`` and ``grade2 < grade10``; numbers come before words."""
    parts = [(0, int(p), "") if p.isdecimal() else (1, 0, p.casefold()) for p in re.split(r"([0-9]+)", text) if p]
    try:
        number = float(text)
    except ValueError:
        return 1, 0.0, parts, text
    return (0, number, parts, text) if number == number else (1, 0.0, parts, text)
