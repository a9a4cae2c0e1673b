"""Fat: lobules that hold hardly any stain, in a web of thin stained walls.

```
  ┌───┬────┬──┐      A cell of fat is 50–150 µm wide and as clear as glass; what is stained are the walls.
  │   │    ├──┤      Averaged over some cells, walls cover an eighth of the area or more. Glass has no walls, the
  ├──┬┴──┬─┘  │      veil of stain beside a piece of tissue is smooth, hairs and scratches have no colour.
  └──┴───┴────┘
```
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from pathology.density import Float, Planes, density_strips
from pathology.morphology import closed, dilated

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
    walls, density, colour, weight = _block_sums(image, glass, known, block, mpp_um)
    sigma = _AVERAGED_UM / (block * mpp_um)
    total = ndimage.gaussian_filter(weight, sigma) + _LEAST_WEIGHT
    walls, density, colour = (ndimage.gaussian_filter(v, sigma) / total for v in (walls, density, colour))
    webs = (walls > WALL_SHARE) & (colour > _COLOUR_SHARE * density)
    if not webs.any():
        return np.zeros_like(known)
    return _enlarged(_with_cells(webs, _mostly(known, block), block * mpp_um), block, known.shape)


def _block_sums(image: Planes, glass: Float, known: Mask, block: int, mpp_um: float) -> tuple[Float, ...]:
    """Return means over blocks: share of walls, their density, their colour, and share of pixels that are not known."""
    mean: Float = np.empty(known.shape, np.float32)
    colour = np.empty_like(mean)
    for rows, strip in density_strips(image, glass):
        mean[rows] = strip.mean(0)
        np.maximum(strip[1] - np.minimum(strip[0], strip[2]), 0, out=colour[rows])
    # Only what is narrow stands out of its surroundings: a veil of stain or a scanner's grey field does not.
    width = 2 * round(_WALL_UM / mpp_um / 2) + 1
    narrow = mean - ndimage.grey_opening(mean, (width, width))
    near = dilated(known, 4)
    wall = (narrow > WALL_DENSITY) & ~near
    density = np.where(wall, np.minimum(mean, _DENSEST), 0)
    stained = np.where(wall, np.minimum(colour, _DENSEST), 0)
    return _means(wall, block), _means(density, block), _means(stained, block), _means(~near, block)


def _means(values: npt.NDArray[np.generic], block: int) -> Float:
    """Return means over ``block`` squared pixels; the last row and column of blocks are filled up with 0."""
    height, width = values.shape
    padded = np.pad(values, ((0, -height % block), (0, -width % block)))
    result: Float = padded.reshape(padded.shape[0] // block, block, -1, block).mean((1, 3), dtype=np.float32)
    return result


def _mostly(mask: Mask, block: int) -> Mask:
    result: Mask = _means(mask, block) >= 0.5
    return result


def _with_cells(webs: Mask, tissue: Mask, mpp_um: float) -> Mask:
    """Return the webs with the empty cells within them, and between them and the tissue."""
    cell_px = max(1, round(_CELL_UM / mpp_um))
    return webs | (closed(webs | tissue, cell_px) & dilated(webs, cell_px) & ~tissue)


def _enlarged(mask: Mask, block: int, shape: tuple[int, ...]) -> Mask:
    """Return the mask of blocks as one of pixels, its outline interpolated."""
    smooth = _between(_between(mask.astype(np.float32), block).T, block).T
    result: Mask = smooth[: shape[0], : shape[1]] >= 0.5
    return result


def _between(values: Float, times: int) -> Float:
    """Return ``times`` as many rows, interpolated between the centres of the given ones."""
    place = np.clip((np.arange(len(values) * times) + 0.5) / times - 0.5, 0, len(values) - 1).astype(np.float32)
    below = np.minimum(place.astype(np.intp) + 1, len(values) - 1)
    share = (place - np.floor(place))[:, None]
    result: Float = values[place.astype(np.intp)] * (1 - share) + values[below] * share
    return result
