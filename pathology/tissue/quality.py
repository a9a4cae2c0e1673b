"""What is found out about a slide's pixels in the same pass that writes them: tissue, pen, blur, stains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data.store.layout import LevelSize
from pathology.readers.resample import Planes
from pathology.tissue.blur import MEASURED_MPP_UM, BlurMap
from pathology.tissue.density import glass_colour
from pathology.tissue.quality_maps import blur_to_json, pen_to_json
from pathology.tissue.stain import StainSample, StainVectors
from pathology.tissue.tissue import TissueMasks, TissueParameters, find_tissue

BLURRED_SHARE = 0.08
"""Slides with more than this share of their tissue out of focus are flagged ``blur``."""
PEN_SHARE = 0.002
"""Slides with more than this share of their area under ink are flagged ``pen``."""


@dataclass(frozen=True, slots=True)
class Quality:
    """What was found.

    Attributes:
        overview: ``(3, h, w)`` uint8, the whole slide at ``mpp_um``.
        masks: Tissue and pen, of the same size.
        mpp_um: Microns per pixel of both.
        blur: Sharpness of the tissue's patches.
        blur_mpp_um: Microns per pixel at which it was measured.
        stains: None where there is too little tissue.
    """

    overview: Planes
    masks: TissueMasks
    mpp_um: float
    blur: BlurMap
    blur_mpp_um: float
    stains: StainVectors | None

    def to_json(self) -> dict[str, Any]:
        """Return what a slide's attributes say about it."""
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
        """Warnings that a reader of the table should see, and whether they hold."""
        return {
            "no_tissue": not self.masks.tissue.any(),
            "pen": self._pen_share > PEN_SHARE,
            "blur": self.blur.share > BLURRED_SHARE,
        }

    @property
    def _pen_share(self) -> float:
        return np.count_nonzero(self.masks.pen) / self.masks.pen.size


@dataclass(slots=True)
class Survey:
    """Sees every block of every level as it is written, and looks at the ones it needs.

    Memory: the slide at about 8 µm per pixel, three bytes a pixel, and 3 MB.

    Attributes:
        sizes: Of the pyramid's levels.
        mpp_um: Microns per pixel of the finest.
        parameters: Of the tissue mask.
    """

    sizes: Sequence[LevelSize]
    mpp_um: float
    parameters: TissueParameters
    _overview: Planes = field(init=False)
    _blur: BlurMap = field(init=False)
    _stains: StainSample = field(init=False)

    def __post_init__(self) -> None:
        small, sharp = self.sizes[self.mask_level], self.sizes[self._sharp_level]
        self._overview = np.empty((3, small.height_px, small.width_px), np.uint8)
        self._blur = BlurMap(sharp.height_px, sharp.width_px)
        self._stains = StainSample(sharp.height_px, sharp.width_px)

    @property
    def mask_level(self) -> int:
        """The level that the masks are made from."""
        return mask_level(self.mpp_um, self.parameters)

    @property
    def _sharp_level(self) -> int:
        return min(max(0, round(math.log2(MEASURED_MPP_UM / self.mpp_um))), len(self.sizes) - 1)

    def see(self, level: int, y0: int, x0: int, block: Planes) -> None:
        """Take ``block`` ``(3, h, w)`` of a level, which starts at ``(y0, x0)``; nothing of it is kept."""
        if level == self.mask_level:
            self._overview[:, y0 : y0 + block.shape[1], x0 : x0 + block.shape[2]] = block
        if level == self._sharp_level:
            self._blur.add(y0, x0, block)
            self._stains.add(y0, x0, block)

    def result(self, masks: TissueMasks | None = None) -> Quality:
        """Return what was found, after the last block.

        Args:
            masks: Known before; default: they are made now.
        """
        mpp_um = self.mpp_um * 2**self.mask_level
        found = masks or find_tissue(self._overview, mpp_um, self.parameters)
        self._blur.keep(found.tissue, found.pen)
        stains = self._stains.estimate(found.tissue, glass_colour(self._overview))
        return Quality(self._overview, found, mpp_um, self._blur, self.mpp_um * 2**self._sharp_level, stains)


def mask_level(mpp_um: float, parameters: TissueParameters) -> int:
    """Return the level of a pyramid that starts at ``mpp_um`` whose resolution is nearest to the one the mask wants."""
    return max(0, round(math.log2(parameters.mpp_um / mpp_um)))
