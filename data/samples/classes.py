"""Classes in a column of a table: missing values, several spellings of a class, columns that have no classes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from data.missing import MISSING
from data.samples.names import NamedTable, column_in_one_way, without_missing
from data.spelling import canonical, joined_note, shown
from hyfi_core.errors import RequestError

_INTEGER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.0+)?")
_FEW_VALUES = 10
"""A column with at most this many different values has classes, whatever the number of slides."""
_FEW_FRACTIONS = 4
"""The same for numbers that are not whole."""


def column_of_classes(
    named: NamedTable,
    column: str,
    *,
    classes: Sequence[str] | None = None,
    merge: bool = False,
    missing: Iterable[str] = MISSING,
) -> NamedTable:
    """Return a table whose column has one spelling of each class, and ``""`` where the value is missing.

    ``0`` and ``0.0`` are the same class.

    Args:
        named: The table.
        column: The column of classes.
        classes: The classes, if they are known; a class may also be one of the words ``missing``.
        merge: Whether several spellings of one class are joined, see `data.spelling`.
        missing: Words that mean that a value is missing.

    Raises:
        RequestError: A class has several spellings and ``merge`` is off; or ``classes`` is None, and the column has
            numbers, names or lists instead of classes.
    """
    named = without_missing(named, column, missing, keep=classes or ())
    # First, because the comparison of spellings would refuse 1 and 1.0 as two spellings of one class.
    named = _numbers_in_one_way(named, column, classes or ())
    named = column_in_one_way(named, column, "class", merge=merge, known_names=classes or (), knows="the model")
    if classes is None:
        _refuse_other_values(named, column)
    return named


def _numbers_in_one_way(named: NamedTable, column: str, classes: Sequence[str]) -> NamedTable:
    """Return the table with one spelling of each whole number: that of ``classes``, else the shortest."""
    table = named.table
    # `match[1]` is the number without a fraction of zeros: the same for all spellings of a number.
    numbers = {value: match for value in {row[column] for row in table.rows} if (match := _INTEGER.fullmatch(value))}
    of_class = {match[1]: name for name in classes if (match := _INTEGER.fullmatch(name))}
    shortest: dict[str, str] = {}
    # The shortest first: `setdefault` keeps it.
    for value in sorted(numbers, key=len):
        shortest.setdefault(numbers[value][1], value)
    spelling = {value: of_class.get(match[1], shortest[match[1]]) for value, match in numbers.items()}
    joined = sorted((value, name) for value, name in spelling.items() if value != name)
    if not joined:
        return named
    rows = tuple({**row, column: spelling.get(row[column], row[column])} for row in table.rows)
    return NamedTable(replace(table, rows=rows), (*named.notes, joined_note(f"{table.name}: {column}", joined)))


def _refuse_other_values(named: NamedTable, column: str) -> None:
    """Refuse a column whose values are not classes but measured numbers, names, or several classes in a cell."""
    values = Counter(row[column] for row in named.table.rows if row[column])
    where, several = f"{named.table.name}: {column}", _with_several_classes(list(values))
    if several:
        raise RequestError(
            f"{where}: {shown(several)} has several classes: predict all of them with data.task: multilabel; or write "
            "one class for each slide, or list the values as model.classes if each of them is one class"
        )
    # Then most values have one row or two: too few for a class to be learnt.
    mostly_different = len(values) > values.total() / 2
    fractions = all(map(_is_number, values)) and not all(map(_INTEGER.fullmatch, values))
    if not mostly_different or len(values) <= (_FEW_FRACTIONS if fractions else _FEW_VALUES):
        return
    counts = (
        f"{len(values)} different values for {values.total()} rows, such as {', '.join(map(shown, list(values)[:3]))}"
    )
    if all(map(_is_number, values)):
        raise RequestError(
            f"{where}: {counts}: these are numbers, not classes: predict them with data.task: regression, bin them "
            "into classes in a column of their own (low, high), or list them as model.classes if they are classes"
        )
    raise RequestError(
        f"{where}: {counts}: these are names, not classes; name the column of the classes (data.target), or list "
        "them as model.classes"
    )


def _with_several_classes(values: Sequence[str]) -> str | None:
    """Return a value such as ``TP53;KRAS`` of which one part also occurs in another value; None if there is none."""
    parts = {value: {canonical(part) for part in re.split(r"[;|]", value) if part.strip()} for value in values}
    shared = Counter(part for several in parts.values() for part in several)
    return next((v for v in values if len(parts[v]) > 1 and any(shared[part] > 1 for part in parts[v])), None)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[+-]?([0-9]+([.,][0-9]*)?|[.,][0-9]+)(e[+-]?[0-9]+)?", text, re.IGNORECASE) is not None
