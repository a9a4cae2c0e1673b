"""Slides that are stored rotated or mirrored, presented upright (TIFF 6.0, tag Orientation).

```
Orientation   1   2   3    4   5   6    7     8        steps from the stored to the upright image:
steps         –   x   y,x  y   T   T,x  T,y,x T,y      T transpose, y flip up–down, x flip left–right
```
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hyfi_core.plan.box import Box
from pathology.readers.slide_source import SlideSource
from pathology.readers.source_level import RGB, Affine, BadTile, SourceLevel

_STEPS = {1: "", 2: "x", 3: "yx", 4: "y", 5: "T", 6: "Tx", 7: "Tyx", 8: "Ty"}


class UprightSource:
    """Presents a stored slide upright; see `pathology.readers.slide_source.SlideSource`.

    Args:
        stored: The slide as stored, without bounds; this source owns and closes it.
        orientation: Value of the tag Orientation, 1 to 8.
    """

    def __init__(self, stored: SlideSource, orientation: int) -> None:
        self._stored = stored
        # From the stored to the upright image: T: transpose, y: flip up–down, x: flip left–right.
        steps = _STEPS[orientation]
        self._transposed, self._flip_y, self._flip_x = "T" in steps, "y" in steps, "x" in steps
        self.levels = tuple(map(self._level, stored.levels))
        self.mpp = stored.mpp if stored.mpp is None or not self._transposed else stored.mpp[::-1]
        self.bounds = Box.of_size(self.levels[0].height_px, self.levels[0].width_px)
        self.to_file_px = self._to_file()
        self.vendor, self.objective_power, self.icc = stored.vendor, stored.objective_power, stored.icc
        self.facts = stored.facts

    def __reduce__(self) -> tuple[Any, ...]:
        opening: tuple[Any, ...] = self._stored.__reduce__()  # type: ignore[assignment]
        return opening  # it opens the path with `open_source`, which makes an UprightSource again

    def read(self, box: Box, level: int) -> RGB:
        """Return ``(h, w, 3)``; see `pathology.readers.slide_source.SlideSource.read`."""
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        self.read_into(box, level, out)
        return out

    def read_into(self, box: Box, level: int, out: RGB, bad: list[BadTile] | None = None) -> None:
        """Fill ``out``; see `pathology.readers.slide_source.SlideSource.read_into`."""
        # The stored source writes into a view of `out` whose axes are flipped and transposed: no copy.
        view = out[:: -1 if self._flip_y else 1, :: -1 if self._flip_x else 1]
        stored_bad: list[BadTile] | None = None if bad is None else []
        size = self.levels[level]
        flipped = self._flipped(box, size.height_px, size.width_px)
        self._stored.read_into(
            _transposed_box(flipped) if self._transposed else flipped,
            level,
            view.transpose(1, 0, 2) if self._transposed else view,
            stored_bad,
        )
        if bad is not None and stored_bad is not None:
            bad += [replace(tile, box=self._upright_box(tile.box, size)) for tile in stored_bad]

    def _level(self, level: SourceLevel) -> SourceLevel:
        """Return a level as it is after turning."""
        if not self._transposed:
            return level
        return replace(
            level,
            height_px=level.width_px,
            width_px=level.height_px,
            downsample=level.downsample[::-1],
            tile_px=level.tile_px[::-1],
        )

    def _flipped(self, box: Box, height: int, width: int) -> Box:
        """Return the box at the mirrored position in an image of this size."""
        y = (height - box.y1, height - box.y0) if self._flip_y else (box.y0, box.y1)
        x = (width - box.x1, width - box.x0) if self._flip_x else (box.x0, box.x1)
        return Box(*y, *x)

    def _upright_box(self, stored: Box, size: SourceLevel) -> Box:
        """Return the position of a stored box in the upright level."""
        return self._flipped(_transposed_box(stored) if self._transposed else stored, size.height_px, size.width_px)

    def _to_file(self) -> Affine:
        finest = self.levels[0]
        y = (-1.0, 0.0, float(finest.height_px)) if self._flip_y else (1.0, 0.0, 0.0)
        x = (0.0, -1.0, float(finest.width_px)) if self._flip_x else (0.0, 1.0, 0.0)
        # Flips are undone first, then the transposition: the file's row is the upright column.
        return (x, y) if self._transposed else (y, x)

    def close(self) -> None:
        """Close the file."""
        self._stored.close()


def _transposed_box(box: Box) -> Box:
    return Box(box.x0, box.x1, box.y0, box.y1)
