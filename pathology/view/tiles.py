"""Square tiles of a slide at any zoom, resampled from the nearest finer level of its pyramid.

```
zoom 0   the whole slide in one tile
zoom z   each pixel of a tile covers 2^(Z − z) × 2^(Z − z) shown pixels
zoom Z   pixels of tiles are shown pixels, unchanged
```

If the nearest finer level is much finer (as in a slide without a pyramid), a tile is computed from the four tiles of
the next zoom, so that no tile needs more than a few megapixels in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hyfi_core.plan.box import Box
from pathology.readers.resample import halve, make_taps, resample
from pathology.readers.source_level import RGB
from pathology.view.byte_cache import ByteCache
from pathology.view.pixels import ShownSlide

TILE_PX = 256
MAX_REDUCTION = 8.0
"""Maximum pixels of a level for each pixel of a tile; beyond it, the tile is computed from the next zoom."""
_TOLERANCE = 1 + 1e-3
"""A level may be coarser than a zoom by this factor."""


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The zooms of a slide, and the positions of its tiles.

    Attributes:
        height_px, width_px: Size of the slide in shown pixels.
    """

    height_px: int
    width_px: int

    @classmethod
    def of(cls, slide: ShownSlide) -> TileGrid:
        """Return the grid of an open slide."""
        return cls(slide.levels[0].height_px, slide.levels[0].width_px)

    @property
    def finest_zoom(self) -> int:
        """The zoom at which pixels of tiles are shown pixels."""
        # The least Z with which the whole slide fits into one tile at zoom 0.
        return max(0, math.ceil(math.log2(max(self.height_px, self.width_px) / TILE_PX)))

    def scale(self, zoom: int) -> int:
        """Return the shown pixels for each pixel of a tile, along each axis."""
        return int(2 ** (self.finest_zoom - zoom))

    def size_px(self, zoom: int) -> tuple[int, int]:
        """Return (height, width) of the slide at a zoom."""
        scale = self.scale(zoom)
        return -(-self.height_px // scale), -(-self.width_px // scale)

    def box(self, zoom: int, row: int, column: int) -> Box:
        """Return the box of a tile in pixels of its zoom, clipped to the slide; empty if there is no such tile."""
        if not 0 <= zoom <= self.finest_zoom or row < 0 or column < 0:
            return Box(0, 0, 0, 0)
        y, x = row * TILE_PX, column * TILE_PX
        return Box(y, y + TILE_PX, x, x + TILE_PX).intersect(Box.of_size(*self.size_px(zoom)))


class TileCutter:
    """Makes tiles of open slides. Safe to use from several threads.

    Args:
        cache: Cache for decoded blocks, and for tiles that were computed from others.
    """

    def __init__(self, cache: ByteCache) -> None:
        self._cache = cache

    def cut(self, slide: ShownSlide, key: str, zoom: int, row: int, column: int) -> RGB | None:
        """Return a tile, ``(TILE_PX, TILE_PX, 3)`` uint8, white beyond the slide; None if there is no such tile.

        Args:
            slide: The open slide.
            key: Identifies the slide in the cache.
            zoom: Zoom of the tile.
            row: Row of the tile, from the top.
            column: Column of the tile, from the left.
        """
        box = TileGrid.of(slide).box(zoom, row, column)
        if box.empty:
            return None
        inside = self._inside(slide, key, zoom, box)
        if inside.shape[:2] == (TILE_PX, TILE_PX):
            return inside
        out: RGB = np.full((TILE_PX, TILE_PX, 3), 255, np.uint8)
        out[: inside.shape[0], : inside.shape[1]] = inside
        return out

    def _inside(self, slide: ShownSlide, key: str, zoom: int, box: Box) -> RGB:
        """Return the pixels of a box of a zoom, inside the slide and within one tile."""
        scale = TileGrid.of(slide).scale(zoom)
        # The coarsest level that is still fine enough, so that few pixels are read and none are invented.
        level = max(k for k, v in enumerate(slide.levels) if k == 0 or max(v.downsample) <= scale * _TOLERANCE)
        steps = [scale / factor for factor in slide.levels[level].downsample]
        if max(steps) > MAX_REDUCTION:
            # Cached, because the next coarser tiles are made of it.
            return self._cache.get((key, "tile", zoom, box), lambda: self._from_next_zoom(slide, key, zoom, box))
        size = slide.levels[level]
        rows = make_taps(box.y0, box.y1, steps[0], size.height_px)
        columns = make_taps(box.x0, box.x1, steps[1], size.width_px)
        pixels = self._region(slide, key, level, Box(rows.first, rows.end, columns.first, columns.end))
        # At the level's own resolution, pixels are returned unchanged.
        if rows.whole == columns.whole == 1:
            return pixels
        small = resample(np.ascontiguousarray(pixels.transpose(2, 0, 1)), rows, columns)
        return np.ascontiguousarray(small.transpose(1, 2, 0))

    def _from_next_zoom(self, slide: ShownSlide, key: str, zoom: int, box: Box) -> RGB:
        """Return the pixels of a box as means of 2 × 2 pixels of the next zoom."""
        height, width = TileGrid.of(slide).size_px(zoom + 1)
        # If the finer zoom has an odd size, the last row or column is made of one pixel instead of two.
        fine = Box(box.y0 * 2, min(box.y1 * 2, height), box.x0 * 2, min(box.x1 * 2, width))
        doubled: RGB = np.empty((*fine.shape, 3), np.uint8)
        for y in range(fine.y0, fine.y1, TILE_PX):
            for x in range(fine.x0, fine.x1, TILE_PX):
                quarter = Box(y, y + TILE_PX, x, x + TILE_PX).intersect(fine)
                doubled[quarter.relative_to(fine).slices()] = self._inside(slide, key, zoom + 1, quarter)
        return np.ascontiguousarray(halve(doubled.transpose(2, 0, 1)).transpose(1, 2, 0))

    def _region(self, slide: ShownSlide, key: str, level: int, box: Box) -> RGB:
        """Return the pixels of a box of a level, from cached blocks."""
        size = slide.levels[level]
        down, across = size.block_px
        extent = Box.of_size(size.height_px, size.width_px)
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        # Begins at the block that contains (y0, x0): blocks have fixed places, so that they can be cached.
        for y in range(box.y0 // down * down, box.y1, down):
            for x in range(box.x0 // across * across, box.x1, across):
                block = Box(y, y + down, x, x + across).intersect(extent)
                pixels = self._cache.get((key, level, y, x), lambda block=block: slide.read(block, level))  # type: ignore[misc]
                common = block.intersect(box)
                out[common.relative_to(box).slices()] = pixels[common.relative_to(block).slices()]
        return out
