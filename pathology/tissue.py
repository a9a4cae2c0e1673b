"""Where the tissue is, at about 8 µm per pixel: pen, dust, coverslip edges and grey scanners notwithstanding.

All is decided in optical density relative to the slide's own glass, so a scanner's grey or yellowish background is
no tissue. Stained tissue absorbs, in different measure for the three channels, and most in green (haematoxylin and
eosin both do). Dust, shadows and ink absorb otherwise (see `pathology.pen`). How far density and colour must stand out
is Otsu's threshold, held between a floor (an empty slide has no tissue) and a ceiling (dark nuclei do not make pale
stroma glass). Fat, which is nearly as clear as glass, is found by its walls (see `pathology.fat`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from skimage.filters import threshold_otsu
from skimage.morphology import remove_small_holes, remove_small_objects
from skimage.segmentation import clear_border

from pathology.density import Float, density_strips, glass_colour
from pathology.fat import find_fat
from pathology.morphology import closed
from pathology.pen import ink, pen_marks

Mask = npt.NDArray[np.bool_]
Planes = npt.NDArray[np.uint8]

_MOST_VALUES = 1_000_000
"""A threshold is decided on about so many pixels."""


@dataclass(frozen=True, slots=True)
class TissueParameters:
    """What the mask depends on; kept with every slide.

    Attributes:
        mpp_um: Resolution aimed at; the pyramid's level nearest to it is used.
        smooth_um: Standard deviation of the smoothing, about the size of a cell.
        density: Floor and ceiling of the threshold on optical density.
        colour: Floor and ceiling of the threshold on the channels' difference in optical density.
        close_um: Gaps up to about twice this are bridged.
        smallest_um2: Smaller pieces are specks.
        hole_um2: Smaller holes are filled.
        fat: Whether areas of fat count as tissue.
    """

    mpp_um: float = 8.0
    smooth_um: float = 8.0
    density: tuple[float, float] = (0.012, 0.02)
    colour: tuple[float, float] = (0.018, 0.025)
    close_um: float = 24.0
    smallest_um2: float = 30_000.0
    hole_um2: float = 120_000.0
    fat: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of the fields."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class TissueMasks:
    """Tissue and pen of one slide, both ``(h, w)`` bool."""

    tissue: Mask
    pen: Mask


def find_tissue(image: Planes, mpp_um: float, parameters: TissueParameters | None = None) -> TissueMasks:
    """Find the tissue and the pen marks of a slide.

    Memory: about 25 bytes a pixel besides the image.

    Args:
        image: ``(3, h, w)`` uint8, the whole slide at a low resolution.
        mpp_um: Its microns per pixel.
        parameters: See there; default values suit H&E.
    """
    p = parameters or TissueParameters()
    glass = glass_colour(image)
    stained, pen = _stained_and_pen(image, glass, mpp_um, p)
    usable = ~pen
    gap_px = max(1, round(p.close_um / mpp_um))
    tissue = closed(stained, gap_px) & usable
    if p.fat:
        solid = remove_small_objects(tissue, max_size=_pixels(p.smallest_um2, mpp_um))
        fat = find_fat(image, glass, solid | pen, mpp_um)
        tissue = closed(tissue | fat, gap_px) & usable if fat.any() else tissue
    tissue = remove_small_objects(tissue, max_size=_pixels(p.smallest_um2, mpp_um))
    holes = remove_small_holes(tissue, max_size=_pixels(p.hole_um2, mpp_um)) & ~tissue
    # What reaches the picture's border is no hole: a small slide without tissue would be one.
    return TissueMasks((tissue | clear_border(holes)) & usable, pen)


def _stained_and_pen(image: Planes, glass: Float, mpp_um: float, p: TissueParameters) -> tuple[Mask, Mask]:
    mean: Float = np.empty(image.shape[1:], np.float32)
    colour = np.empty_like(mean)
    core, thin, faint = (np.empty(mean.shape, bool) for _ in range(3))
    for rows, density in density_strips(image, glass, p.smooth_um / mpp_um):
        mean[rows] = density.mean(0)
        colour[rows] = density.max(0) - density.min(0)
        core[rows], thin[rows], faint[rows] = ink(density)
    pen = pen_marks(core, thin, faint, mpp_um)
    usable = ~pen
    stained = (mean > _threshold(mean[usable], p.density)) & (colour > _threshold(colour[usable], p.colour))
    # What absorbs alike in all channels has no stain: shadows, dust, the coverslip's edge.
    stained &= colour > 0.2 * mean
    return stained & usable, pen


def _threshold(values: npt.NDArray[np.float32], bounds: tuple[float, float]) -> float:
    if values.size == 0 or float(values.min()) == float(values.max()):
        return bounds[0]
    return float(np.clip(threshold_otsu(np.minimum(values[:: 1 + values.size // _MOST_VALUES], 0.5)), *bounds))


def _pixels(area_um2: float, mpp_um: float) -> int:
    return max(1, round(area_um2 / mpp_um**2))
