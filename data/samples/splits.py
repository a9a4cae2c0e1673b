"""Splits: slides for training (train), model selection (val) and evaluation (test); a case is never in two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from data.csv_table import Table, read_table
from data.missing import MISSING
from data.samples.names import cases_of, with_one_name_each, without_missing
from data.spelling import canonical
from hyfi_core.errors import RequestError

SPLITS = ("train", "val", "test")


def load_splits(
    path: Path | Table,
    rows: Iterable[Mapping[str, str]] = (),
    *,
    column: str = "split",
    merge_alike: bool = False,
    missing: Iterable[str] = MISSING,
) -> dict[str, str]:
    """Read slide -> split from a CSV with ``slide_id`` or ``case_id`` and a column of splits.

    The column has ``train``, ``val`` or ``test``; slides with an empty cell are not used. The file may be the labels or
    the store's manifest.

    Args:
        path: The file.
        rows: Rows with ``slide_id`` and ``case_id``, such as those of :func:`data.samples.labels.with_cases`: they say
            which slides a case has.
        column: The column to read.
        merge_alike: Whether several spellings of one slide or case are joined, see `data.spelling`.
        missing: Words that mean that a value is missing, see `data.missing`.

    Returns:
        Slide -> ``train``, ``val`` or ``test``; slides that are not used are left out.

    Raises:
        RequestError: The file or column is missing, a value is not a split, a case (or slide) is in two splits, a
            slide has two cases, or a name has several spellings and ``merge_alike`` is off.
    """
    table = read_table(path, "splits")
    table.require(column, "train, val or test: data.split_column, --split-column of hyfi validate")
    rows, words = list(rows), tuple(missing)
    named = with_one_name_each(table, rows, merge=merge_alike, missing=words)
    table = without_missing(named, column, words).table
    row_splits = _split_of_rows(table, column)
    stored = [{"slide_id": row.get("slide_id", ""), "case_id": row.get("case_id", "")} for row in rows]
    return _slides_by_case(table, row_splits, stored) if table.key == "case_id" else _slides(table, row_splits, stored)


def check_cases(splits: Mapping[str, str], cases: Mapping[str, str], where: str = "splits") -> None:
    """Check that no case is in two splits; a slide without a case counts as a separate case.

    Args:
        splits: Slide -> split.
        cases: Slide -> case.
        where: The file, for messages.

    Raises:
        RequestError: A case is in two splits; the message names the case, both splits and a slide in each.
    """
    first: dict[str, str] = {}
    for slide, split in splits.items():
        case = cases.get(slide) or slide
        first_slide = first.setdefault(case, slide)
        if splits[first_slide] != split:
            raise RequestError(
                f"{where}: case {case} is in two splits: {splits[first_slide]} (slide {first_slide}) and {split} "
                f"(slide {slide}); all slides of a case must be in one split (`hyfi split` keeps them together)"
            )


def _split_of_rows(table: Table, column: str) -> list[str]:
    """Return the split of each row; ``""`` if the row is not used."""
    values = [canonical(row[column]) for row in table.rows]
    for line, value in zip(table.lines, values, strict=True):
        if value.isdecimal():
            raise RequestError(
                f"{table.name}, line {line}: {column!r} has folds ({value}), not splits; name one of the columns "
                f"that `hyfi split --folds` writes for each fold, such as split_{value}"
            )
        if value and value not in SPLITS:
            raise RequestError(
                f"{table.name}, line {line}: {column} is {value!r}; allowed: {', '.join(SPLITS)}, or empty"
            )
    return values


def _slides(table: Table, row_splits: Sequence[str], stored: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return slide -> split, from a table with a row for each slide; ``stored``: slides and cases of the store."""
    cases = {row["slide_id"]: row["case_id"] for row in stored}
    cases |= cases_of(table)
    splits = _split_by_key(table, row_splits, "slide_id")
    check_cases(splits, cases, table.name)
    return splits


def _slides_by_case(table: Table, row_splits: Sequence[str], stored: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return slide -> split, from a table with a row for each case; ``stored``: slides and cases of the store."""
    if not stored:
        raise RequestError(f"{table.name}: keyed by case_id, but no slide has a known case")
    by_case = _split_by_key(table, row_splits, "case_id")
    splits = {row["slide_id"]: by_case[row["case_id"]] for row in stored if row["case_id"] in by_case}
    if by_case and not splits:
        raise RequestError(f"{table.name}: none of its cases, such as {next(iter(by_case))}, has a known slide")
    return splits


def _split_by_key(table: Table, row_splits: Sequence[str], key: str) -> dict[str, str]:
    """Return slide or case (as ``key`` says) -> split; refuse one that is in two splits."""
    splits: dict[str, str] = {}
    noun = key.removesuffix("_id")
    for line, row, split in zip(table.lines, table.rows, row_splits, strict=True):
        if not split:
            continue
        if not row[key]:
            raise RequestError(f"{table.name}, line {line}: in {split}, but no {key}")
        if splits.setdefault(row[key], split) != split:
            raise RequestError(
                f"{table.name}: {noun} {row[key]} is in two splits: {splits[row[key]]} and {split} (line {line})"
            )
    return splits
