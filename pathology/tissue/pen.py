"""Felt-tip marks on the glass: dense, in colours that stains do not have, and without the texture of nuclei.

Haematoxylin alone, the counterstain of an immunostain, may be as blue as ink. Its optical density varies from nucleus
to nucleus, though, by a tenth or more within 24 µm; that of ink varies by a few hundredths.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from data.components import joined_to, without_small
from pathology.tissue.density import Float, Planes, density_of
from pathology.tissue.morphology import dilated, opened

Mask = npt.NDArray[np.bool_]

PALEST_INK = 0.02
_SMOOTHEST_TISSUE = 0.08
"""Standard deviation of the optical density by its mean, within `_TEXTURE_UM`, below which there are no nuclei."""
_TEXTURE_UM = 24.0
_SMOOTH_SHARE = 0.12
"""Share of ink-coloured pixels without texture from which those within `_SHARE_UM` are ink: the edges of a mark are
not smooth, and here and there tissue is."""
_SHARE_UM = 72.0
_STROKE_UM = 8.0
_SMALLEST_UM2 = 6_000.0
_RIM_UM = 40.0


def ink(density: Float, mean: Float, colour: Float) -> tuple[Mask, Mask, Mask]:
    """Return three masks of pixels' optical density ``(3, …)``, its mean and its greatest difference ``(…)``.

    Blue and green ink absorb most in red; red ink hardly in red and as much in blue as in green; black ink alike in
    all three. Haematoxylin and eosin absorb most in green, though haematoxylin alone may come near blue ink. Nothing
    is ink whose mean density is `PALEST_INK` or less.

    Returns:
        What is ink where it is wide and smooth, what no stain looks like, and what may be the rim of a mark.
    """
    red, green, blue = density
    bluish = (red > 1.1 * green) & (red > 0.12)
    red_hue = (blue > 0.75 * green) & (red < 0.25 * green)
    black = (mean > 0.2) & (colour < 0.25 * mean)
    faint = ((red > green) | (colour < 0.2 * mean) | red_hue) & (mean > PALEST_INK)
    certain = (red > 0.3) & ((red > 2.5 * green) | ((red > 1.6 * green) & (red > 3.5 * blue)))
    return bluish | (red_hue & (green > 0.4)) | black, certain, faint


def smooth(image: Planes, glass: Float, rows: slice, mpp_um: float) -> Mask:
    """Return where some rows ``(rows, w)`` lack the texture of nuclei.

    Args:
        image: ``(3, h, w)`` uint8.
        glass: From `pathology.tissue.density.glass_colour`.
        rows: Which.
        mpp_um: Microns per pixel.
    """
    half = max(1, int(_TEXTURE_UM / 2 / mpp_um))
    first, end = max(0, rows.start - half), min(image.shape[1], rows.stop + half)
    density = density_of(image, glass, slice(first, end)).mean(0)
    mean = ndimage.uniform_filter(density, 2 * half + 1, mode="nearest")
    variance = ndimage.uniform_filter(density * density, 2 * half + 1, mode="nearest") - mean * mean
    found: Mask = variance < (np.float32(_SMOOTHEST_TISSUE) * mean) ** 2
    return found[rows.start - first : rows.stop - first]


def _mostly(even: Mask, core: Mask, mpp_um: float) -> Mask:
    """Return where enough of ``core`` in the surroundings is ``even``."""
    side = 2 * round(_SHARE_UM / 2 / mpp_um) + 1
    of_even, of_core = (ndimage.uniform_filter(m.astype(np.float32), side, mode="constant") for m in (even, core))
    found: Mask = of_even > np.maximum(np.float32(_SMOOTH_SHARE) * of_core, np.float32(1e-6))
    return found


def pen_marks(core: Mask, even: Mask, certain: Mask, faint: Mask, mpp_um: float) -> Mask:
    """Return the marks with their faded rims.

    Args:
        core: From `ink`.
        even: The part of it that is `smooth`.
        certain: From `ink`.
        faint: Alike.
        mpp_um: Microns per pixel of all.
    """
    smallest = max(1, round(_SMALLEST_UM2 / mpp_um**2))
    strokes = opened(core, max(1, round(_STROKE_UM / mpp_um)))
    strokes = without_small(strokes & _mostly(even, core, mpp_um), smallest)
    strokes |= without_small(certain, smallest, corners=True)
    if not strokes.any():
        return strokes
    # The rim of a mark is ink too, thinner: take what joins it and is not stained like tissue.
    near = dilated(strokes, max(1, round(_RIM_UM / mpp_um)))
    rim = joined_to(strokes, (faint & ~_goes_on(faint & ~strokes, near, mpp_um)) | strokes) & near
    result: Mask = strokes | rim
    return result


def _goes_on(faint: Mask, near: Mask, mpp_um: float) -> Mask:
    """Return the parts of ``faint`` that go on, wide, where no rim reaches: blue tissue that a mark lies on."""
    wide = opened(faint, max(1, round(_STROKE_UM / mpp_um)))
    found: Mask = joined_to(without_small(wide & ~near, max(1, round(_SMALLEST_UM2 / mpp_um**2))), wide)
    return found
