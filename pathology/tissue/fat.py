"""Detection of fat: cells that are as clear as glass, in a web of thin stained walls.

```
  ┌───┬────┬──┐      A fat cell is 50–150 µm wide and as clear as glass; only its wall is stained. Averaged over a
  │   │    ├──┤      few cells, walls cover an eighth of the area or more. Other things on glass differ:
  ├──┬┴──┬─┘  │      smears of stain beside the tissue are smooth (no thin walls), hairs and scratches are grey.
  └──┴───┴────┘
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from data.arrays import Mask
from pathology.arrays import Float, Planes
from pathology.readers.threads import run_in_pool
from pathology.tissue.density import density_of_pixels, row_strips
from pathology.tissue.morphology import closed, dilated
from pathology.tissue.smoothing import binomial_filter, pad_edges

WALL_DENSITY = (0.006, 0.014)
"""Lower and upper bound of the contrast of a wall: its unsmoothed optical density minus that of its surroundings."""
_WALL_TO_TISSUE = 0.19
"""Contrast of a wall / median density of the slide's tissue: pale stains have pale walls."""
WALL_FRACTION = 0.12
"""An area is fat if walls cover more than this fraction of it, averaged over a few cells."""
_COLOUR_TO_DENSITY = 0.2
"""Walls are stained, not grey, if the difference between their channels is above this fraction of their density."""
_BLOCK_UM = 32.0
_AVERAGED_UM = 40.0
_CELL_UM = 64.0
_WALL_UM = 40.0
_MAX_DENSITY = 0.08
"""Denser pixels count as this, so that a dark speck does not count as a web of walls."""
_MIN_WEIGHT = 0.15


def wall_contrast(tissue_density: float) -> float:
    """Return the minimum contrast of a wall on a slide whose tissue has this median optical density."""
    return float(np.clip(_WALL_TO_TISSUE * tissue_density, *WALL_DENSITY))


def find_fat(image: Planes, glass: Float, tissue: Mask, mpp_um: float, min_contrast: float) -> Mask:
    """Return the mask of fat, ``(h, w)`` bool; it may overlap ``tissue``.

    Fat is detected in blocks of 32 µm, which costs little compared to the other steps.

    Args:
        image: ``(3, h, w)`` uint8, the whole slide at a low resolution.
        glass: From `data.samples.colours.slide_colours.glass_colour`.
        tissue: Tissue and pen marks found before; they and the pixels next to them are not searched for walls.
        mpp_um: Microns per pixel. Above 16 walls cannot be seen, and no fat is found.
        min_contrast: From `wall_contrast`.
    """
    block = max(1, round(_BLOCK_UM / mpp_um))
    if mpp_um > _BLOCK_UM / 2:
        return np.zeros_like(tissue)
    # For each block: fractions of wall pixels, of searched pixels and of tissue; the walls' density and colour.
    *of_walls, searched, tissue_fraction = _block_means(image, glass, tissue, block, mpp_um, min_contrast)
    all_rows, sigma = slice(0, len(searched)), _AVERAGED_UM / (block * mpp_um)
    # Plus a constant: where hardly any pixel was searched, a few walls are no web.
    searched_around = binomial_filter(searched, all_rows, sigma)[0] + _MIN_WEIGHT
    walls, density, colour = (binomial_filter(values, all_rows, sigma)[0] / searched_around for values in of_walls)
    webs = (walls > WALL_FRACTION) & (colour > _COLOUR_TO_DENSITY * density)
    if not webs.any():
        return np.zeros_like(tissue)
    return _upsampled(_with_cells(webs, tissue_fraction >= 0.5, block * mpp_um), block, tissue.shape)


