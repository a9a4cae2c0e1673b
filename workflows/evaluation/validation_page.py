"""The files of ``hyfi validate --out``: tables of slides and cases, and the cohort page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.samples.dataset import SlideDataset
from data.samples.trained.trained_notes import TrainedNotes
from data.tiles.bags import Bags
from data.tiles.case_bags import CaseBags
from hyfi_core.errors import RequestError
from pathology.predict.members import MIN_COVERAGE
from workflows.evaluation.case_table import CaseSlide, write_cases
from workflows.evaluation.cohort_page import evaluated_slides, write_cohort_page, write_predictions
from workflows.evaluation.evaluate import Logits
from workflows.evaluation.evaluator import Evaluator


def write_validation(
    out: Path,
    model: Mapping[str, Any],
    evaluator: Evaluator,
    dataset: SlideDataset,
    logits: Logits,
    bags: Bags | None,
    store: Path,
    split: str,
    notes: TrainedNotes,
) -> Path:
    """Write ``predictions.csv``, ``cases.csv`` and ``index.html`` of the slides that were evaluated.

    Args:
        out: The folder.
        model: ``model.json``.
        evaluator: The evaluator of the slides.
        dataset: The slides.
        logits: Logits by index of the slide, or of the bag.
        bags: The slides as bags, if the model takes bags.
        store: The store with the slides.
        split: Their split, for the title.
        notes: Which slides the model was trained on, and which are far from those.

    Raises:
        RequestError: ``out`` cannot be written.
    """
    slide_logits = logits
    if isinstance(bags, CaseBags):  # each slide of a case has the outputs of its case
        slide_logits = dict(enumerate(bags.cases.to_slides([logits[index] for index in range(len(bags))])))
        bags = bags.slides
    task = evaluator.evaluation_set.task
    readout = task.readout(model.get("calibration"))
    min_coverage = float(model.get("min_coverage", MIN_COVERAGE))
    all_tissue = evaluator.whole is not None
    slides = evaluated_slides(
        dataset, slide_logits, task, readout, min_coverage, all_tissue=all_tissue, bags=bags, notes=notes
    )
    case_slides = [
        CaseSlide(sample.slide_id, sample.case_id, np.array([slide_logits[index]], np.float64), sample.label)
        for index, sample in enumerate(dataset.samples)
    ]
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_predictions(out, slides, readout.columns, store)
        write_cases(out, case_slides, task, [model])
        title = f"Validation: {split} of {store.name}"
        return write_cohort_page(out, slides, task, readout, title, by_case=model.get("bag") == "case")
    except OSError as error:
        raise RequestError(f"{out}: cannot be written ({error.strerror or error}); choose another --out") from error
