"""Optical density relative to the slide's own glass: independent of the scanner's light and white balance."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pathology.arrays import Float, Planes
from pathology.tissue.smoothing import binomial_filter

Indices = npt.NDArray[np.intp]

_STRIP_PX = 2**19
"""Pixels of a strip, so that its floats stay in the processor's cache."""
_LOG10_E = np.float32(1 / np.log(10))


def row_strips(height_px: int, width_px: int, multiple: int = 1) -> list[slice]:
    """Return strips of rows, top to bottom, whose floats fit into the processor's cache.

    Args:
        height_px: Rows of the image.
        width_px: Columns of the image.
        multiple: Strips start at multiples of this.
    """
    step = -(-max(16, _STRIP_PX // max(1, width_px)) // multiple) * multiple
    return [slice(top, min(top + step, height_px)) for top in range(0, height_px, step)]


def density_of(image: Planes, glass: Float, rows: slice, sigma_px: float = 0.0) -> Float:
    """Return the optical density of some rows, ``(3, rows, w)``: log10(glass / intensity), at least 0.

    Args:
        image: ``(3, h, w)`` uint8.
        glass: From `data.samples.colours.slide_colours.glass_colour`.
        rows: Rows to compute; smoothing also reads rows around them, so that strips have no seams.
        sigma_px: Standard deviation by which intensities are smoothed; 0 for none.
    """
    intensity: Float = np.empty((3, rows.stop - rows.start, image.shape[2]), np.float32)
    for k, channel in enumerate(image):
        intensity[k], scale = binomial_filter(channel, rows, sigma_px)
    return _density(intensity, glass, scale)


def density_of_pixels(image: Planes, glass: Float, y: Indices, x: Indices) -> Float:
    """Return the optical density of the pixels at ``(y, x)``, ``(3, n)``; see `density_of`."""
    return _density(image[:, y, x].astype(np.float32), glass)


def _density(intensity: Float, glass: Float, scale: int = 1) -> Float:
    """Return the density of ``intensity / scale``, computed in place of ``intensity`` ``(3, …)``."""
    # The sums of smoothing are not divided: their factor becomes a summand of the logarithm.
    log_glass = np.log10((glass + 1) * scale).astype(np.float32)
    # (intensity + 1) · scale: plus one, as black has no logarithm.
    intensity += scale
    # NumPy's natural logarithm uses vector instructions; log10 does so on some processors only.
    np.log(intensity, out=intensity)
    intensity *= -_LOG10_E
    intensity += log_glass.reshape(3, *[1] * (intensity.ndim - 1))
    np.maximum(intensity, 0, out=intensity)
    return intensity
