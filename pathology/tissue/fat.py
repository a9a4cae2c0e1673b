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

from pathology.readers.threads import run_in_pool
from pathology.tissue.density import Float, Planes, density_at, strips_of
from pathology.tissue.morphology import closed, dilated
from pathology.tissue.smoothing import edged, smoothed

Mask = npt.NDArray[np.bool_]

WALL_DENSITY = (0.006, 0.014)
"""Floor and ceiling of the optical density, unsmoothed, by which a wall stands out of what is beside it."""
_WALL_TO_TISSUE = 0.19
"""That density by the median density of the slide's tissue: walls of an immunostain are as pale as its stroma."""
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


def wall_density(tissue_density: float) -> float:
    """Return the density by which a wall stands out on a slide whose tissue has this median density."""
    return float(np.clip(_WALL_TO_TISSUE * tissue_density, *WALL_DENSITY))


def find_fat(image: Planes, glass: Float, known: Mask, mpp_um: float, least: float) -> Mask:
    """Return where fat is, ``(h, w)`` bool; it may overlap ``known``.

    Decided on blocks of 32 µm, so that it costs little beside the rest.

    Args:
        image: ``(3, h, w)`` uint8, the whole slide at a low resolution.
        glass: Its glass.
        known: Tissue and pen that were found already; their pixels and rims say nothing about fat.
        mpp_um: Microns per pixel, 16 or less: coarser pixels do not show walls, and there is no fat.
        least: From `wall_density`.
    """
    block = max(1, round(_BLOCK_UM / mpp_um))
    if mpp_um > _BLOCK_UM / 2:
        return np.zeros_like(known)
    *seen, weight, mostly_known = _block_means(image, glass, known, block, mpp_um, least)
    whole, sigma = slice(0, len(weight)), _AVERAGED_UM / (block * mpp_um)
    total = smoothed(weight, whole, sigma)[0] + _LEAST_WEIGHT
    walls, density, colour = (smoothed(values, whole, sigma)[0] / total for values in seen)
    webs = (walls > WALL_SHARE) & (colour > _COLOUR_SHARE * density)
    if not webs.any():
        return np.zeros_like(known)
    return _enlarged(_with_cells(webs, mostly_known >= 0.5, block * mpp_um), block, known.shape)


def _block_means(
    image: Planes, glass: Float, known: Mask, block: int, mpp_um: float, least: float
) -> tuple[Float, ...]:
    """Return means over blocks: share of walls, their density, their colour, and shares of free and of known pixels."""
    height, width = known.shape
    near = dilated(known, 4)
    means = tuple(np.empty((-(-height // block), -(-width // block)), np.float32) for _ in range(5))

    def fill(rows: slice) -> None:
        blocks = slice(rows.start // block, -(-rows.stop // block))
        wall = _stands_out(image, glass, rows, mpp_um, least) & ~near[rows]
        y, x = np.divmod(np.flatnonzero(wall), width)
        density = density_at(image, glass, rows.start + y, x)
        place = y // block * means[0].shape[1] + x // block
        colour = density.max(0) - density.min(0)
        for target, values in ((means[1], density.mean(0)), (means[2], colour)):
            total = np.bincount(place, np.minimum(values, _DENSEST), target[blocks].size)
            target[blocks] = total.reshape(-1, target.shape[1]) / block**2
        for target, mask in ((means[0], wall), (means[3], ~near[rows]), (means[4], known[rows])):
            target[blocks] = _shares(mask, block)

    run_in_pool(fill, strips_of(height, width, block))
    return means


def _stands_out(image: Planes, glass: Float, rows: slice, mpp_um: float, least: float) -> Mask:
    """Return of some rows where the density stands out of its surroundings by ``least``.

    Only what is narrow does: a veil of stain or a scanner's grey field does not. Mean density is the logarithm of the
    channels' product, so lights are compared instead, which are whole numbers, and their products, too.
    """
    half = round(_WALL_UM / mpp_um / 2)
    first = max(0, rows.start - 2 * half)
    seen = slice(first, rows.stop + 2 * half)
    light: Float = np.ones(image[0, seen].shape, np.float32)
    for channel, brightest in zip(image, glass, strict=True):
        own = np.minimum(channel[seen], np.uint8(brightest)).astype(np.float32)
        own += 1
        light *= own
    around = _extreme(_extreme(light, half, np.maximum), half, np.minimum)
    light *= np.float32(10 ** (3 * least))
    result: Mask = (around > light)[rows.start - first : rows.stop - first]
    return result


def _extreme(values: Float, half: int, pick: Callable[[Any, Any], Any]) -> Float:
    """Return the least or greatest value of each pixel's square of ``2 · half + 1``."""
    down = _along(edged(values, half, 0), half, pick)
    return _along(edged(down, half, 1).T, half, pick).T


def _along(lines: Float, half: int, pick: Callable[[Any, Any], Any]) -> Float:
    """Return the same of ``2 · half + 1`` lines; of two, then of four, and so on: few passes for wide squares, too."""
    best, span, wanted = lines, 1, 2 * half + 1
    while span < wanted:
        step = min(span, wanted - span)
        best = pick(best[:-step], best[step:])
        span += step
    return best


def _shares(mask: Mask, block: int) -> Float:
    """Return the share of set pixels in blocks; the last row and column of blocks are filled up with unset ones."""
    height, width = mask.shape
    padded = np.pad(mask, ((0, -height % block), (0, -width % block)))
    count: npt.NDArray[Any] = padded.astype(np.uint8 if block < 16 else np.uint32)
    for _ in range(2):  # rows together, then columns
        total = count[0::block].copy()
        for k in range(1, block):
            total += count[k::block]
        count = total.T
    return (count / np.float32(block**2)).astype(np.float32)


def _with_cells(webs: Mask, tissue: Mask, mpp_um: float) -> Mask:
    """Return the webs with the empty cells within them, and between them and the tissue."""
    cell_px = max(1, round(_CELL_UM / mpp_um))
    return webs | (closed(webs | tissue, cell_px) & dilated(webs, cell_px) & ~tissue)


def _enlarged(mask: Mask, block: int, shape: tuple[int, ...]) -> Mask:
    """Return the mask of blocks as one of pixels, its outline interpolated."""
    (above, below, down), (left, right, across) = _between(len(mask), block), _between(mask.shape[1], block)
    out = np.repeat(np.repeat(mask, block, 1), block, 0)
    # Where a block and its eight neighbours are alike, there is nothing between them.
    rows, columns = np.nonzero(dilated(mask, 2) & dilated(~mask, 2))
    y, x = ((places[:, None] * block + np.arange(block)) for places in (rows, columns))
    y, x, values = y[:, :, None], x[:, None, :], mask.astype(np.float32)
    ends = (values[above[y], side[x]] * (1 - down[y]) + values[below[y], side[x]] * down[y] for side in (left, right))
    out[y, x] = next(ends) * (1 - across[x]) + next(ends) * across[x] >= 0.5
    return out[: shape[0], : shape[1]]


def _between(blocks: int, times: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Float]:
    """Return for ``times`` as many pixels as blocks the two blocks whose centres each lies between, and how far."""
    place = np.clip((np.arange(blocks * times) + 0.5) / times - 0.5, 0, blocks - 1).astype(np.float32)
    before = place.astype(np.intp)
    return before, np.minimum(before + 1, blocks - 1), place - np.floor(place)