def _block_means(
    image: Planes, glass: Float, tissue: Mask, block: int, mpp_um: float, min_contrast: float
) -> tuple[Float, ...]:
    """Return five means over blocks, each ``(rows, columns)``.

    Returns:
        The fraction of wall pixels; the density and the colour of walls, summed and divided by the pixels of the block;
        the fraction of searched pixels, which are not beside tissue; and the fraction of pixels that are tissue.
    """
    height, width = tissue.shape
    # Pixels beside tissue are mixtures of both, which look like walls.
    beside_tissue = dilated(tissue, 4)
    shape = (-(-height // block), -(-width // block))
    walls, wall_density, wall_colour, searched, tissue_fraction = (np.empty(shape, np.float32) for _ in range(5))

    def fill(rows: slice) -> None:
        """Set the blocks of a strip of rows, which begins at a whole block."""
        blocks = slice(rows.start // block, -(-rows.stop // block))
        wall = _thin_and_dense(image, glass, rows, mpp_um, min_contrast) & ~beside_tissue[rows]
        y, x = np.divmod(np.flatnonzero(wall), width)
        density = density_of_pixels(image, glass, rows.start + y, x)
        block_index = y // block * shape[1] + x // block
        colour = density.max(0) - density.min(0)
        for target, values in ((wall_density, density.mean(0)), (wall_colour, colour)):
            # Summed by block number over wall pixels only, which are few.
            total = np.bincount(block_index, np.minimum(values, _MAX_DENSITY), target[blocks].size)
            target[blocks] = total.reshape(-1, shape[1]) / block**2
        for target, mask in ((walls, wall), (searched, ~beside_tissue[rows]), (tissue_fraction, tissue[rows])):
            target[blocks] = _block_fractions(mask, block)

    run_in_pool(fill, row_strips(height, width, block))
    return walls, wall_density, wall_colour, searched, tissue_fraction


def _thin_and_dense(image: Planes, glass: Float, rows: slice, mpp_um: float, min_contrast: float) -> Mask:
    """Return the mask, for some rows, of thin structures denser than their surroundings by ``min_contrast``.

    This is a black top-hat (grey-scale closing minus image) with a threshold. Smears of stain and grey backgrounds are
    wider than `_WALL_UM` and do not pass.

    The mean density of a pixel is the logarithm of the product of its channels / 3. So products of intensities, which
    are whole numbers, are compared instead of densities:

        density − surrounding density > c   ⇔   closing(R·G·B) > R·G·B · 10^(3c)
    """
    half = round(_WALL_UM / mpp_um / 2)
    # A halo for each of the two filters that follow each other.
    first = max(0, rows.start - 2 * half)
    padded = slice(first, rows.stop + 2 * half)
    product: Float = np.ones(image[0, padded].shape, np.float32)
    for channel, brightest in zip(image, glass, strict=True):
        # Limited to the brightness of glass: a brighter speck would raise the closing around it.
        intensity = np.minimum(channel[padded], np.uint8(brightest)).astype(np.float32)
        intensity += 1
        product *= intensity
    closing = _square_filter(_square_filter(product, half, np.maximum), half, np.minimum)
    product *= np.float32(10 ** (3 * min_contrast))
    result: Mask = (closing > product)[rows.start - first : rows.stop - first]
    return result


def _square_filter(values: Float, half: int, pick: Callable[[Any, Any], Any]) -> Float:
    """Return the minimum or maximum over a square of side ``2 · half + 1`` around each pixel."""
    down = _line_filter(pad_edges(values, half, 0), half, pick)
    return _line_filter(pad_edges(down, half, 1).T, half, pick).T


def _line_filter(lines: Float, half: int, pick: Callable[[Any, Any], Any]) -> Float:
    """Return the minimum or maximum of every ``2 · half + 1`` adjacent lines.

    Windows of two lines are combined to windows of four, these of eight …, in few passes even for wide windows.
    """
    best, span, length = lines, 1, 2 * half + 1
    while span < length:
        # The two combined windows may overlap: a value that is compared twice does not change the result.
        step = min(span, length - span)
        best = pick(best[:-step], best[step:])
        span += step
    return best


def _block_fractions(mask: Mask, block: int) -> Float:
    """Return the fraction of set pixels of each block; beyond the border all pixels are unset."""
    height, width = mask.shape
    padded = np.pad(mask, ((0, -height % block), (0, -width % block)))
    # The smallest type that holds the pixels of a block: 15² = 225.
    count: npt.NDArray[Any] = padded.astype(np.uint8 if block < 16 else np.uint32)
    for _ in range(2):  # sum rows, transpose; then sum columns, transpose back
        total = count[0::block].copy()
        for k in range(1, block):
            total += count[k::block]
        count = total.T
    return (count / np.float32(block**2)).astype(np.float32)


def _with_cells(webs: Mask, tissue: Mask, mpp_um: float) -> Mask:
    """Return the webs with the clear cells inside them, and between them and the tissue."""
    cell_px = max(1, round(_CELL_UM / mpp_um))
    return webs | (closed(webs | tissue, cell_px) & dilated(webs, cell_px) & ~tissue)


def _upsampled(mask: Mask, block: int, shape: tuple[int, ...]) -> Mask:
    """Return the mask of blocks at the resolution of pixels, its outline smoothed by bilinear interpolation.

    Args:
        mask: A pixel for each block.
        block: Pixels along a block's side.
        shape: (height, width) of the result; blocks beyond it are cut off.
    """
    # For each row of pixels: the blocks whose centres are above and below it, and the weight of the one below; for each
    # column the same.
    above, below, down = _neighbours(mask.shape[0], block)
    left, right, across = _neighbours(mask.shape[1], block)
    out = np.repeat(np.repeat(mask, block, 1), block, 0)
    # Only blocks near the outline are interpolated: others have the value of their eight neighbours, which a radius of
    # 2 includes.
    rows, columns = np.nonzero(dilated(mask, 2) & dilated(~mask, 2))
    # Pixels of these blocks: y is (blocks, block, 1), x is (blocks, 1, block).
    y = (rows[:, None] * block + np.arange(block))[:, :, None]
    x = (columns[:, None] * block + np.arange(block))[:, None, :]
    values = mask.astype(np.float32)

    on_left = values[above[y], left[x]] * (1 - down[y]) + values[below[y], left[x]] * down[y]
    on_right = values[above[y], right[x]] * (1 - down[y]) + values[below[y], right[x]] * down[y]
    out[y, x] = on_left * (1 - across[x]) + on_right * across[x] >= 0.5
    return out[: shape[0], : shape[1]]


def _neighbours(blocks: int, factor: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Float]:
    """Return, for each of ``blocks · factor`` pixels along an axis, the blocks to interpolate between.

    Returns:
        The blocks whose centres lie before and after the pixel, and the weight of the one after it.
    """
    position = np.clip((np.arange(blocks * factor) + 0.5) / factor - 0.5, 0, blocks - 1).astype(np.float32)
    before = position.astype(np.intp)
    return before, np.minimum(before + 1, blocks - 1), position - np.floor(position)
