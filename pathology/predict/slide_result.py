"""The result of the prediction of one slide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.samples.view import View
from data.store.slide_store import SlideStore
from data.tiles.tissue_tiles import TissueTiles
from pathology.predict.evidence.block_evidence import BlockEvidence
from pathology.predict.heatmap import Heatmap
from pathology.predict.readout import Readout
from pathology.predict.regions import Level0


@dataclass(frozen=True, eq=False)
class SlideResult:
    """The result of the prediction of one slide.

    Attributes:
        slide_id, case_id, path: The slide.
        slide: The open slide in its store.
        level: Index of the store's level from which images were made.
        views: The images of the slide that were the model's input.
        combined: How the logits of several images are combined, as text; empty for one image.
        withheld: Why there is no prediction, as text; empty if there is one.
        label: True label from the user's or the store's manifest; empty if unknown.
        heatmap: Scores, contributions, logits and biases; means over an ensemble.
        readout: The readout of the model, or of the whole ensemble.
        outputs: (members, channels): outputs of each model.
        values: (members, columns): numbers of the readout for each model.
        uncalibrated: (members, columns): the same without calibration.
        flags: Warnings about the slide.
        outside: In which figures the slide is far from all training slides, as text; empty if in none.
        tiles: The tiles, if the model has an encoder of tiles.
        blocks: Drops of the outputs without each block; None: not requested.
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
    readout: Readout
    outputs: NDArray[np.float64]
    values: NDArray[np.float64]
    uncalibrated: NDArray[np.float64]
    flags: tuple[str, ...]
    outside: str = ""
    tiles: TissueTiles | None = None
    blocks: BlockEvidence | None = None

    @property
    def coverage(self) -> float:
        """Fraction of the slide's tissue in the images, 0 to 1."""
        return coverage_of(self.views)

    @property
    def mean(self) -> NDArray[np.float64]:
        """(columns,): mean numbers over the members."""
        mean: NDArray[np.float64] = self.values.mean(axis=0)
        return mean

    @property
    def channel(self) -> int:
        """Index of the channel whose regions are shown, such as the predicted class."""
        return self.readout.channel(self.mean)

    @property
    def spread(self) -> NDArray[np.float64] | None:
        """(columns,): standard deviation of the numbers over the members; None for one model."""
        if len(self.values) < 2:
            return None
        spread: NDArray[np.float64] = self.values.std(axis=0)
        return spread


def coverage_of(views: Sequence[View]) -> float:
    """Return the fraction of a slide's tissue in its images, 0 to 1; several images always show all of it."""
    return 1.0 if len(views) > 1 else views[0].coverage


def evidence_of(result: SlideResult) -> list[str]:
    """Return the kinds of evidence in a slide's results: ``map``, ``occlusion``, ``gradient``; empty: none."""
    return ["map"] * result.heatmap.mapped + ([] if result.blocks is None else [result.blocks.kind])


def level0_of(result: SlideResult) -> Level0:
    """Return the map from pixels of the model's resolution to level 0 of the file, in the coordinates of QuPath."""
    used, finest = result.heatmap.mpp, result.slide.levels[0].mpp
    # The affine is that of the store's finest level: scale its columns, except the last, which is a shift.
    factors = (used[0] / finest[0], used[1] / finest[1], 1.0)
    rows = [tuple(float(v) * f for v, f in zip(row, factors, strict=True)) for row in result.slide.attributes["affine"]]
    bounds = result.slide.attributes["source"]["bounds"]
    return Level0((rows[0], rows[1]), (bounds["y0"], bounds["x0"]))  # type: ignore[arg-type]


def heatmap_to_level0(result: SlideResult) -> list[list[float]]:
    """Return the 2 × 3 matrix that maps (row, column, 1) of a square's corner to (y, x) of level 0, as in QuPath."""
    return squares_to_level0(result, result.heatmap.square_px)


def squares_to_level0(result: SlideResult, side_px: int) -> list[list[float]]:
    """Return the matrix of `heatmap_to_level0` for squares of another side, in pixels at the model's resolution."""
    level0 = level0_of(result)
    pairs = zip(level0.affine, level0.bounds_origin_px, strict=True)
    return [[a * side_px, b * side_px, c - origin] for (a, b, c), origin in pairs]


def origin_um(result: SlideResult) -> tuple[float, float]:
    """Return the corner of the stored part on the slide, (y, x) in micrometres; (0, 0) unless it was cropped."""
    crop = result.slide.attributes.get("crop", {"y0": 0, "x0": 0})
    mpp_y, mpp_x = result.slide.levels[0].mpp
    return crop["y0"] * mpp_y, crop["x0"] * mpp_x
