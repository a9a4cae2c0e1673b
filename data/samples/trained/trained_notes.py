"""What a checkpoint knows of the slides it is evaluated on: trained on them, or far from all that it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from data.samples.dataset import SlideDataset
from data.samples.trained.trained_range import SlideFigures
from data.samples.trained.trained_slides import TrainedSlides, source_sha256

TRAINED_ON = "trained_on"
"""Flag of slides that the model was trained on, or on others of their cases."""
OUTSIDE = "outside_training"
"""Flag of slides far from those of training; ``reason`` says in which figure."""


@dataclass(frozen=True)
class TrainedNotes:
    """Slides of a dataset that are in training, or far from it, according to a checkpoint.

    Attributes:
        trained: Names of slides that the model was trained on, or on others of their cases.
        outside: For slides that are far from all training slides, by name: sentences that say how.
    """

    trained: tuple[str, ...] = ()
    outside: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Mapping[str, Any], dataset: SlideDataset) -> Self:
        """Return the notes of ``model.json`` on a dataset; opens each slide, and reads no pixels."""
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
