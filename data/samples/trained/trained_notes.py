"""Slides that a checkpoint was trained on, and slides far from all of these, among those that it is evaluated on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from data.samples.dataset import SlideDataset
from data.samples.trained.trained_range import SlideFigures
from data.samples.trained.trained_slides import TrainedSlides, source_sha256

TRAINED_ON = "trained_on"
"""Flag of slides that the model was trained on; also if it was trained on another slide of the same case."""
OUTSIDE = "outside_training"
"""Flag of slides far from all training slides in a figure (area, resolution, stain); ``reason`` says in which."""


@dataclass(frozen=True)
class TrainedNotes:
    """Slides of a dataset that a checkpoint was trained on, or that are far from all of its training slides.

    Attributes:
        trained: Names of slides that the model was trained on, or that share a case with a training slide.
        outside: Name of a slide far from all training slides -> sentences that say how.
    """

    trained: tuple[str, ...] = ()
    outside: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Mapping[str, Any], dataset: SlideDataset) -> Self:
        """Return the notes on a dataset for a checkpoint's ``model.json``; opens each slide, but reads no pixels."""
        known = TrainedSlides.of_json(model.get("trained_on"))
        trained, outside = [], {}
        for index, sample in enumerate(dataset.samples):
            if known.has(sample.slide_id, sample.case_id, source_sha256(dataset, index)):
                trained.append(sample.slide_id)
            how = known.ranges.describe_outside(SlideFigures.of(dataset, index))
            if how:
                outside[sample.slide_id] = "; ".join(how)
        return cls(tuple(trained), outside)

    def flags(self, slide_id: str) -> tuple[str, ...]:
        """Return the flags of a slide."""
        return (*[OUTSIDE] * (slide_id in self.outside), *[TRAINED_ON] * (slide_id in self.trained))

    def reason(self, slide_id: str) -> str:
        """Return how a slide is far from those of training; empty if it is not."""
        how = self.outside.get(slide_id, "")
        return f"{OUTSIDE}: {how}" if how else ""
