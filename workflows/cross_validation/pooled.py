"""All slides of a cross-validation together, each with the prediction of the model that has not seen its case."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.csv_table import read_own, write_table
from data.location import location
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.runtime.checkpoint import read_model_json
from pathology.predict.members import InputSpec
from pathology.predict.readout import Readout
from pathology.predict.table import FILE_NAME
from workflows.evaluation.cohort_page import (
    CohortSlide,
    one_of_each_case,
    section_of,
    stored_thumbnail,
    write_cohort_page,
)
from workflows.tasks.by_name import task_of
from workflows.tasks.page_section import MetricNumber
from workflows.tasks.task import Task

_FITTED = {"thresholds", "cutoff"}
"""Keys of a calibration that decide what is predicted."""
_NOTE = (
    "Predictions in the table above, and which of them are wrong, are by the thresholds that each fold's validation "
    "chose. Here labels have a threshold of one half, and risk groups are divided at the median of these slides."
)


@dataclass(frozen=True)
class FoldResult:
    """The predictions of a fold's model for its test slides.

    Attributes:
        fold: The fold.
        checkpoint: The model.
        model: Its ``model.json``.
        metrics: Content of the ``metrics.json`` of ``hyfi validate``.
        rows: The rows of its ``predictions.csv``.
    """

    fold: int
    checkpoint: Path
    model: Mapping[str, Any]
    metrics: Mapping[str, Any]
    rows: Sequence[Mapping[str, str]]

    @classmethod
    def read(cls, fold: int, checkpoint: Path, test: Path) -> FoldResult:
        """Read the result from the folder that ``hyfi validate`` wrote.

        Raises:
            OSError: A file cannot be read.
        """
        metrics = json.loads((test / "metrics.json").read_text(encoding="utf-8"))
        _, rows = read_own((test / FILE_NAME).read_bytes())
        return cls(fold, checkpoint, read_model_json(checkpoint), metrics, rows)

    @property
    def readout(self) -> Readout:
        """How the model's outputs are read, with what was fitted on its validation slides."""
        return task_of(self.model).readout(self.model.get("calibration"))


