"""Optical density relative to the slide's own glass: what the scanner's lamp and colours do not change."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pathology.smoothing import smoothed

Planes = npt.NDArray[np.uint8]
Float = npt.NDArray[np.float32]
Places = npt.NDArray[np.intp]

_STRIP_PX = 2**18
"""Pixels of a strip: what is made of them stays in the processor's cache."""
_DARKEST_GLASS = 200
_COUNTED_AT_ONCE = 2**19
_COMMON_LOG = np.float32(1 / np.log(10))


def glass_colour(image: Planes) -> Float:
    """Return ``(3,)``, the colour of a slide's glass: the mode of the bright pixels of each channel.

    A slide that is tissue all over has no glass in sight: nothing darker than 200 is taken for it unless the
    brightest pixels are darker still (a grey scanner).

    Args:
        image: ``(3, h, w)`` uint8, the whole slide at a low resolution.
    """
    found = []
    for channel in image:
        counts = _histogram(channel).astype(np.float64)
        smooth = np.convolve(counts, np.ones(5), mode="same")
        brightest = int(np.searchsorted(counts.cumsum(), 0.98 * counts.sum()))
        lowest = max(0, min(_DARKEST_GLASS, brightest - 20))
        found.append(lowest + int(np.argmax(smooth[lowest:])))
    return np.array(found, np.float32)


def _histogram(channel: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return how many pixels have each of the 256 values; two neighbours are counted as one number of 16 bits."""
    flat = np.ascontiguousarray(channel).reshape(-1)
    pairs = flat[: flat.size // 2 * 2].view(np.uint16)
    counts = np.zeros(2**16, np.int64)
    for start in range(0, pairs.size, _COUNTED_AT_ONCE):
        counts += np.bincount(pairs[start : start + _COUNTED_AT_ONCE], minlength=2**16)
    table = counts.reshape(256, 256)
    totals: npt.NDArray[np.int64] = table.sum(0) + table.sum(1)
    totals[flat[2 * pairs.size :]] += 1
    return totals


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
        light[k] = smoothed(channel, rows, sigma_px)
    return _density(light, glass)


def density_at(image: Planes, glass: Float, y: Places, x: Places) -> Float:
    """Return the density of some pixels, ``(3, n)``; see `density_of`."""
    return _density(image[:, y, x].astype(np.float32), glass)


def _density(light: Float, glass: Float) -> Float:
    """Return the density of light ``(3, …)``, which is given up."""
    light += 1
    np.divide((glass + 1).reshape(3, *[1] * (light.ndim - 1)), light, out=light)
    np.maximum(light, 1, out=light)
    # NumPy has the natural logarithm for many numbers at a time, the common one only on some processors.
    np.log(light, out=light)
    light *= _COMMON_LOG
    return light
