"""Detection of pen strokes too thin for a smooth inside at the mask's resolution: all their pixels are near an edge.

Along its middle, ink is dense and even, over hundreds of micrometres. Strands of tissue with the colour of ink, in
immunostains, are paler and vary from nucleus to nucleus.
"""

from __future__ import annotations

import numpy as np
from scipy import ndimage
from skimage.morphology import skeletonize

from data.arrays import Mask
from data.components import label
from pathology.arrays import Float, Planes
from pathology.tissue.density import density_of
from pathology.tissue.morphology import dilated

MIN_STROKE_DENSITY = 0.15
"""Pixels of a thin stroke have a higher mean optical density than this, smoothed."""
_GAP_UM = 32.0
"""Pieces closer than this are one stroke: where it crosses tissue, a few pixels may just miss the colour of ink."""
_MIN_LENGTH_UM = 110.0
_MAX_WIDTH_UM = 60.0
_MIN_RIDGE_DENSITY = 0.3
"""Median optical density along the middle of a stroke. Blue tissue has 0.1 to 0.2."""
_MAX_RIDGE_VARIATION = 0.2
"""Standard deviation / mean of the optical density along the middle of a stroke. That of tissue is 0.35 or more."""


def thin_strokes(image: Planes, glass: Float, dark: Mask, mpp_um: float) -> Mask:
    """Return the mask of the thin pen strokes among pixels of the colour of ink.

    Args:
        image: ``(3, h, w)`` uint8.
        glass: From `data.samples.colours.slide_colours.glass_colour`.
        dark: ``(h, w)``: pixels with the colour of ink, denser than `MIN_STROKE_DENSITY`.
        mpp_um: Microns per pixel.
    """
    strokes: Mask = np.zeros_like(dark)
    # Pieces are joined across gaps to judge them together, but only dark pixels are in the result.
    joined = label(dilated(dark, max(1, round(_GAP_UM / 2 / mpp_um))), corners=True)
    labels = np.where(dark, joined, 0)
    for number, window in enumerate(ndimage.find_objects(labels), 1):
        diagonal_um = np.hypot(*(side.stop - side.start for side in window)) * mpp_um
        if diagonal_um < _MIN_LENGTH_UM / 2:  # too short, even if it is curved
            continue
        part = labels[window] == number
        if _is_stroke(np.ascontiguousarray(image[:, *window]), glass, part, mpp_um):
            strokes[window] |= part
    return strokes


def _is_stroke(image: Planes, glass: Float, part: Mask, mpp_um: float) -> bool:
    """Whether the pieces ``part``, taken together, are long and thin, and dense and even along their middle."""
    ridge = skeletonize(part)  # type: ignore[no-untyped-call]
    length_px = np.count_nonzero(ridge)
    if length_px * mpp_um < _MIN_LENGTH_UM or np.count_nonzero(part) * mpp_um > _MAX_WIDTH_UM * length_px:
        return False
    along = density_of(image, glass, slice(0, part.shape[0])).mean(0)[ridge]
    return bool(np.median(along) > _MIN_RIDGE_DENSITY and along.std() < _MAX_RIDGE_VARIATION * along.mean())
