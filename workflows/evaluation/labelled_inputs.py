"""Labels of slides to predict, as of an external test set; their table need not be the slides' own manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.csv_table import Table, read_table
from data.location import location
from data.missing import MISSING
from data.samples.labels import with_cases
from data.samples.matching import match_labels
from data.samples.names import STORE_MANIFEST, with_one_spelling_of_cases
from data.samples.splits import SPLITS, load_splits
from hyfi_core.errors import RequestError
from pathology.predict.inputs import SlideInput

ALL = "all"
"""As ``--split``: every slide."""


@dataclass(frozen=True)
class InputLabels:
    """The options of a command about the labels of the slides.

    Attributes:
        labels: A CSV keyed by slide or case; None: the manifest of the store or of the slides.
        target: Column of the labels, or several with commas between; None: as in training.
        split: Predict only slides of this split; ``all`` or None: every slide.
        id_column: The column that has the names of the slides; None: as in training, or ``slide_id``.
    """

    labels: Path | None = None
    target: str | None = None
    split: str | None = None
    id_column: str | None = None

    def __bool__(self) -> bool:
        return self != InputLabels()

    def __post_init__(self) -> None:
        if self.split not in (None, ALL, *SPLITS):
            raise RequestError(f"--split: given {self.split!r}; allowed: {', '.join((*SPLITS, ALL))}")

    def of(
        self, inputs: Sequence[SlideInput], paths: Sequence[Path], model: Mapping[str, Any]
    ) -> tuple[list[SlideInput], str]:
        """Return (the slides to predict with their labels, a text about how the table matches them).

        Args:
            inputs: All slides.
            paths: The slides as the user named them.
            model: ``model.json`` of the checkpoint.

        Raises:
            RequestError: There is no such table or column, no slide has a label, none is in the split, or the target
                has another number of columns than the model's.
        """
        from workflows.tasks.by_name import task_of

        task = task_of(model)
        if self.target is not None:
            task = task.with_target(self.target)
        table = keyed_table(self._table(paths), self.id_column, model)
        # In the form of a store's manifest, which the functions below expect.
        rows = [{"slide_id": slide.slide_id, "case_id": slide.case_id, "status": "done"} for slide in inputs]
        missing = missing_of(model)
        merge, manifest = bool(model.get("merge_alike", False)), _manifest_of(paths)
        # So that slides of a case find each other.
        rows = with_one_spelling_of_cases(rows, manifest, merge=merge, missing=missing)
        # Classes in the order of training: a table with other values must not renumber them.
        labels = task.read_again(table, rows, merge, missing)
        rows = with_cases(rows, labels, str(table), manifest)
        match = match_labels(rows, labels, splits=None, table=str(table), manifest=manifest)
        # A table of more slides than these is fine, if it has any of them.
        match.check(str(table), allow_unmatched=bool(match.slides))
        targets = [labels.of(row["slide_id"], row["case_id"]) for row in rows]
        labelled = [
            replace(slide, case_id=row["case_id"], label="" if target is None else task.text(target))
            for slide, row, target in zip(inputs, rows, targets, strict=True)
        ]
        return self._chosen(labelled, table, rows, model, missing), match.describe()

    def _chosen(
        self,
        inputs: list[SlideInput],
        table: Table,
        rows: Sequence[Mapping[str, str]],
        model: Mapping[str, Any],
        missing: tuple[str, ...],
    ) -> list[SlideInput]:
        """Return the slides that are in ``self.split``; all slides if it is ``all`` or None.

        Args:
            inputs: All slides.
            table: The table with the column of splits.
            rows: One row for each slide, as in a store's manifest.
            model: ``model.json``, with the name of that column.
            missing: Words that mean that a value is missing.
        """
        if self.split in (None, ALL):
            return inputs
        column = model.get("split_column", "split")
        splits = load_splits(table, rows, column=column, missing=missing)
        chosen = [slide for slide in inputs if splits.get(slide.slide_id) == self.split]
        if not chosen:
            none = f"none of the {len(inputs)} slides is in it"
            raise RequestError(f"--split {self.split}: {none}, by the column {column!r} of {table}")
        return chosen

    def _table(self, paths: Sequence[Path]) -> Path:
        """Return the CSV to read: ``labels`` if given, else the only manifest of the slides."""
        if self.labels is not None:
            return location(self.labels)
        inputs = [location(path) for path in paths]
        manifests = [path if path.suffix.lower() == ".csv" else path / "manifest.csv" for path in inputs]
        if len(manifests) == 1 and manifests[0].is_file():
            return manifests[0]
        options = {"--target": self.target, "--split": self.split, "--id-column": self.id_column}
        # One is given: without options about labels, no table is read.
        option = next(name for name, value in options.items() if value is not None)
        raise RequestError(f"{option}: the slides have no manifest to read it from; give --labels CSV")


def missing_of(model: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words that meant a missing value in training."""
    return MISSING if model.get("missing") is None else tuple(model["missing"])


def _manifest_of(paths: Sequence[Path]) -> str:
    """Return the name of the table with the slides' cases, for messages."""
    tables = [str(path) for path in paths if path.suffix.lower() == ".csv"]
    if not tables:
        return STORE_MANIFEST
    return tables[0] if len(paths) == 1 else "the slides' manifests"


def keyed_table(path: Path, id_column: str | None, model: Mapping[str, Any]) -> Table:
    """Return a table of labels whose slide names are in ``id_column``; None: the column of training, if there is one.

    Raises:
        RequestError: It cannot be read, or has no such column.
    """
    trained = model.get("id_column")
    if id_column is None and trained is not None:
        # The column of training need not be in another cohort's table.
        table = read_table(path, "labels", used=(trained,))
        return read_table(path, "labels", id_column=trained) if trained in table.columns else table
    return read_table(path, "labels", id_column=id_column)
