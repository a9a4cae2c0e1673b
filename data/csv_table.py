"""CSV tables given by users, with errors that name file, line and column."""

from __future__ import annotations

import codecs
import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.files import write_atomically
from data.spelling import without_invisible
from hyfi_core.errors import RequestError

KEYS = ("slide_id", "case_id")
_OPTIONAL = (*KEYS, "source_mpp", "objective", "scene")
"""Optional columns. A misspelled one, such as `Case ID`, would be ignored in silence, so `read_table` refuses it."""
_SEPARATORS = ",;\t|"
_NUMBER = re.compile(r"[+-]?([0-9]+([.,][0-9]*)?|[.,][0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_FORMULA = re.compile(r"'*[=@+\t\r\n-]")
"""Cells that a spreadsheet may run as a formula, also with apostrophes in front; reading removes one apostrophe."""
_OTHER_FILES = {
    b"PK\x03\x04": "a spreadsheet (a workbook of Excel or LibreOffice)",
    b"\xd0\xcf\x11\xe0": "a workbook of Excel",
    b"\x1f\x8b": "compressed",
}


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

    def __str__(self) -> str:
        """Return the path of the file."""
        return self.name

    def require(self, column: str, purpose: str) -> None:
        """Check that ``column`` exists.

        Raises:
            RequestError: It does not; the message has ``purpose`` and the existing columns.
        """
        if column not in self.columns:
            raise RequestError(f"{self.name}: no column {column!r} ({purpose}); it has: {', '.join(self.columns)}")

    @property
    def key(self) -> str:
        """The key column: ``slide_id`` if it exists, else ``case_id``.

        Raises:
            RequestError: Neither exists.
        """
        for key in KEYS:
            if key in self.columns:
                return key
        raise RequestError(
            f"{self.name}: no column 'slide_id' or 'case_id'; it has: {', '.join(self.columns)}; name the one with the "
            f"names of slides: --id-column, or data.id_column of a run"
        )


def read_table(path: Path | Table, subject: str, used: Sequence[str] = (), *, id_column: str | None = None) -> Table:
    """Read a CSV in UTF-8 or, with a byte order mark, UTF-16; its first line names the columns.

    The separator is a comma, a semicolon, a tab or a bar, or that of a first line ``sep=…``. Cells are stripped; column
    names lose invisible characters and are normalised to NFC. Skipped are empty lines, empty cells without a column at
    the end of a line (spreadsheets write them), and a first column without a name that numbers the rows (pandas and R
    write it). ``="007"`` is the text ``007``; apostrophes that `write_table` adds are removed.

    Args:
        path: The file; a table that was read before is returned unchanged.
        subject: Purpose of the file, for messages ("labels", "splits", "manifest").
        used: Columns that the user named, so their spelling is not questioned.
        id_column: The column with the names of the slides, which becomes ``slide_id``. None: none is renamed.

    Raises:
        RequestError: The file is missing, not text or not CSV, has no rows, has two columns of the same name, has a
            value without a column, or a column such as ``Case ID`` where ``case_id`` is meant.
    """
    if isinstance(path, Table):
        return path
    table = parse_table(path, subject)
    if id_column not in (None, KEYS[0]):
        table = _with_ids(table, id_column)
    for name in table.columns:
        meant = next((column for column in _OPTIONAL if _letters(column) == _letters(name)), name)
        if meant not in (name, *table.columns) and name not in used:
            raise RequestError(f"{path}: the column {name!r} is not read as {meant!r}; rename it to {meant}")
    if not table.rows:
        raise RequestError(
            f"{subject}: {path} has no rows; it needs a line of column names and one line for each slide"
        )
    return table


def _with_ids(table: Table, id_column: str) -> Table:
    """Return a table in which the column ``id_column`` is renamed to ``slide_id``."""
    table.require(id_column, "the names of the slides: --id-column, data.id_column")
    if KEYS[0] in table.columns:
        raise RequestError(
            f"{table.name}: --id-column {id_column}: there is a column slide_id, too; remove one of them"
        )
    columns = tuple(KEYS[0] if name == id_column else name for name in table.columns)
    rows = tuple({KEYS[0] if name == id_column else name: v for name, v in row.items()} for row in table.rows)
    return Table(table.name, columns, rows, table.lines)


def parse_table(path: Path, subject: str) -> Table:
    """Read a CSV as `read_table` does, but accept one without rows."""
    # `newline=""`: the csv module must see line ends itself, as quoted cells may contain them.
    text, skipped, separator = _without_separator_line(_text_of(path, subject))
    # (line number in the file, values) of each line that is not empty; the first has the names of the columns.
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        lines = [(reader.line_num + skipped, [_value(c) for c in row]) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        line = reader.line_num + skipped
        raise RequestError(f"{subject}: {path}, line {line} is not valid CSV ({error})") from error
    _refuse_rows_in_quotes(path, lines, separator)
    # NFC, as macOS writes accents as separate characters: equal names would differ.
    columns = [unicodedata.normalize("NFC", without_invisible(name)).strip() for name in lines[0][1]] if lines else []
    if skipped and len(columns) == 1 and (separators := [s for s in _SEPARATORS if s in columns[0]]):
        raise RequestError(
            f"{path}: its first line says sep={separator}, but {separators[0]!r} separates the cells of the next one: "
            f"{columns[0]}; correct or remove the first line"
        )
    twice = sorted({name for name in columns if name and columns.count(name) > 1})
    if twice:
        raise RequestError(f"{path}: two columns are named {twice[0]!r}; column names must be unique")
    _refuse_row_names(path, columns, lines[1:])
    # Drop the index that pandas writes: a first column without a name that counts the rows.
    if columns and not columns[0] and _counts_rows([values[0] for _, values in lines[1:]]):
        columns, lines = columns[1:], [(line, values[1:]) for line, values in lines]
    rows = tuple(_row(path, line, columns, values) for line, values in lines[1:])
    named = tuple(name for name in columns if name)
    return Table(str(path), named, rows, tuple(line for line, _ in lines[1:]))


def _refuse_rows_in_quotes(path: Path, lines: Sequence[tuple[int, Sequence[str]]], separator: str) -> None:
    """Refuse a cell in quotes that has other rows in it: their slides would be lost in silence."""
    of_several_lines = [(line, value) for line, values in lines for value in values if "\n" in value]
    if not of_several_lines:
        return
    names = [values[0] for _, values in lines[1:]]
    forms, listed = {_form(name) for name in names}, set(names)
    for line, value in of_several_lines:
        hidden = [part.split(separator) for part in value.splitlines()[1:] if part.strip()]
        firsts = [cells[0].strip() for cells in hidden]
        # A comment may have as many commas as a row. So its lines are rows only if each begins like the name of a slide
        # in the first column: with a number (0 in its form), and of the form of one of these names.
        if not all("0" in _form(first) and _form(first) in forms for first in firsts):
            continue
        for cells, first in zip(hidden, firsts, strict=True):
            # A name that another row has is a number of a comment, such as 2,5 with a decimal comma.
            is_row = first not in listed or len(listed) < len(names)
            if is_row and len(cells) == len(lines[0][1]) > 1:
                raise RequestError(
                    f"{path}, line {line}: a cell in quotes has {separator.join(cells)!r} in it, which is a row: a "
                    'quote is missing, or is part of a text; in a text, write it twice ("")'
                )


def _form(name: str) -> str:
    """Return a name with 0 for each number and a for each word: ``a0`` for ``S012``."""
    return re.sub(r"[0-9]+", "0", re.sub(r"[^\W\d_]+", "a", name.strip()))


def _letters(column: str) -> str:
    """Return a column's name without case, blanks and punctuation: equal for ``Case ID`` and ``case_id``."""
    return re.sub(r"[\W_]", "", column.casefold())


def _text_of(path: Path, subject: str) -> str:
    """Return the text of a CSV; ``subject`` names it in messages.

    Raises:
        RequestError: It cannot be read, is another kind of file, or is not text in UTF-8 or UTF-16.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"{subject}: cannot read {path}: {error.strerror or error}") from error
    for start, kind in _OTHER_FILES.items():
        if data.startswith(start):
            raise RequestError(f"{subject}: {path} is {kind}, not a CSV; save the table as CSV UTF-8")
    # Excel saves "Unicode text" as UTF-16, and "CSV UTF-8" with a byte order mark.
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        # "utf-16" takes the byte order from the mark; "utf-8-sig" removes a mark, else part of the first name.
        text = data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise RequestError(
            f"{subject}: {path}, line {line} is not a CSV in UTF-8 ({error.reason} at byte {error.start}); save the "
            "table as CSV UTF-8"
        ) from error
    if "\0" in text:
        number = text.count("\n", 0, text.index("\0")) + 1
        raise RequestError(f"{subject}: {path}, line {number} has a NUL character; save the file as a CSV in UTF-8")
    return text


def _without_separator_line(text: str) -> tuple[str, int, str]:
    """Return (text without a first line ``sep=…``, number of removed lines, separator of cells)."""
    hint = re.match(r'"?sep=(.)"?[,;\t]*(?:\r\n|\r|\n)', text, re.IGNORECASE)
    if hint:
        return text[hint.end() :], 1, hint[1]
    first = next((line for line in text.splitlines() if line.strip()), "")
    # Names of columns may have separators inside quotes.
    outside = re.sub(r'"[^"]*"', "", first)
    return text, 0, max(_SEPARATORS, key=outside.count)


def _value(cell: str) -> str:
    """Return the value of a cell: stripped, ``007`` of ``="007"``, without the apostrophe of `guarded`."""
    # Spreadsheets keep the zeros of 007 only in a formula of this form.
    text = re.fullmatch(r'="([^"]*)"', cell.strip())
    return text[1].strip() if text else unguarded(cell).strip()


def _counts_rows(values: Sequence[str]) -> bool:
    """Whether values count from 0 or 1."""
    first = values[0] if values else ""
    return first in ("0", "1") and values == [str(int(first) + k) for k in range(len(values))]


def _refuse_row_names(path: Path, columns: Sequence[str], lines: Sequence[tuple[int, Sequence[str]]]) -> None:
    """Refuse a table of R with names of rows: every row has one value more than the header, the first counting rows."""
    longer = all(len(values) == len(columns) + 1 and values[-1] for _, values in lines)
    if len(lines) > 1 and longer and _counts_rows([values[0] for _, values in lines]):
        raise RequestError(
            f"{path}: every row has one value more than there are columns ({', '.join(columns)}), the first being "
            f"{lines[0][1][0]!r}: R writes names of rows like this; use write.csv(…, row.names = FALSE), or name the "
            "first column"
        )


def _row(path: Path, line: int, columns: list[str], values: list[str]) -> dict[str, str]:
    """Return one line's values by column name."""
    # Pad short lines with empty cells; cells of a long line that have no column must be empty.
    padded = values + [""] * (len(columns) - len(values))
    names = columns + [""] * (len(values) - len(columns))
    for number, (name, value) in enumerate(zip(names, padded, strict=True)):
        if value and not name:
            advice = "name the column" if number < len(columns) else "put values with the separator into quotes"
            raise RequestError(f"{path}, line {line}: the value {value!r} has no column name; {advice}")
    return {name: value for name, value in zip(names, padded, strict=True) if name}


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a CSV atomically, see `csv_bytes`.

    Raises:
        OSError: The folder cannot be created or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, csv_bytes(columns, rows))


def csv_bytes(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> bytes:
    """Return a CSV in UTF-8. None and missing values become empty cells.

    Texts that a spreadsheet would run as a formula get an apostrophe in front, which `read_table` removes: those that
    start with ``=``, ``@``, a tab or a carriage return, or with ``+`` or ``-`` and are not numbers
    (https://owasp.org/www-community/attacks/CSV_Injection).
    """
    lines = [_line(columns), *(_line([row.get(name) for name in columns]) for row in rows)]
    # File names that are not valid UTF-8 keep their bytes.
    return "".join(lines).encode("utf-8", "surrogateescape")


def _line(values: Sequence[object]) -> str:
    """Return one line of a CSV, with its line end."""
    text = io.StringIO(newline="")
    # The writer quotes cells that contain a character of its line terminator: with CRLF, lone CR and lone LF, too.
    csv.writer(text, lineterminator="\r\n").writerow([guarded(value) for value in values])
    return text.getvalue().removesuffix("\r\n") + "\n"


def guarded(value: object) -> object:
    """Return a value as `csv_bytes` writes it into a cell."""
    if not isinstance(value, str):
        return "" if value is None else value
    # _FORMULA also matches apostrophes before a formula: otherwise `unguarded` would remove one that the user wrote.
    return f"'{value}" if _FORMULA.match(value) and not _NUMBER.fullmatch(value) else value


def unguarded(value: str) -> str:
    """Return the text whose `guarded` form is ``value``."""
    return value[1:] if value.startswith("'") and _FORMULA.match(value) else value


def read_own(data: bytes) -> tuple[list[str], list[dict[str, str]]]:
    """Return (columns, rows by column name) of a CSV that `csv_bytes` made; missing values are ``""``.

    Raises:
        csv.Error: It is not a CSV.
    """
    reader = csv.reader(io.StringIO(data.decode("utf-8-sig", "surrogateescape"), newline=""))
    lines = [[unguarded(cell) for cell in line] for line in reader if line]
    columns = lines[0] if lines else []
    # A line may end early, if someone has edited the file: the values that it lacks are missing.
    padded = [line + [""] * (len(columns) - len(line)) for line in lines[1:]]
    return columns, [dict(zip(columns, line, strict=False)) for line in padded]


def natural_key(text: str) -> tuple[int, float, list[tuple[int, int, str]], str]:
    """Return a sort key under which ``2 < 10``, ``-1 < 0.5`` and ``grade2 < grade10``; numbers come before words."""
    # Numbers and words as tuples of one shape: Python cannot order an int and a str.
    parts = [(0, int(p), "") if p.isdecimal() else (1, 0, p.casefold()) for p in re.split(r"([0-9]+)", text) if p]
    try:
        number = float(text)
    except ValueError:
        return 1, 0.0, parts, text
    # NaN, which is not equal to itself, would make the order depend on the input's: the text "nan" is a word.
    return (0, number, parts, text) if number == number else (1, 0.0, parts, text)
