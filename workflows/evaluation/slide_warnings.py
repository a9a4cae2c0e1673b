"""Warnings about the slides that a model is evaluated on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workflows.console import listed, warn

if TYPE_CHECKING:
    from data.samples.dataset import SlideDataset
    from workflows.tasks.task import Task


def warn_of_low_coverage(model: Mapping[str, Any], dataset: SlideDataset) -> None:
    """Warn of slides whose images show less of their tissue than training required."""
    from pathology.predict.members import MIN_COVERAGE

    least = float(model.get("min_coverage", MIN_COVERAGE))
    low = [slide.slide_id for index, slide in enumerate(dataset.samples) if dataset.view(index).coverage < least]
    if low:
        warn(f"{len(low)} slides show less than {least:g} of their tissue (--image whole shows all): {', '.join(low)}")


def warn_of_unmeasured(dataset: SlideDataset) -> None:
    """Warn of slides that stain normalisation leaves as they are."""
    from data.samples.colours.stain_normalisation import as_scanned_text

    unmeasured = dataset.as_scanned()
    if unmeasured:
        warn(as_scanned_text(unmeasured))


def warn_of_slides(task: Task, model: Mapping[str, Any], dataset: SlideDataset, split: str | None) -> None:
    """Warn of classes without slides, of slides that the model was trained on, and of slides unlike any of these.

    Args:
        task: The model's, with the target that is evaluated.
        model: The checkpoint's ``model.json``.
        dataset: The slides.
        split: Their split; None: all.
    """
    from data.samples.trained.trained_notes import TrainedNotes
    from workflows.evaluation.case_table import differing_note

    targets = [slide.label for slide in dataset.samples if slide.label is not None]
    for text in task.evaluation_warnings(targets, split or "these"):
        warn(text)
    if model.get("case_aggregate", "mean") != "none" and (note := differing_note(task, dataset.samples)):
        warn(note)
    if split == "train":
        return
    notes = TrainedNotes.of(model, dataset)
    if notes.trained:
        warn(
            f"the model was trained on {len(notes.trained)} of these {len(dataset)} slides, or on others of their "
            f"cases: {listed(notes.trained)}; the metrics are not those of new slides"
        )
    outside = [f"{name} ({how})" for name, how in notes.outside.items()]
    if outside:
        warn(
            f"{len(outside)} of these {len(dataset)} slides are far from all that the model was trained on, so that "
            f"their predictions may mean nothing: {listed(outside)}"
        )
