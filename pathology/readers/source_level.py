"""Types of all readers of slides: RGB pixels, levels of a pyramid, tiles that cannot be decoded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyfi_core.plan.box import Box

RGB = npt.NDArray[np.uint8]
Affine = tuple[tuple[float, float, float], tuple[float, float, float]]
"""A 2 × 3 matrix: times (y, x, 1), measured from the corner of pixel 0, it is (y, x) in other coordinates."""

USUAL_TILE_PX = 256


@dataclass(frozen=True, slots=True)
class SourceLevel:
    """One level of a source.

    Attributes:
        height_px: Rows.
        width_px: Columns.
        downsample: Level-0 pixels for each pixel of the level, (y, x).
        tile_px: (height, width) of the tiles that are decoded one by one; a default if the format does not state it.
        missing_tiles: Tiles that the scanner left out as background (byte count 0). They are not damage.
    """

    height_px: int
    width_px: int
    downsample: tuple[float, float]
    tile_px: tuple[int, int] = (USUAL_TILE_PX, USUAL_TILE_PX)
    missing_tiles: int = 0

    @property
    def tiles(self) -> int:
        """Number of tiles of the level."""
        return -(-self.height_px // self.tile_px[0]) * -(-self.width_px // self.tile_px[1])


@dataclass(frozen=True, slots=True)
class BadTile:
    """A tile that cannot be decoded: its box in pixels of its level, and the reason."""

    box: Box
    reason: str


def levels_of_sizes(sizes: list[tuple[int, int]]) -> tuple[SourceLevel, ...]:
    """Return levels of these (height, width), finest first, with their downsample.

    Scanners drop or keep the odd pixel when they halve. So if both sizes are those of a whole downsample, rounded down
    or up, it is the downsample: 13812 / 3453 px is 4, and so is 29382 / 7346. The plain ratio would shift positions at
    the far end of the slide.
    """
    levels = []
    finest_height, finest_width = sizes[0]
    for height, width in sizes:
        ratios = (finest_height / height, finest_width / width)
        factor = max(1, round(sum(ratios) / 2))
        fits = abs(finest_height / factor - height) < 1 and abs(finest_width / factor - width) < 1
        levels.append(SourceLevel(height, width, (float(factor), float(factor)) if fits else ratios))
    return tuple(levels)


def translation(offset: tuple[float, float]) -> Affine:
    """Return the map that adds ``offset`` (y, x) to a point."""
    return ((1.0, 0.0, float(offset[0])), (0.0, 1.0, float(offset[1])))


def split_on_grid(box: Box, size: tuple[int, int]) -> list[Box]:
    """Split a box along the lines of a grid with cells of ``size`` (height, width) that starts at (0, 0)."""
    height, width = size
    rows = range(box.y0 // height * height, box.y1, height)
    columns = range(box.x0 // width * width, box.x1, width)
    return [Box(y, y + height, x, x + width).intersect(box) for y in rows for x in columns]
