"""Fat: lobules that hold hardly any stain, in a web of thin stained walls.

```
  ┌───┬────┬──┐      A cell of fat is 50–150 µm wide and as clear as glass; what is stained are the walls.
  │   │    ├──┤      Averaged over some cells, walls cover an eighth of the area or more. Glass has no walls, the
  ├──┬┴──┬─┘  │      veil of stain beside a piece of tissue is smooth, hairs and scratches have no colour.
  └──┴───┴────┘
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pathology.density import Float, Planes, density_of, strips_of
from pathology.morphology import closed, dilated
from pathology.smoothing import smoothed
from pathology.source_threads import run_in_pool

Mask = npt.NDArray[np.bool_]

WALL_DENSITY = 0.014
"""Optical density, unsmoothed, by which a wall stands out of what is beside it."""
WALL_SHARE = 0.12
"""Share of walls, averaged over some cells, from which an area is fat."""
_COLOUR_SHARE = 0.2
_BLOCK_UM = 32.0
_AVERAGED_UM = 40.0
_CELL_UM = 64.0
_WALL_UM = 40.0
_DENSEST = 0.08
"""Denser pixels count as this: one dark speck is no web."""
_LEAST_WEIGHT = 0.15


def find_fat(image: Planes, glass: Float, known: Mask, mpp_um: float) -> Mask:
    """Return where fat is, ``(h, w)`` bool; it may overlap ``known``.

    Decided on blocks of 32 µm, so that it costs little beside the rest.

    Args:
        image: ``(3, h, w)`` uint8, the whole slide at a low resolution.
        glass: Its glass.
        known: Tissue and pen that were found already; their pixels and rims say nothing about fat.
        mpp_um: Microns per pixel, 16 or less: coarser pixels do not show walls, and there is no fat.
    """
    block = max(1, round(_BLOCK_UM / mpp_um))
    if mpp_um > _BLOCK_UM / 2:
        return np.zeros_like(known)
    *seen, weight, mostly_known = _block_means(image, glass, known, block, mpp_um)
    whole, sigma = slice(0, len(weight)), _AVERAGED_UM / (block * mpp_um)
    total = smoothed(weight, whole, sigma, "symmetric") + _LEAST_WEIGHT
    walls, density, colour = (smoothed(values, whole, sigma, "symmetric") / total for values in seen)
    webs = (walls > WALL_SHARE) & (colour > _COLOUR_SHARE * density)
    if not webs.any():
        return np.zeros_like(known)
    return _enlarged(_with_cells(webs, mostly_known >= 0.5, block * mpp_um), block, known.shape)


def _block_means(image: Planes, glass: Float, known: Mask, block: int, mpp_um: float) -> tuple[Float, ...]:
    """Return means over blocks: share of walls, their density, their colour, and shares of free and of known pixels."""
    height, width = known.shape
    near = dilated(known, 4)
    means = tuple(np.empty((-(-height // block), -(-width // block)), np.float32) for _ in range(5))

    def fill(rows: slice) -> None:
        mean, narrow, colour = _walls(image, glass, rows, mpp_um)
        wall = (narrow > WALL_DENSITY) & ~near[rows]
        density = np.where(wall, np.minimum(mean, _DENSEST), 0)
        stained = np.where(wall, np.minimum(colour, _DENSEST), 0)
        blocks = slice(rows.start // block, -(-rows.stop // block))
        for target, values in zip(means, (wall, density, stained, ~near[rows], known[rows]), strict=True):
            target[blocks] = _means(values, block)

    run_in_pool(fill, strips_of(height, width, block))
    return means


def _walls(image: Planes, glass: Float, rows: slice, mpp_um: float) -> tuple[Float, Float, Float]:
    """Return of some rows the density, how far it stands out of its surroundings, and the colour.

    Only what is narrow stands out of them: a veil of stain or a scanner's grey field does not.
    """
    half = round(_WALL_UM / mpp_um / 2)
    first = max(0, rows.start - 2 * half)
    density = density_of(image, glass, slice(first, min(image.shape[1], rows.stop + 2 * half)))
    own = slice(rows.start - first, rows.stop - first)
    mean: Float = density.mean(0)
    colour: Float = density[1, own] - np.minimum(density[0, own], density[2, own])
    narrow = mean[own] - _extreme(_extreme(mean, half, np.minimum), half, np.maximum)[own]
    return mean[own], narrow, np.maximum(colour, 0, out=colour)


def _extreme(values: Float, half: int, pick: Callable[[Any, Any], Any]) -> Float:
    """Return the least or greatest value of each pixel's square of ``2 · half + 1``."""
    return _along(_along(values, half, pick).T, half, pick).T


def _along(lines: Float, half: int, pick: Callable[[Any, Any], Any]) -> Float:
    """Return the same of ``2 · half + 1`` lines; of two, then of four, and so on: few passes for wide squares, too."""
    best, span, wanted = np.pad(lines, ((half, half), (0, 0)), mode="edge"), 1, 2 * half + 1
    while span < wanted:
        step = min(span, wanted - span)
        best = pick(best[:-step], best[step:])
        span += step
    return best


def _means(values: npt.NDArray[Any], block: int) -> Float:
    """Return means over ``block`` squared pixels; the last row and column of blocks are filled up with 0."""
    height, width = values.shape
    padded = np.pad(values, ((0, -height % block), (0, -width % block)))
    exact = np.dtype(np.int32 if values.dtype == bool else np.float32)
    down = padded.reshape(-1, block, padded.shape[1]).sum(1, dtype=exact)
    across: npt.NDArray[Any] = down.reshape(len(down), -1, block).sum(2, dtype=exact)
    return (across / np.float32(block * block)).astype(np.float32)


def _with_cells(webs: Mask, tissue: Mask, mpp_um: float) -> Mask:
    """Return the webs with the empty cells within them, and between them and the tissue."""
    cell_px = max(1, round(_CELL_UM / mpp_um))
    return webs | (closed(webs | tissue, cell_px) & dilated(webs, cell_px) & ~tissue)


def _enlarged(mask: Mask, block: int, shape: tuple[int, ...]) -> Mask:
    """Return the mask of blocks as one of pixels, its outline interpolated."""
    height, width = shape
    out: Mask = np.zeros((height, width), bool)
    (above, below, down), (left, right, across) = _between(len(mask), block), _between(mask.shape[1], block)
    values = mask.astype(np.float32)

    def fill(rows: slice) -> None:
        if values[above[rows.start] : below[rows.stop - 1] + 1].any():
            tall = values[above[rows]] * (1 - down[rows, None]) + values[below[rows]] * down[rows, None]
            wide = tall[:, left] * (1 - across) + tall[:, right] * across
            out[rows] = wide[:, :width] >= 0.5

    run_in_pool(fill, strips_of(height, width))
    return out


def _between(blocks: int, times: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Float]:
    """Return for ``times`` as many pixels as blocks the two blocks whose centres each lies between, and how far."""
    place = np.clip((np.arange(blocks * times) + 0.5) / times - 0.5, 0, blocks - 1).astype(np.float32)
    before = place.astype(np.intp)
    return before, np.minimum(before + 1, blocks - 1), place - np.floor(place)
