"""The folds of slides, from the column ``fold`` that ``hyfi split --folds`` writes.

::

    fold      0      1      2      3      4
    fold_0   test   val   train  train  train     the model that reports fold k has not seen it: the next fold
    fold_1   train  test   val   train  train     selects the model's best checkpoint and calibration, the other
    …                                             folds train it
    fold_4   val    train  train  train  test
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.csv_table import KEYS, Table, csv_bytes, read_table
from data.missing import MISSING
from data.samples.names import NamedTable, without_missing
from data.samples.splits import check_cases
from hyfi_core.errors import RequestError

COLUMN = "fold"
ALL = "all"
FEWEST = 3
"""Smallest number of folds: one to test, one to validate, one to train."""


@dataclass(frozen=True)
class FoldTable:
    """The fold of each slide or case.

    Attributes:
        table: Rows with a key, and ``fold``, empty if the row is not used.
        folds: All folds, ascending.
    """

    table: Table
    folds: tuple[int, ...]

    @classmethod
    def read(
        cls,
        path: Path,
        rows: Sequence[Mapping[str, str]] = (),
        missing: Iterable[str] = MISSING,
        column: str = COLUMN,
    ) -> FoldTable:
        """Read the folds of a CSV.

        Args:
            path: The file.
            rows: Rows of the store's manifest, for the cases of slides that the file does not state.
            missing: Words that mean that a row has no fold.
            column: The column to read.

        Raises:
            RequestError: The file has no folds, fewer than three, or a case in two of them.
        """
        table = read_table(path, "splits")
        table.require(column, "--folds; `hyfi split LABELS.csv --folds 5 --out folds.csv` writes it, for data.splits")
        if column != COLUMN:  # copied to the name that all else reads
            rows_of_column = tuple({**row, COLUMN: row[column]} for row in table.rows)
            table = replace(table, columns=tuple(dict.fromkeys((*table.columns, COLUMN))), rows=rows_of_column)
        table = without_missing(NamedTable(table), COLUMN, tuple(missing)).table
        for line, row in zip(table.lines, table.rows, strict=True):
            # isdecimal alone takes digits of other scripts, too.
            if row[COLUMN] and not (row[COLUMN].isascii() and row[COLUMN].isdecimal()):
                raise RequestError(f"{table.name}, line {line}: {COLUMN} is {row[COLUMN]!r}; allowed: 0, 1, … or empty")
        folds = sorted({int(row[COLUMN]) for row in table.rows if row[COLUMN]})
        if len(folds) < FEWEST:
            raise RequestError(
                f"{table.name}: {len(folds)} folds; --folds needs at least {FEWEST}: one is reported, another chooses "
                "the best checkpoint, the rest is trained on"
            )
        fold_table = cls(table, tuple(folds))
        fold_table._check_keys(rows)
        return fold_table

    def _check_keys(self, rows: Sequence[Mapping[str, str]]) -> None:
        """Check that no slide and no case is in two folds."""
        key = self.table.key
        fold_of: dict[str, str] = {}
        for line, row in zip(self.table.lines, self.table.rows, strict=True):
            fold = f"fold {row[COLUMN]}"
            if row[COLUMN] and fold_of.setdefault(row[key], fold) != fold:
                raise RequestError(
                    f"{self.table.name}, line {line}: {key} {row[key]} is in two folds: {fold_of[row[key]]} and {fold}"
                )
        cases = {row["slide_id"]: row["case_id"] for row in rows if row.get("slide_id") and row.get("case_id")}
        # The table's own cases replace those of the store.
        cases |= {
            row["slide_id"]: row["case_id"] for row in self.table.rows if key == "slide_id" and row.get("case_id")
        }
        if key == "slide_id":
            check_cases(fold_of, cases, self.table.name)

    def chosen(self, text: str) -> tuple[int, ...]:
        """Return the folds of ``--folds``: ``all``, or numbers with commas between them.

        Raises:
            RequestError: One does not exist.
        """
        if text == ALL:
            return self.folds
        words = [word.strip() for word in text.split(",")]
        wrong = [word for word in words if not word.isdecimal() or int(word) not in self.folds]
        if wrong:
            has = ", ".join(map(str, self.folds))
            raise RequestError(f"--folds {text}: no fold {wrong[0] or '(empty)'}; {self.table.name} has {has}, or all")
        return tuple(sorted({int(word) for word in words}))

    def validating(self, fold: int) -> int:
        """Return the fold that chooses the best checkpoint of the model that ``fold`` tests."""
        # The next in the list, not fold + 1: numbers may have gaps.
        return self.folds[(self.folds.index(fold) + 1) % len(self.folds)]

    def splits(self) -> bytes:
        """Return a CSV with a column of splits for each fold, see `column_of`."""
        keys = [key for key in KEYS if key in self.table.columns]
        rows = []
        for row in self.table.rows:
            parts = {column_of(fold): self._part(row[COLUMN], fold) for fold in self.folds}
            rows.append({key: row[key] for key in keys} | {COLUMN: row[COLUMN]} | parts)
        return csv_bytes([*keys, COLUMN, *map(column_of, self.folds)], rows)

    def _part(self, fold_of_row: str, tested: int) -> str:
        """Return the split of a row for the model that the fold ``tested`` tests; empty if the row has no fold."""
        if not fold_of_row:
            return ""
        return {tested: "test", self.validating(tested): "val"}.get(int(fold_of_row), "train")


def column_of(fold: int) -> str:
    """Return the column in which ``fold`` is ``test``."""
    return f"fold_{fold}"
