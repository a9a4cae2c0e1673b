"""Felt-tip marks on the glass: dense, in colours that stains do not have, and no specks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from skimage.measure import label
from skimage.morphology import dilation, disk, opening, remove_small_objects

from pathology.density import Float

Mask = npt.NDArray[np.bool_]

_STROKE_UM = 8.0
_SMALLEST_UM2 = 6_000.0
_RIM_UM = 40.0


def ink(density: Float) -> tuple[Mask, Mask]:
    """Return two masks ``(h, w)`` of ``(3, h, w)`` optical density: surely ink, and what may be its thin rim.

    Blue and green ink absorb most in red; red ink hardly in red and as much in blue as in green; black ink alike in
    all three. Haematoxylin and eosin absorb most in green.
    """
    red, green, blue = density
    mean = density.mean(0)
    colour = density.max(0) - density.min(0)
    bluish = (red > 1.1 * green) & (red > 0.12)
    reddish = (blue > 0.75 * green) & (red < 0.25 * green) & (green > 0.4)
    black = (mean > 0.2) & (colour < 0.25 * mean)
    faint = ((red > green) | (colour < 0.2 * mean)) & (mean > 0.02)
    return bluish | reddish | black, faint


def pen_marks(core: Mask, faint: Mask, mpp_um: float) -> Mask:
    """Return the marks with their faded rims.

    Args:
        core: What is surely ink, from `ink`.
        faint: What may be the rim of it.
        mpp_um: Microns per pixel of both.
    """
    strokes = opening(core, _disk(_STROKE_UM / mpp_um))
    strokes = remove_small_objects(strokes, max_size=max(1, round(_SMALLEST_UM2 / mpp_um**2)))
    if not strokes.any():
        return strokes
    # The rim of a mark is ink too, thinner: take what joins it and is not stained like tissue.
    joined = label(faint | strokes)
    rim = np.isin(joined, np.unique(joined[strokes])) & dilation(strokes, _disk(_RIM_UM / mpp_um))
    result: Mask = strokes | rim
    return result


def _disk(radius_px: float) -> npt.NDArray[np.uint8]:
    element: npt.NDArray[np.uint8] = disk(max(1, round(radius_px)))
    return element
