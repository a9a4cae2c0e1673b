"""``cases.csv``: a row for each case, beside the rows of its slides in ``predictions.csv``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data.csv_table import write_table
from data.files import read_json_object
from data.samples.dataset import SlideRef
from data.samples.labels import Target
from pathology.predict.readout import Readout
from pathology.predict.table import PREDICTION_FILE
from workflows.console import counted, listed
from workflows.evaluation.cohort_page import CohortSlide
from workflows.tasks.task import Task

CASES_FILE = "cases.csv"


@dataclass(frozen=True, eq=False)
class CaseSlide:
    """One slide of a case.

    Attributes:
        slide_id, case_id: The slide and its case; a slide with an empty case is a case of its own.
        outputs: (members, K) outputs of the models; None: the slide has no prediction.
        label: Its label; None: unknown.
    """

    slide_id: str
    case_id: str
    outputs: NDArray[np.float64] | None
    label: Target | None = None


def write_cases(folder: Path, slides: Sequence[CaseSlide], task: Task, models: Sequence[Mapping[str, Any]]) -> None:
    """Write ``folder/cases.csv``; nothing with ``data.case_aggregate: none``.

    Each model's outputs of a case are those from which metrics by case are computed, and are read like the outputs of
    a slide. If a case is one bag, each of its slides already has the outputs of the case.

    Args:
        folder: Folder for the table.
        slides: The slides.
        task: What is predicted.
        models: ``model.json`` of each member.

    Raises:
        OSError: The file cannot be written.
    """
    if models[0].get("case_aggregate", "mean") == "none":
        return
    readouts = [task.readout(model.get("calibration")) for model in models]
    readout = readouts[0].joined(readouts)
    cases: dict[str, list[CaseSlide]] = {}
    for slide in slides:
        # Cases in the order of their first slides, as metrics by case number them.
        cases.setdefault(slide.case_id or slide.slide_id, []).append(slide)
    columns = ["case_id", "slides", "predicted", "prediction", *readout.columns, "label"]
    rows = []
    for case_id, members in cases.items():
        predicted = [slide for slide in members if slide.outputs is not None]
        row = {"case_id": case_id, "slides": f"{len(members)}", "predicted": f"{len(predicted)}"}
        row["label"] = _label_of(task, [slide.label for slide in members])
        if predicted:
            values = _values_of(predicted, task, models, readouts)
            numbers = ["" if isnan(value) else f"{value:.6f}" for value in values]
            row |= {"prediction": readout.prediction(values), **dict(zip(readout.columns, numbers, strict=True))}
        rows.append({name: row.get(name, "") for name in columns})
    write_table(folder / CASES_FILE, columns, rows)


def differing_note(task: Task, slides: Iterable[SlideRef]) -> str | None:
    """Return a sentence about cases whose slides have different labels; None if there are none.

    Args:
        task: What is predicted.
        slides: The slides that are evaluated.
    """
    labels: dict[str, dict[str, None]] = {}
    for slide in slides:
        if slide.case_id and slide.label is not None:
            labels.setdefault(slide.case_id, {})[task.text(slide.label)] = None
    different = {case: list(texts) for case, texts in labels.items() if len(texts) > 1}
    if not different:
        return None
    case, texts = next(iter(different.items()))
    return (
        f"slides of {counted(len(different), 'case')} have different labels, as those of {case}: {listed(texts)}; "
        f"metrics by case use {task.facts.of_case}"
    )


def predicted_of(out: Path, slides: Sequence[CohortSlide], task: Task) -> list[CaseSlide]:
    """Return the slides of a folder of predictions with their outputs, from the slides' folders."""
    return [
        CaseSlide(slide.slide_id, slide.case_id, _outputs(out, slide), task.target_of(slide.label)) for slide in slides
    ]


def _outputs(out: Path, slide: CohortSlide) -> NDArray[np.float64] | None:
    """Return the outputs of a predicted slide, (models, K); None if it has no prediction, or its file has none."""
    if not slide.prediction:
        return None
    outputs = read_json_object(out / slide.slide_id / PREDICTION_FILE).get("outputs")
    return None if outputs is None else np.array(outputs, np.float64)


def _values_of(
    slides: Sequence[CaseSlide], task: Task, models: Sequence[Mapping[str, Any]], readouts: Sequence[Readout]
) -> NDArray[np.float64]:
    """Return the predicted numbers of a case, one for each column of the readout: the mean over the models.

    Args:
        slides: The slides of the case, all with outputs.
        task: What is predicted.
        models: ``model.json`` of each model.
        readouts: How the outputs of each model are read.
    """
    # (slides, models, K).
    outputs = np.stack([slide.outputs for slide in slides if slide.outputs is not None])
    model_values = []
    for k, (model, readout) in enumerate(zip(models, readouts, strict=True)):
        case_outputs = torch.from_numpy(outputs[:, k].astype(np.float64))
        # A case that is one bag has the same outputs in each of its slides: nothing to combine.
        if model.get("bag", "slide") == "slide" and len(slides) > 1:
            # `by_case` combines labels, too, which do not matter here; all slides are of case 0.
            labels, same_case = _some_labels(task, len(slides)), torch.zeros(len(slides), dtype=torch.long)
            case_outputs, _ = task.by_case(case_outputs, labels, same_case, model.get("case_aggregate", "mean"))
        # Averaged after the readout, because each model has its own calibration.
        model_values.append(readout.values(case_outputs[0].double().numpy()))
    mean: NDArray[np.float64] = np.mean(model_values, axis=0)
    return mean


def _some_labels(task: Task, slides: int) -> torch.Tensor:
    """Return arbitrary labels: ``by_case`` takes labels, but only its outputs are used here."""
    label: Target = 0 if task.facts.samples_classes else (0.0,) * task.label_numbers
    return task.tensor([label] * slides)


def _label_of(task: Task, labels: Sequence[Target | None]) -> str:
    """Return the label of a case as text; empty if its labelled slides disagree, or none is labelled."""
    texts = {task.text(label) for label in labels if label is not None}
    return texts.pop() if len(texts) == 1 else ""
