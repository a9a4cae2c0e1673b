"""Optical density relative to the slide's own glass: what the scanner's lamp and colours do not change."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from skimage.filters import gaussian

Planes = npt.NDArray[np.uint8]
Float = npt.NDArray[np.float32]

_STRIP_PX = 512
_DARKEST_GLASS = 200


def glass_colour(image: Planes) -> Float:
    """Return ``(3,)``, the colour of a slide's glass: the mode of the bright pixels of each channel.

    A slide that is tissue all over has no glass in sight: nothing darker than 200 is taken for it unless the
    brightest pixels are darker still (a grey scanner).

    Args:
        image: ``(3, h, w)`` uint8, the whole slide at a low resolution.
    """
    found = []
    for channel in image:
        counts = np.bincount(channel.ravel(), minlength=256).astype(np.float64)
        smooth = np.convolve(counts, np.ones(5), mode="same")
        brightest = int(np.searchsorted(counts.cumsum(), 0.98 * counts.sum()))
        lowest = max(0, min(_DARKEST_GLASS, brightest - 20))
        found.append(lowest + int(np.argmax(smooth[lowest:])))
    return np.array(found, np.float32)


def density_strips(image: Planes, glass: Float, sigma_px: float = 0.0) -> Iterator[tuple[slice, Float]]:
    """Yield (rows, density) from top to bottom; density is ``(3, h, w)``: log10(glass / light), not below 0.

    In strips, so that a slide of 25 × 75 mm needs no gigabytes of floats; each is smoothed with as much of its
    neighbours as the smoothing sees, so that strips leave no seam.

    Args:
        image: ``(3, h, w)`` uint8.
        glass: From `glass_colour`.
        sigma_px: Standard deviation of the smoothing of the light; 0 for none.
    """
    halo = int(np.ceil(4 * sigma_px)) + 1
    height = image.shape[1]
    for top in range(0, height, _STRIP_PX):
        bottom = min(top + _STRIP_PX, height)
        first, last = max(0, top - halo), min(height, bottom + halo)
        density: Float = np.empty((3, bottom - top, image.shape[2]), np.float32)
        for k, channel in enumerate(image):
            light = channel[first:last].astype(np.float32)
            if sigma_px > 0:
                light = gaussian(light, sigma_px, preserve_range=True)
            np.log10((glass[k] + 1) / (light[top - first : bottom - first] + 1), out=density[k])
        yield slice(top, bottom), np.maximum(density, 0, out=density)
