"""The outcome of a slide, and the table ``predictions.csv`` of all, which is replaced atomically after each slide."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, Self

from data.csv_table import read_own, write_table
from hyfi_core.errors import RequestError
from pathology.claims import Claim

FILE_NAME = "predictions.csv"
PREDICTION_FILE = "prediction.json"
"""File with all facts of one prediction, in the folder of its slide."""
SOURCE_FILE = ("sha256", "size_bytes")
"""Attributes of a stored slide, and keys of ``source_file`` in `PREDICTION_FILE`, that identify its file."""
CLAIM = f".{FILE_NAME}.claim"
"""Name of the claim that a process holds while it writes the table."""
DONE, INCOMPLETE, FAILED = "done", "incomplete", "failed"


@dataclass(frozen=True)
class Prediction:
    """The outcome of one slide.

    Attributes:
        slide_id: Name of the slide and of its folder of results.
        case_id: The patient or specimen; empty if unknown.
        path: The slide, as given by the user or found in a folder.
        status: ``done``; ``incomplete``: less tissue was seen than the checkpoint requires; ``failed``.
        prediction: The class with the highest probability, or what else is predicted; empty if failed, or if
            incomplete without ``allow_partial``.
        values: Numbers of the readout, such as the probability of each class; NaN: none. Empty without a prediction.
        spread: Standard deviation, over an ensemble, of the main number of ``values``; None for one model.
        coverage: Fraction of the tissue that the model has seen; None if the slide failed before it was known.
        flags: Warnings about the slide, such as ``cropped``.
        reason: Why it failed or is incomplete.
        source_mpp: Microns per pixel of the slide file that were used; None if it was read from a store or failed.
    """

    slide_id: str
    case_id: str
    path: str
    status: str
    prediction: str = ""
    values: tuple[float, ...] = ()
    spread: float | None = None
    coverage: float | None = None
    flags: tuple[str, ...] = ()
    reason: str = ""
    source_mpp: float | None = None

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Self:
        """Return a prediction from its attributes, with lists for tuples."""
        attributes: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**attributes)

    def row(self, names: Sequence[str], with_spread: bool) -> dict[str, str]:
        """Return the row of ``predictions.csv``, in which unknown values are empty.

        Args:
            names: Columns of the values.
            with_spread: Whether there is a column for the spread of an ensemble.
        """
        values = ["" if isnan(value) else f"{value:.6f}" for value in self.values] or [""] * len(names)
        row = {
            "slide_id": self.slide_id,
            "case_id": self.case_id,
            "path": self.path,
            "prediction": self.prediction,
            **dict(zip(names, values, strict=True)),
            "coverage": "" if self.coverage is None else f"{self.coverage:.4f}",
            "flags": ";".join(self.flags),
            "status": self.status,
            "reason": self.reason,
        }
        return row | ({"spread": "" if self.spread is None else f"{self.spread:.6f}"} if with_spread else {})


@dataclass(frozen=True)
class PredictionReport:
    """Result of a run; the same on every rank.

    Attributes:
        done, incomplete, failed: Slides of this run, in order; the last two have a reason.
        skipped: Names of slides that were finished earlier.
        stopped: Whether the run ended early on request.
    """

    done: tuple[Prediction, ...]
    incomplete: tuple[Prediction, ...]
    failed: tuple[Prediction, ...]
    skipped: tuple[str, ...]
    stopped: bool = False

    @classmethod
    def of(cls, outcomes: Sequence[Prediction], skipped: tuple[str, ...], stopped: bool) -> PredictionReport:
        """Return the report of slides that were predicted or failed."""

        def having(status: str) -> tuple[Prediction, ...]:
            return tuple(outcome for outcome in outcomes if outcome.status == status)

        return cls(having(DONE), having(INCOMPLETE), having(FAILED), skipped, stopped)


class PredictionTable:
    """``predictions.csv`` of one folder. Rows of earlier runs and of other processes are kept until they are replaced.

    Args:
        folder: Folder of the table, which need not exist yet.
        names: Columns of the numbers, see `pathology.predict.readout.Readout.columns`.
        with_spread: Whether there is a column ``spread``, for an ensemble.
        keep: Whether to read the rows of an existing table; if not, the caller removes it.

    Raises:
        RequestError: An existing table has other columns or cannot be read.
    """

    def __init__(self, folder: Path, names: Sequence[str], *, with_spread: bool, keep: bool = True) -> None:
        self.path = folder / FILE_NAME
        self._names = tuple(names)
        self._with_spread = with_spread
        self.columns = columns(names, with_spread=with_spread)
        self._rows: dict[str, dict[str, str]] = self._load() if keep else {}

    def row(self, slide_id: str) -> Mapping[str, str] | None:
        """Return the row of a slide; None if it has none."""
        return self._rows.get(slide_id)

    def put(self, prediction: Prediction) -> None:
        """Set the row of a slide and write the table, including rows that other processes have written meanwhile.

        Raises:
            OSError: The table cannot be written.
        """
        with Claim.wait(self.path.parent, CLAIM):
            # Under the claim, so that no other process adds a row between reading and writing.
            self._rows = self._load()
            self._rows[prediction.slide_id] = prediction.row(self._names, self._with_spread)
            write_table(self.path, self.columns, [self._rows[slide_id] for slide_id in sorted(self._rows)])

    def _load(self) -> dict[str, dict[str, str]]:
        """Return the rows that an earlier run has written, by slide."""
        if not self.path.exists():
            return {}
        try:
            header, listed = read_own(self.path.read_bytes())
            rows = {row["slide_id"]: row for row in listed} if header == self.columns else {}
        except (OSError, ValueError, csv.Error) as error:
            raise RequestError(f"{self.path}: cannot be read ({error}); choose another --out") from error
        if header != self.columns:
            raise RequestError(
                f"{self.path}: has the columns {', '.join(header)}, but this model writes {', '.join(self.columns)}; "
                f"choose another --out, or use --overwrite to start over"
            )
        return rows


def predicted_files(folder: Path) -> dict[str, str]:
    """Return slide_id -> slide file, from the table in a folder of predictions; without slides of stores.

    Raises:
        RequestError: The table cannot be read.
    """
    path = folder / FILE_NAME
    try:
        rows = read_own(path.read_bytes())[1]
    except FileNotFoundError:
        return {}
    except (OSError, csv.Error) as error:
        raise RequestError(f"{path}: cannot be read ({error}); choose another --out") from error
    files = {row.get("slide_id", ""): row.get("path", "") for row in rows}
    return {name: file for name, file in files.items() if file and not file.endswith(".zarr")}


def columns(names: Sequence[str], *, with_spread: bool) -> list[str]:
    """Return the names of the table's columns."""
    head = ["slide_id", "case_id", "path", "prediction", *names]
    return [*head, "coverage", "flags", "status", "reason", *(["spread"] if with_spread else [])]
