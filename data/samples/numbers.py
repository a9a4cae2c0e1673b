"""Numbers as labels: reads them from a table, and refuses values that are not finite numbers, with a hint."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

from data.csv_table import Table, read_table
from data.missing import MISSING
from data.samples.labels import Labels, Target, named_entries, one_of_each
from data.samples.names import cases_of, with_one_name_each, without_missing
from data.spelling import shown
from hyfi_core.errors import RequestError

# Stricter than `float`, which accepts 1_000, nan, and the digits of other scripts.
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_HINTS = (
    (re.compile(r"[+-]?[0-9]+,[0-9]+"), "has a comma: write a point for decimals, and nothing between thousands"),
    (re.compile(r"[<>≤≥~].*[0-9].*"), "is a bound, not a number: write the number, or leave the cell empty"),
    (re.compile(r"[0-9.]+\s*[-–]\s*[0-9.]+"), "is a range, not a number"),
    (re.compile(r"[+-]?[0-9.,]+\s*[^0-9.,]+"), "has a unit: name the unit in the column's name, and write the number"),
    (re.compile(r"[+-]?inf(inity)?", re.IGNORECASE), "is not finite"),
)


def load_numbers(
    csv: Path | Table,
    target: str,
    *,
    rows: Iterable[Mapping[str, str]] = (),
    merge_alike: bool = False,
    missing: Iterable[str] = MISSING,
) -> Labels:
    """Read the number of each slide or case from the column ``target`` of a CSV; arguments: see `load_labels`.

    Raises:
        RequestError: The file or the column is missing, a value is no finite number, a slide has two, or none has one.
    """
    table = read_table(csv, "labels")
    table.require(target, "the number of each slide: data.target")
    words = tuple(missing)
    named = without_missing(with_one_name_each(table, rows, merge=merge_alike, missing=words), target, words)
    table = named.table
    numbers = numbers_by_key(table, target)
    labelled = [number for number in numbers.values() if number is not None]
    if not labelled:
        raise RequestError(f"{table.name}: the column {target!r} is empty for every slide")
    note = f"{target}: {len(labelled)} numbers from {min(labelled):g} to {max(labelled):g}, median {median(labelled):g}"
    if len(set(labelled)) == 2:
        note += "; only two are different: if these are classes, use data.task: multiclass"
    indices: dict[str, Target | None] = {
        item: None if number is None else (number,) for item, number in numbers.items()
    }
    return Labels(target, table.key, (), indices, cases_of(table), table.rows, (*named.notes, note))


def numbers_by_key(table: Table, column: str) -> dict[str, float | None]:
    """Return slide or case -> its number in a column; None if the cell is empty.

    Raises:
        RequestError: A value is no finite number, a slide or case has two, or a row has a number but no key.
    """
    cells = [(line, row[column]) for line, row in zip(table.lines, table.rows, strict=True)]
    wrong = [(line, shown(text)) for line, text in cells if _is_wrong(text)]
    if wrong:
        first = next(text for _, text in cells if _is_wrong(text)).strip()
        hint = next((hint for form, hint in _HINTS if form.fullmatch(first)), "is not a number")
        raise RequestError(
            f"{table.name}: {column}: {named_entries(wrong)}: the first {hint}; words that mean missing belong into "
            "data.missing"
        )
    numbers = (float(text) if text else None for _, text in cells)
    return one_of_each(table, column, numbers, str, f"values of {column}")


def _is_wrong(text: str) -> bool:
    # 1e999 has the form of a number, and is infinite.
    return bool(text) and not (_NUMBER.fullmatch(text) and math.isfinite(float(text)))
