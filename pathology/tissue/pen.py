"""Detection of felt-tip pen marks on the glass, by their colour and by the absence of nuclear texture.

Haematoxylin alone, the counterstain of immunostains, may be as blue as ink. But within 24 µm its optical density varies
by a tenth or more, from nucleus to nucleus; that of ink varies by a few hundredths.
"""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from data.arrays import Mask
from data.components import joined_to, without_small
from pathology.arrays import Float, Planes
from pathology.tissue.density import density_of
from pathology.tissue.morphology import dilated, opened

MIN_INK_DENSITY = 0.02
"""Ink has a higher mean optical density than this."""
_MAX_VARIATION = 0.08
"""Standard deviation / mean of the optical density within `_TEXTURE_UM`; areas below it have no nuclei."""
_TEXTURE_UM = 24.0
_SMOOTH_FRACTION = 0.12
"""Pixels of the colour of ink are ink if more than this fraction of those within `_FRACTION_UM` lacks texture. Single
pixels do not decide: edges of a mark have texture, and small areas of tissue have none."""
_FRACTION_UM = 72.0
_STROKE_UM = 8.0
_MIN_AREA_UM2 = 6_000.0
_RIM_UM = 40.0


def classify_ink(density: Float, mean: Float, colour: Float) -> tuple[Mask, Mask, Mask]:
    """Classify pixels by the colour of ink.

    Blue and green ink absorb most in red. Red ink absorbs little in red, and as much in blue as in green. Black ink
    absorbs equally in all three. Haematoxylin and eosin absorb most in green, but haematoxylin alone may be close to
    blue ink.

    Args:
        density: ``(3, …)`` optical density of pixels in red, green and blue.
        mean: ``(…)`` mean of the density over the channels; above `MIN_INK_DENSITY` for all pixels that may be ink.
        colour: ``(…)`` largest difference of the density between channels.

    Returns:
        Three masks ``(…)``: core (ink if it is wide and smooth), certain (no stain has this colour) and faint (may be
        the rim of a mark).
    """
    red, green, blue = density
    bluish = (red > 1.1 * green) & (red > 0.12)
    red_hue = (blue > 0.75 * green) & (red < 0.25 * green)
    black = (mean > 0.2) & (colour < 0.25 * mean)
    faint = ((red > green) | (colour < 0.2 * mean) | red_hue) & (mean > MIN_INK_DENSITY)
    certain = (red > 0.3) & ((red > 2.5 * green) | ((red > 1.6 * green) & (red > 3.5 * blue)))
    core = bluish | (red_hue & (green > 0.4)) | black
    return core, certain, faint


def without_texture(image: Planes, glass: Float, rows: slice, mpp_um: float) -> Mask:
    """Return the mask, for some rows, of pixels whose surroundings lack the texture of nuclei.

    Args:
        image: ``(3, h, w)`` uint8.
        glass: From `data.samples.colours.slide_colours.glass_colour`.
        rows: Rows to compute.
        mpp_um: Microns per pixel.

    Returns:
        ``(rows, w)`` bool.
    """
    half = max(1, int(_TEXTURE_UM / 2 / mpp_um))
    first, end = max(0, rows.start - half), min(image.shape[1], rows.stop + half)
    density = density_of(image, glass, slice(first, end)).mean(0)
    mean = ndimage.uniform_filter(density, 2 * half + 1, mode="nearest")
    # mean of squares − square of the mean: densities are below 3, so float32 is precise enough.
    variance = ndimage.uniform_filter(density * density, 2 * half + 1, mode="nearest") - mean * mean
    smooth: Mask = variance < (np.float32(_MAX_VARIATION) * mean) ** 2
    return smooth[rows.start - first : rows.stop - first]


def _mostly_smooth(smooth: Mask, core: Mask, mpp_um: float) -> Mask:
    """Return the mask of pixels around which enough of ``core`` is ``smooth``."""
    side = 2 * round(_FRACTION_UM / 2 / mpp_um) + 1
    smooth_mean, core_mean = (
        ndimage.uniform_filter(m.astype(np.float32), side, mode="constant") for m in (smooth, core)
    )
    # The filter's running sums are about 1e-7 instead of 0 where no pixel is set.
    mostly: Mask = smooth_mean > np.maximum(np.float32(_SMOOTH_FRACTION) * core_mean, np.float32(1e-6))
    return mostly


def pen_marks(core: Mask, smooth: Mask, certain: Mask, faint: Mask, thin: Mask, mpp_um: float) -> Mask:
    """Return the mask of pen marks with their faint rims.

    Args:
        core: From `classify_ink`.
        smooth: The part of ``core`` that is `without_texture`.
        certain: From `classify_ink`.
        faint: From `classify_ink`.
        thin: From `pathology.tissue.strokes.thin_strokes`.
        mpp_um: Microns per pixel of all masks.
    """
    min_area_px = max(1, round(_MIN_AREA_UM2 / mpp_um**2))
    strokes = opened(core, max(1, round(_STROKE_UM / mpp_um)))
    strokes = without_small(strokes & _mostly_smooth(smooth, core, mpp_um), min_area_px)
    strokes |= without_small(certain, min_area_px, corners=True) | thin
    if not strokes.any():
        return strokes
    # The rim of a mark is thinner ink: faint pixels connected to the mark, unless they belong to a larger faint area.
    near_strokes = dilated(strokes, max(1, round(_RIM_UM / mpp_um)))
    bluish_tissue = _extends_beyond(faint & ~strokes, near_strokes, mpp_um)
    rim = joined_to(strokes, (faint & ~bluish_tissue) | strokes) & near_strokes
    result: Mask = strokes | rim
    return result


def _extends_beyond(faint: Mask, near: Mask, mpp_um: float) -> Mask:
    """Return the wide parts of ``faint`` that extend beyond ``near``: bluish tissue under a mark, not its rim."""
    wide = opened(faint, max(1, round(_STROKE_UM / mpp_um)))
    beyond: Mask = joined_to(without_small(wide & ~near, max(1, round(_MIN_AREA_UM2 / mpp_um**2))), wide)
    return beyond
