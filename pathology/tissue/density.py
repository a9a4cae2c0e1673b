"""Optical density relative to the slide's own glass: what the scanner's lamp and colours do not change."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pathology.tissue.smoothing import smoothed

Planes = npt.NDArray[np.uint8]
Float = npt.NDArray[np.float32]
Places = npt.NDArray[np.intp]

_STRIP_PX = 2**19
"""Pixels of a strip: what is made of them stays in the processor's cache."""
_DARKEST_GLASS = 200
_COUNTED_PX = 2**20
"""Glass is the commonest colour of about so many pixels or more."""
_COMMON_LOG = np.float32(1 / np.log(10))


def glass_colour(image: Planes) -> Float:
    """Return ``(3,)``, the colour of a slide's glass: the mode of the bright pixels of each channel.

    A slide that is tissue all over has no glass in sight: nothing darker than 200 is taken for it unless the
    brightest pixels are darker still (a grey scanner).

    Args:
        image: ``(3, h, w)`` uint8, the whole slide at a low resolution.
    """
    found = []
    rows = slice(None, None, max(1, image[0].size // _COUNTED_PX))
    for channel in image[:, rows]:
        counts = np.bincount(channel.reshape(-1), minlength=256).astype(np.float64)
        smooth = np.convolve(counts, np.ones(5), mode="same")
        brightest = int(np.searchsorted(counts.cumsum(), 0.98 * counts.sum()))
        lowest = max(0, min(_DARKEST_GLASS, brightest - 20))
        found.append(lowest + int(np.argmax(smooth[lowest:])))
    return np.array(found, np.float32)


def strips_of(height_px: int, width_px: int, multiple: int = 1) -> list[slice]:
    """Return strips of rows, from the top down, of so many pixels that their floats stay in the processor's cache.

    Args:
        height_px: Of the picture.
        width_px: Alike.
        multiple: Strips begin at multiples of this.
    """
    step = -(-max(16, _STRIP_PX // max(1, width_px)) // multiple) * multiple
    return [slice(top, min(top + step, height_px)) for top in range(0, height_px, step)]


def density_of(image: Planes, glass: Float, rows: slice, sigma_px: float = 0.0) -> Float:
    """Return the density of some rows, ``(3, rows, w)``: log10(glass / light), not below 0.

    Args:
        image: ``(3, h, w)`` uint8.
        glass: From `glass_colour`.
        rows: Which; with smoothing, neighbouring rows are looked at, so that strips leave no seam.
        sigma_px: Standard deviation of the smoothing of the light; 0 for none.
    """
    light: Float = np.empty((3, rows.stop - rows.start, image.shape[2]), np.float32)
    for k, channel in enumerate(image):
        light[k], weight = smoothed(channel, rows, sigma_px)
    return _density(light, glass, weight)


def density_at(image: Planes, glass: Float, y: Places, x: Places) -> Float:
    """Return the density of some pixels, ``(3, n)``; see `density_of`."""
    return _density(image[:, y, x].astype(np.float32), glass)


def _density(light: Float, glass: Float, weight: int = 1) -> Float:
    """Return the density of light ``(3, …)``, which is given up; ``weight``: what it is to be divided by."""
    brightest = np.log10((glass + 1) * weight).astype(np.float32)
    light += weight
    # NumPy has the natural logarithm for many numbers at a time, the common one only on some processors.
    np.log(light, out=light)
    light *= -_COMMON_LOG
    light += brightest.reshape(3, *[1] * (light.ndim - 1))
    np.maximum(light, 0, out=light)
    return light
