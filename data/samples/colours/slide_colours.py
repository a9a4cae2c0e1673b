"""Measurements of a whole slide for stain normalisation: the colour of its glass, and a sample of its tissue.

Both depend on the stored slide only, so every process measures the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from data.arrays import Mask, Pixels
from data.store.slide_store import StoreLevel
from hyfi_core.plan.box import Box

STAINED_DENSITY = 0.15
"""Least optical density (natural logarithm) of stained tissue; Macenko et al. use the same limit."""

_LEAST_DEGREES = 8.0
"""Smallest angle between two stains. H&E has 15° to 40°; one stain and noise 1.5° to 3.5°."""
_DARKEST_GLASS = 200
_HISTOGRAM_PX = 2**20
"""The glass colour is estimated from a sample of about this many pixels or more."""
_OVERVIEW_UM, _TISSUE_UM = 8.0, 1.0
"""Microns per pixel at which glass and tissue are measured; the store's nearest level is used."""
_OVERVIEW_PX = 2**24
"""Most pixels that are read to measure the glass; from larger levels, a few strips of rows are read."""
_STRIPS = 32
_WINDOWS, _WINDOW_PX = 64, 128


class MeasuredSlide(Protocol):
    """An open slide whose colours are measured; :class:`data.store.slide_store.SlideStore` implements it."""

    @property
    def levels(self) -> tuple[StoreLevel, ...]:
        """The pyramid, finest first."""
        ...

    def read(self, box: Box, level: int = 0) -> Pixels:
        """Return the pixels of a box, (3, h, w)."""
        ...

    def tissue(self) -> tuple[Mask, tuple[float, float]]:
        """Return the tissue mask and its mpp (y, x)."""
        ...


def stains_of(slide: object) -> Mapping[str, Any] | None:
    """Return ``haematoxylin``, ``eosin`` and their ``strength``, as ingest measured them; None without two stains.

    Noise can spread one stain into two directions a few degrees apart: such a slide has only one stain.
    """
    attributes: Mapping[str, Any] = getattr(slide, "attributes", {})
    stains: Mapping[str, Any] | None = attributes.get("stains")
    if not stains or min(stains["strength"]) <= 0:
        return None
    cosine = float(np.dot(stains["haematoxylin"], stains["eosin"]))
    return stains if np.degrees(np.arccos(np.clip(cosine, -1, 1))) > _LEAST_DEGREES else None


def glass_colour(image: Pixels) -> NDArray[np.float32]:
    """Return the colour of a slide's glass, ``(3,)``: the mode of the bright pixels of each channel.

    Values below 200 do not count, so that tissue is not taken for glass in an image without glass. The limit is lower
    only if the brightest pixels are darker than that (a grey scanner).

    Args:
        image: ``(3, h, w)`` uint8, the whole slide at a low resolution.
    """
    modes = []
    # A sample of whole rows: to read every n-th pixel takes as long as to read all.
    rows = slice(None, None, max(1, image[0].size // _HISTOGRAM_PX))
    for channel in image[:, rows]:
        counts = np.bincount(channel.reshape(-1), minlength=256).astype(np.float64)
        # Sums over five values, because the highest single count of a sparse histogram is random.
        smooth = np.convolve(counts, np.ones(5), mode="same")
        # The 98th percentile, not the maximum: a few saturated pixels must not decide how dark glass may be.
        brightest = int(np.searchsorted(counts.cumsum(), 0.98 * counts.sum()))
        lowest = max(0, min(_DARKEST_GLASS, brightest - 20))
        modes.append(lowest + int(np.argmax(smooth[lowest:])))
    return np.array(modes, np.float32)


def glass_of(slide: MeasuredSlide) -> NDArray[np.float32]:
    """Return the colour of a slide's glass, ``(3,)``, from the level nearest to 8 µm per pixel; of a large one, strips.

    Raises:
        StoreError: A file of the store is missing or damaged.
    """
    index = _nearest(slide.levels, _OVERVIEW_UM)
    height, width = slide.levels[index].height_px, slide.levels[index].width_px
    if height * width <= _OVERVIEW_PX:
        return glass_colour(slide.read(Box.of_size(height, width), index))
    rows = max(1, _OVERVIEW_PX // _STRIPS // width)
    # A strip begins in the middle of each of `_STRIPS` equal bands.
    tops = [(2 * k + 1) * height // (2 * _STRIPS) for k in range(_STRIPS)]
    strips = [slide.read(Box(top, min(top + rows, height), 0, width), index) for top in tops]
    return glass_colour(np.concatenate(strips, axis=1))


def tissue_windows(slide: MeasuredSlide) -> Iterator[Pixels]:
    """Yield the tissue pixels ``(3, n)`` of each of up to 64 windows, spread over the tissue, at about 1 µm per pixel.

    Raises:
        StoreError: A file of the store is missing or damaged.
    """
    mask, mask_mpp = slide.tissue()
    places = np.flatnonzero(mask)
    index = _nearest(slide.levels, _TISSUE_UM)
    level = slide.levels[index]
    scale = [own / coarse for own, coarse in zip(level.mpp, mask_mpp, strict=True)]
    for k in range(min(_WINDOWS, len(places))):
        # Divide the list of tissue pixels into as many equal parts as there are windows; take the middle pixel of each.
        y, x = divmod(int(places[(2 * k + 1) * len(places) // (2 * min(_WINDOWS, len(places)))]), mask.shape[1])
        top, left = (int(at / s) - _WINDOW_PX // 2 for at, s in zip((y, x), scale, strict=True))
        window = Box(top, top + _WINDOW_PX, left, left + _WINDOW_PX)
        window = window.intersect(Box.of_size(level.height_px, level.width_px))
        if window.empty:
            continue
        # The mask's row at the centre of each row of the window. By rounding, the mask may end before the level does.
        rows = np.minimum(((np.arange(window.y0, window.y1) + 0.5) * scale[0]).astype(int), mask.shape[0] - 1)
        columns = np.minimum(((np.arange(window.x0, window.x1) + 0.5) * scale[1]).astype(int), mask.shape[1] - 1)
        yield slide.read(window, index)[:, mask[rows][:, columns]]


def _nearest(levels: tuple[StoreLevel, ...], mpp_um: float) -> int:
    return min(range(len(levels)), key=lambda k: abs(np.log(levels[k].mpp[0] / mpp_um)))
