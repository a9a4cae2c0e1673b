"""All that is known about one slide after prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.samples.view import View
from data.store.slide_store import SlideStore
from pathology.predict.heatmap import Heatmap
from pathology.predict.regions import Level0


@dataclass(frozen=True, eq=False)
class SlideResult:
    """All that is known about one slide after prediction.

    Attributes:
        slide_id, case_id, path: the slide.
        slide: open in the store that was read.
        level: of the store, that the model looked at.
        views: the images of the slide that the model was given.
        combined: how the evidence of several images is combined, in words; empty for one.
        withheld: why no class is given, in words; empty where one is.
        label: true class, as the user's or the store's manifest has it; empty where unknown.
        heatmap: contributions, logits and biases; means over an ensemble.
        probabilities: (members, classes), calibrated where a member's checkpoint says how.
        uncalibrated: (members, classes): without that.
        flags: what a reader must know.
    """

    slide_id: str
    case_id: str
    path: str
    slide: SlideStore
    level: int
    views: tuple[View, ...]
    combined: str
    withheld: str
    label: str
    heatmap: Heatmap
    probabilities: NDArray[np.float64]
    uncalibrated: NDArray[np.float64]
    flags: tuple[str, ...]

    @property
    def coverage(self) -> float:
        """Share of the slide's tissue in the images, 0 to 1."""
        return coverage_of(self.views)

    @property
    def mean(self) -> NDArray[np.float64]:
        """(classes,): mean probability over the members."""
        mean: NDArray[np.float64] = self.probabilities.mean(axis=0)
        return mean

    @property
    def predicted(self) -> int:
        """Index of the class of highest mean probability; the first of equals."""
        return int(self.mean.argmax())

    @property
    def spread(self) -> NDArray[np.float64] | None:
        """(classes,): standard deviation of the probabilities over the members; None for one model."""
        if len(self.probabilities) < 2:
            return None
        spread: NDArray[np.float64] = self.probabilities.std(axis=0)
        return spread


def coverage_of(views: Sequence[View]) -> float:
    """Return the share of a slide's tissue that images show together, exactly 1.0 where nothing is left out."""
    return 1.0 if len(views) > 1 else views[0].coverage


def level0_of(result: SlideResult) -> Level0:
    """Return how pixels that the model looked at become level-0 pixels as QuPath counts them."""
    looked, finest = result.slide.levels[result.level], result.slide.levels[0]
    factors = (looked.mpp[0] / finest.mpp[0], looked.mpp[1] / finest.mpp[1], 1.0)
    rows = [tuple(float(v) * f for v, f in zip(row, factors, strict=True)) for row in result.slide.attributes["affine"]]
    bounds = result.slide.attributes["source"]["bounds"]
    return Level0((rows[0], rows[1]), (bounds["y0"], bounds["x0"]))  # type: ignore[arg-type]


def cell_to_level0(result: SlideResult) -> list[list[float]]:
    """Return two rows: (row, column, 1) of a cell's corner becomes (y, x) of level 0 as QuPath counts it."""
    level0, cell_px = level0_of(result), result.heatmap.cell_px
    pairs = zip(level0.affine, level0.bounds_origin_px, strict=True)
    return [[a * cell_px, b * cell_px, c - origin] for (a, b, c), origin in pairs]


def origin_um(result: SlideResult) -> tuple[float, float]:
    """Return where the stored part of the slide begins on the slide, (y, x) in micrometres; not 0 after a crop."""
    crop = result.slide.attributes.get("crop", {"y0": 0, "x0": 0})
    mpp_y, mpp_x = result.slide.levels[0].mpp
    return crop["y0"] * mpp_y, crop["x0"] * mpp_x
