"""Tissue, pen marks, blur and stains of a slide, measured in the same pass that writes its pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data.arrays import Mask
from data.samples.colours.slide_colours import glass_colour
from data.store.layout import LevelSize
from pathology.arrays import Planes
from pathology.tissue.blur import MEASURED_MPP_UM, BlurMap
from pathology.tissue.quality_maps import blur_to_json, pen_to_json
from pathology.tissue.stain import StainSample, StainVectors
from pathology.tissue.tissue import TissueMasks, TissueParameters, find_tissue

BLURRED_SHARE = 0.08
"""Slides with a larger fraction of their tissue out of focus have the flag ``blur``."""
PEN_SHARE = 0.002
"""Slides with a larger fraction of their area under ink have the flag ``pen``."""
BLACK_SHARE = 0.01
"""Slides with a larger fraction of exactly black pixels in the overview have the flag ``black``."""
_DARK = 64
_FEWEST_COLOURS = 50
"""Colours of tissue are not judged if it has fewer pixels."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Measurements of one slide.

    Attributes:
        overview: ``(3, h, w)`` uint8, the whole slide at ``mpp_um``.
        masks: Tissue and pen masks of the same size.
        mpp_um: Microns per pixel of overview and masks.
        blur: Sharpness of the patches with tissue.
        blur_mpp_um: Microns per pixel at which sharpness was measured.
        stains: The slide's stains; None if there is too little tissue.
    """

    overview: Planes
    masks: TissueMasks
    mpp_um: float
    blur: BlurMap
    blur_mpp_um: float
    stains: StainVectors | None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that is stored in the slide's attributes."""
        tissue, pen = self.masks.tissue, self.masks.pen
        tissue_px = np.count_nonzero(tissue)
        return {
            "tissue": {
                "fraction": tissue_px / tissue.size,
                "mpp": self.mpp_um,
                "area_mm2": round(tissue_px * self.mpp_um**2 / 1e6, 4),
                "pen_fraction": self._pen_share,
            },
            "sharpness": self.blur.median,
            "blurred_share": self.blur.share,
            "patches": self.blur.patches,
            "maps": {"blur": blur_to_json(self.blur, self.blur_mpp_um), "pen": pen_to_json(pen, self.mpp_um)},
            "stains": None if self.stains is None else self.stains.to_json(),
        }

    @property
    def flags(self) -> dict[str, bool]:
        """For each flag (warning) of the manifest, whether it applies to the slide."""
        return {
            "no_tissue": not self.masks.tissue.any(),
            "pen": self._pen_share > PEN_SHARE,
            "blur": self.blur.share > BLURRED_SHARE,
            "black": bool((self.overview.max(0) == 0).mean() > BLACK_SHARE),
            "colour": has_unlikely_colours(self.overview[:, self.masks.tissue]) or has_dark_ground(self.overview),
        }

    @property
    def _pen_share(self) -> float:
        return np.count_nonzero(self.masks.pen) / self.masks.pen.size


@dataclass(slots=True)
class QualityAccumulator:
    """Takes all blocks of all levels as they are written and collects the measurements of `Quality`.

    Memory: the slide at about 8 µm per pixel, three bytes a pixel, plus up to 3 MB for stains.

    Attributes:
        sizes: Sizes of the pyramid's levels.
        mpp_um: Microns per pixel of the finest level.
        parameters: Parameters of the tissue mask.
    """

    sizes: Sequence[LevelSize]
    mpp_um: float
    parameters: TissueParameters
    _overview: Planes = field(init=False)
    _blur: BlurMap = field(init=False)
    _stains: StainSample = field(init=False)

    def __post_init__(self) -> None:
        of_masks, of_blur = self.sizes[self.mask_level], self.sizes[self._sharp_level]
        self._overview = np.empty((3, of_masks.height_px, of_masks.width_px), np.uint8)
        self._blur = BlurMap(of_blur.height_px, of_blur.width_px)
        self._stains = StainSample(of_blur.height_px, of_blur.width_px)

    @property
    def mask_level(self) -> int:
        """Index of the level from which the masks are computed."""
        return mask_level(self.mpp_um, self.parameters)

    @property
    def _sharp_level(self) -> int:
        """Index of the level in which blur and stains are measured."""
        return min(max(0, round(math.log2(MEASURED_MPP_UM / self.mpp_um))), len(self.sizes) - 1)

    def add(self, level: int, y0: int, x0: int, block: Planes) -> None:
        """Measure ``block`` ``(3, h, w)`` of a level, which starts at ``(y0, x0)``; no reference to it is kept."""
        if level == self.mask_level:
            # Copied, because the block belongs to the writer.
            self._overview[:, y0 : y0 + block.shape[1], x0 : x0 + block.shape[2]] = block
        if level == self._sharp_level:
            self._blur.add(y0, x0, block)
            self._stains.add(y0, x0, block)

    def result(self, masks: TissueMasks | None = None, given_tissue: Mask | None = None) -> Quality:
        """Return the measurements; call it once, after the last block.

        Args:
            masks: Masks of the mask level if they are known; by default they are computed here.
            given_tissue: Tissue mask that replaces the detected one. Blur and stains are measured where both masks have
                tissue, so that glass is not measured; in all given tissue if they have none in common.
        """
        mpp_um = self.mpp_um * 2**self.mask_level
        detected = masks or find_tissue(self._overview, mpp_um, self.parameters)
        tissue = detected.tissue if given_tissue is None else given_tissue
        measured = tissue & detected.tissue
        measured = measured if measured.any() else tissue
        self._blur.restrict_to(measured, detected.pen)
        stains = self._stains.estimate(measured, glass_colour(self._overview))
        return Quality(
            overview=self._overview,
            masks=TissueMasks(tissue, detected.pen),
            mpp_um=mpp_um,
            blur=self._blur,
            blur_mpp_um=self.mpp_um * 2**self._sharp_level,
            stains=stains,
        )


def has_unlikely_colours(tissue: Planes) -> bool:
    """Whether tissue looks as if YCbCr had been taken for RGB, or RGB for YCbCr.

    Signs of YCbCr that was taken for RGB: green and blue are near 128 and vary less than half as much as red, while
    stained tissue varies most in green. Sign of RGB that was taken for YCbCr: red is saturated.

    Args:
        tissue: ``(3, n)`` uint8: red, green and blue of the tissue.
    """
    if tissue.shape[1] < _FEWEST_COLOURS:
        return False
    mean, spread = tissue.mean(1), tissue.std(1)
    taken_for_rgb = np.abs(mean[1:] - 128).max() < 35 and spread[0] > 8 and spread[1:].max() < 0.45 * spread[0]
    taken_for_ycbcr = (tissue[0] >= 254).mean() > 0.25 and mean[0] - mean[1] > 60
    return bool(taken_for_rgb or taken_for_ycbcr)


def has_dark_ground(overview: Planes) -> bool:
    """Whether more than half of a slide is dark in every channel, as in fluorescence; glass is bright.

    Args:
        overview: ``(3, h, w)`` uint8; pixels that are exactly black do not count.
    """
    brightest = overview.max(0)
    # Exactly black pixels were not scanned.
    lit = brightest[brightest > 0]
    return bool(lit.size and np.median(lit) < _DARK)


def mask_level(mpp_um: float, parameters: TissueParameters) -> int:
    """Return the level nearest to the resolution of the tissue mask, for a pyramid whose level 0 has ``mpp_um``."""
    return max(0, round(math.log2(parameters.mpp_um / mpp_um)))
