"""A slide stored turned or mirrored, shown upright (TIFF 6.0, tag Orientation).

```
Orientation   1   2   3   4    5    6    7    8        T: rows and columns exchanged
stored as     F   ꟻ   turned …      of the upright     then mirrored up–down (y) and left–right (x):
              –   x   yx  y    T    Tx   Tyx  Ty       from what is stored to what is shown
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
    """A source seen upright; see `pathology.readers.slide_source.SlideSource`.

    Args:
        stored: The slide as it is stored, without bounds; closed with this one.
        orientation: The tag's value.
    """

    def __init__(self, stored: SlideSource, orientation: int) -> None:
        self._stored = stored
        steps = _STEPS[orientation]
        self._turned, self._flip_y, self._flip_x = "T" in steps, "y" in steps, "x" in steps
        self.levels = tuple(map(self._level, stored.levels))
        self.mpp = stored.mpp if stored.mpp is None or not self._turned else stored.mpp[::-1]
        self.bounds = Box.of_size(self.levels[0].height_px, self.levels[0].width_px)
        self.to_file_px = self._to_file()
        self.vendor, self.objective_power, self.icc = stored.vendor, stored.objective_power, stored.icc

    def __reduce__(self) -> tuple[Any, ...]:
        opening: tuple[Any, ...] = self._stored.__reduce__()  # type: ignore[assignment]
        return opening  # which finds the orientation again

    def read(self, box: Box, level: int) -> RGB:
        """Return ``(h, w, 3)``; see `pathology.readers.slide_source.SlideSource.read`."""
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        self.read_into(box, level, out)
        return out

    def read_into(self, box: Box, level: int, out: RGB, bad: list[BadTile] | None = None) -> None:
        """Fill ``out``; see `pathology.readers.slide_source.SlideSource.read_into`."""
        view = out[:: -1 if self._flip_y else 1, :: -1 if self._flip_x else 1]
        stored_bad: list[BadTile] | None = None if bad is None else []
        size = self.levels[level]
        inside = self._flipped(box, size.height_px, size.width_px)
        self._stored.read_into(
            _exchanged(inside) if self._turned else inside,
            level,
            view.transpose(1, 0, 2) if self._turned else view,
            stored_bad,
        )
        if bad is not None and stored_bad is not None:
            bad += [replace(tile, box=self._shown(tile.box, size)) for tile in stored_bad]

    def _level(self, level: SourceLevel) -> SourceLevel:
        if not self._turned:
            return level
        return replace(
            level,
            height_px=level.width_px,
            width_px=level.height_px,
            downsample=level.downsample[::-1],
            tile_px=level.tile_px[::-1],
        )

    def _flipped(self, box: Box, height: int, width: int) -> Box:
        y = (height - box.y1, height - box.y0) if self._flip_y else (box.y0, box.y1)
        x = (width - box.x1, width - box.x0) if self._flip_x else (box.x0, box.x1)
        return Box(*y, *x)

    def _shown(self, stored: Box, size: SourceLevel) -> Box:
        return self._flipped(_exchanged(stored) if self._turned else stored, size.height_px, size.width_px)

    def _to_file(self) -> Affine:
        finest = self.levels[0]
        y = (-1.0, 0.0, float(finest.height_px)) if self._flip_y else (1.0, 0.0, 0.0)
        x = (0.0, -1.0, float(finest.width_px)) if self._flip_x else (0.0, 1.0, 0.0)
        return (x, y) if self._turned else (y, x)

    def close(self) -> None:
        """Close the file."""
        self._stored.close()


def _exchanged(box: Box) -> Box:
    return Box(box.x0, box.x1, box.y0, box.y1)