@dataclass(frozen=True)
class PooledFolds:
    """Results of several folds, without columns that some models lack, such as survival at their own times.

    Attributes:
        results: The result of each fold.
    """

    results: Sequence[FoldResult]

    @property
    def task(self) -> Task:
        """The task, as the first model has it."""
        return task_of(self.results[0].model)

    @property
    def columns(self) -> tuple[str, ...]:
        """The numbers that all models predict."""
        every = [set(result.readout.columns) for result in self.results]
        return tuple(name for name in self.results[0].readout.columns if all(name in columns for columns in every))

    @property
    def form_ensemble(self) -> bool:
        """Whether ``hyfi predict`` can average the models."""
        first = self.results[0]
        expected = (InputSpec.of(first.model), first.readout.columns)
        return all((InputSpec.of(result.model), result.readout.columns) == expected for result in self.results)

    def spread(self, case: bool) -> dict[str, dict[str, float | int | None]]:
        """Return mean and standard deviation of each metric over the folds that define it.

        Args:
            case: Whether to use metrics by case instead of metrics by slide.
        """
        parts = [result.metrics["case"] if case else result.metrics for result in self.results]
        # A fold may have no metrics by case.
        if any(part is None for part in parts):
            return {}
        spread: dict[str, dict[str, float | int | None]] = {}
        for name in dict.fromkeys((*self.task.metric_names, *self.task.own_names)):
            values = [float(part[name]) for part in parts if part.get(name) is not None]
            mean = statistics.fmean(values) if values else None
            # Of a sample (n − 1): folds stand for other divisions of the slides.
            sd = statistics.stdev(values) if len(values) > 1 else None
            spread[name] = {"mean": mean, "sd": sd, "folds": len(values)}
        return spread

    @property
    def note(self) -> str:
        """The page's note that each fold predicts by its own thresholds; empty if folds have none."""
        calibrations = [result.model.get("calibration") or {} for result in self.results]
        # With several targets, each has a calibration of its own.
        of_targets = [target for calibration in calibrations for target in (calibration.get("targets") or {}).values()]
        return _NOTE if any(_FITTED & calibration.keys() for calibration in (*calibrations, *of_targets)) else ""

    def slides(self, store: Path) -> list[CohortSlide]:
        """Return all slides, with thumbnails from the store."""
        names, shared, task = self.results[0].readout.columns, self.columns, self.task
        return [_slide(row, names, shared, task, store) for result in self.results for row in result.rows]

    def write(self, folder: Path, store: Path, folds: int) -> dict[str, Any]:
        """Write ``predictions.csv``, ``index.html`` and ``folds.json``, and return the content of the last.

        Args:
            folder: Folder for the files.
            store: The store with the slides.
            folds: Number of all folds, finished or not.

        Raises:
            OSError: A file cannot be written.
        """
        slides, task, readout = self.slides(store), self.task, self.results[0].readout
        self._write_predictions(folder)
        by_case = self.results[0].model.get("bag") == "case"
        counted = one_of_each_case(slides) if by_case else slides
        # Without calibration: a fold's thresholds were chosen on slides that another fold tests.
        section = section_of(counted, task, task.readout(None))
        title = f"Cross-validation: {len(self.results)} of {folds} folds of {store.name}"
        page = write_cohort_page(folder, slides, task, readout, title, section, self.note, by_case)
        return {
            "folds": {
                f"{result.fold}": {**result.metrics, "checkpoint": str(result.checkpoint)} for result in self.results
            },
            "of": folds,
            "slides": len(slides),
            "cases": len({slide.case_id or slide.slide_id for slide in slides}),
            "pooled": {name: _json(number) for name, number in section.numbers.items()},
            "spread": self.spread(case=False),
            "spread_by_case": self.spread(case=True),
            "ensemble": [str(result.checkpoint) for result in self.results] if self.form_ensemble else None,
            "predictions": str(folder / FILE_NAME),
            "page": str(page),
        }

    def _write_predictions(self, folder: Path) -> None:
        first = ("slide_id", "case_id", "path", "prediction")
        columns = [*first, *self.columns, "coverage", "flags", "status", "reason", "label", "fold"]
        rows = [{**row, "fold": f"{result.fold}"} for result in self.results for row in result.rows]
        write_table(folder / FILE_NAME, columns, [{name: row.get(name, "") for name in columns} for row in rows])


def _slide(row: Mapping[str, str], names: Sequence[str], shared: Sequence[str], task: Task, store: Path) -> CohortSlide:
    """Return a slide of the page from its row of predictions.

    Args:
        row: Its row in the ``predictions.csv`` of the fold that has tested it.
        names: Columns of numbers of the first fold's model.
        shared: Those of them that the models of all folds have.
        task: What is predicted.
        store: The store with the slide, for its thumbnail.
    """
    target = task.target_of(row["label"])
    slide = SlideStore.open(location(slide_path(store, row["slide_id"])), check_files=False)
    return CohortSlide(
        slide_id=row["slide_id"],
        case_id=row["case_id"],
        status=row["status"],
        prediction=row["prediction"],
        # Columns that some folds lack are empty for all slides.
        values=tuple(float(row[name] or "nan") if name in shared else math.nan for name in names),
        label=row["label"],
        coverage=float(row["coverage"]) if row["coverage"] else None,
        flags=tuple(flag for flag in row["flags"].split(";") if flag),
        reason=row["reason"],
        thumbnail=stored_thumbnail(slide),
        wrong=target is not None and task.is_wrong(row["prediction"], target),
    )


def _json(number: MetricNumber) -> dict[str, Any]:
    return {"value": number.value, "interval": None if number.interval is None else list(number.interval)}
