"""Felt-tip marks on the glass: dense, in colours that stains do not have, and no specks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pathology.tissue.density import Float
from pathology.tissue.morphology import dilated, opened
from pathology.tissue.pieces import joined_to, without_small

Mask = npt.NDArray[np.bool_]

PALEST_INK = 0.02
_STROKE_UM = 8.0
_SMALLEST_UM2 = 6_000.0
_RIM_UM = 40.0


def ink(density: Float, mean: Float, colour: Float) -> tuple[Mask, Mask, Mask]:
    """Return three masks of pixels' optical density ``(3, …)``, its mean and its greatest difference ``(…)``.

    Blue and green ink absorb most in red; red ink hardly in red and as much in blue as in green; black ink alike in
    all three. Haematoxylin and eosin absorb most in green, though haematoxylin alone may come near blue ink. Nothing
    is ink whose mean density is `PALEST_INK` or less.

    Returns:
        What is ink where it is wide, what no stain looks like, even if it is thin, and what may be the rim of a mark.
    """
    red, green, blue = density
    bluish = (red > 1.1 * green) & (red > 0.12)
    reddish = (blue > 0.75 * green) & (red < 0.25 * green) & (green > 0.4)
    black = (mean > 0.2) & (colour < 0.25 * mean)
    faint = ((red > green) | (colour < 0.2 * mean)) & (mean > PALEST_INK)
    blue_ink = (red > 1.15 * green) & (red > 2.5 * blue)
    green_ink = red > 1.6 * green
    return bluish | reddish | black, (blue_ink | green_ink) & (red > 0.15), faint


def pen_marks(core: Mask, thin: Mask, faint: Mask, mpp_um: float) -> Mask:
    """Return the marks with their faded rims.

    Args:
        core: From `ink`.
        thin: Alike.
        faint: Alike.
        mpp_um: Microns per pixel of all.
    """
    smallest = max(1, round(_SMALLEST_UM2 / mpp_um**2))
    strokes = without_small(opened(core, max(1, round(_STROKE_UM / mpp_um))), smallest)
    strokes |= without_small(thin, smallest, corners=True)
    if not strokes.any():
        return strokes
    # The rim of a mark is ink too, thinner: take what joins it and is not stained like tissue.
    rim = joined_to(strokes, faint | strokes) & dilated(strokes, max(1, round(_RIM_UM / mpp_um)))
    result: Mask = strokes | rim
    return result
