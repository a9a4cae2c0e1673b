"""Strata of slides, which `hyfi split` spreads evenly over splits: classes, quarters of numbers, combinations."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from data.csv_table import Table
from data.samples.labels import one_of_each
from data.spelling import canonical, one_spelling
from hyfi_core.errors import RequestError

QUANTILES = 4
_NAMED = 10
_MOST_CLASSES = 10
"""Numbers of more different values than this are divided at their quantiles."""


def strata_of(table: Table, columns: Sequence[str]) -> list[str]:
    """Return the stratum of each row: ``"HER2+"``, ``"quarter 1"``, or with several columns ``"er 1; age quarter 3"``.

    A row in which one of the columns is empty has the stratum ``""``.

    Raises:
        RequestError: A column is missing, or a slide has two labels.
    """
    each = []
    for column in columns:
        table.require(column, "--stratify")
        # Only to refuse two labels of one slide.
        one_of_each(table, column, (row[column] or None for row in table.rows), lambda name: repr(name or ""))
        texts = [row[column] for row in table.rows]
        each.append(_quarters(texts) if is_numbers(texts) else texts)
    if len(each) == 1:
        return each[0]
    named = zip(columns, each, strict=True)
    pairs = [[f"{column} {text}" if text else "" for text in texts] for column, texts in named]
    return ["; ".join(texts) if all(texts) else "" for texts in zip(*pairs, strict=True)]


def is_numbers(texts: Sequence[str]) -> bool:
    """Whether all cells but empty ones are numbers, with more than 10 different values: too many for classes."""
    values = {text for text in texts if text}
    return len(values) > _MOST_CLASSES and all(map(_is_number, values))


def fixed_groups(table: Table, groups: Sequence[str], fixed_test: str | None, *, merge: bool = False) -> set[str]:
    """Return the groups of the rows that the user gives as the test set.

    Args:
        table: The labels.
        groups: The group of each row.
        fixed_test: ``COLUMN=VALUE,VALUE``; None: no such rows.
        merge: Whether other spellings of a value are joined with it, see `data.spelling`.

    Raises:
        RequestError: The column is missing, no row has one of the values, all rows have one, a value has another
            spelling in a row and ``merge`` is off, or a group has rows of both kinds.
    """
    if fixed_test is None:
        return set()
    column, equals, text = fixed_test.partition("=")
    values = {value.strip() for value in text.split(",")}
    if not equals or "" in values:
        raise RequestError(f"--fixed-test: given {fixed_test!r}; allowed: COLUMN=VALUE, as in site=Leeds or split=test")
    table.require(column, "--fixed-test")
    texts = _as_given(table, column, values, merge)
    kinds: dict[str, set[bool]] = {}
    for name, value in zip(groups, texts, strict=True):
        kinds.setdefault(name, set()).add(value in values)
    both = next((name for name, in_test in kinds.items() if len(in_test) > 1), None)
    if both is not None:
        raise RequestError(f"--fixed-test {fixed_test}: {both} has rows of the test set, and others")
    fixed = {name for name, in_test in kinds.items() if True in in_test}
    absent = sorted(values.difference(texts))
    if absent or len(fixed) == len(kinds):
        has = ", ".join(sorted({row[column] or "(empty)" for row in table.rows})[:_NAMED])
        which = f"no row has {', '.join(absent)}" if absent else "every row has it"
        raise RequestError(f"--fixed-test {fixed_test}: {which}; {column} has: {has}")
    return fixed


def _as_given(table: Table, column: str, values: Collection[str], merge: bool) -> list[str]:
    """Return a column's texts, with other spellings of one of ``values`` replaced by it (``merge``) or refused.

    The rows with one of ``values`` are the test set: a row of the test set in another spelling would be trained on.
    """
    texts = [row[column] for row in table.rows]
    forms = {canonical(value) for value in values}
    alike = [(text, line) for text, line in zip(texts, table.lines, strict=True) if canonical(text) in forms]
    spelled = one_spelling(
        [text for text, _ in alike],
        "name",
        f"{table.name}: {column}",
        merge=merge,
        lines=[line for _, line in alike],
        known_names=sorted(values),
        knows="--fixed-test",
    )
    return [spelled.spelling.get(text, text) for text in texts]


def _quarters(texts: Sequence[str]) -> list[str]:
    """Return ``quarter 1`` to ``quarter 4`` for each number, the lowest quarter first; empty cells stay empty."""
    numbers = np.array([float(text) for text in texts if text])
    # Edges from all rows: a quarter means the same in every split.
    edges = np.quantile(numbers, [k / QUANTILES for k in range(1, QUANTILES)])
    return [f"quarter {int(np.searchsorted(edges, float(text))) + 1}" if text else "" for text in texts]


def _is_number(text: str) -> bool:
    try:
        return bool(np.isfinite(float(text)))
    except ValueError:
        return False
