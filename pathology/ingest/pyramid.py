"""Builds a pyramid in one pass and bounded memory: depth first, from the shards of level 0 upwards.

```
level 2                 ┌───┐  computed from four halved shards of level 1, after the last of them
level 1           ┌───┬─┴─┐
level 0     ┌──┬──┤ 1 │ 2 │ …      order: 0.0 0.1 0.2 0.3 → 1.0, 0.4 … → 1.1, … → 2.0
```

Shards have an even size, so each halved shard is exactly one quarter of a shard of the next level: no halo, no second
pass. At any time one shard of each level is in memory, for any slide size. Shards of coarse levels, which are kept
longest, are compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import imagecodecs
import numpy as np

from data.store.layout import SHARD_PX, LevelSize
from hyfi_core.plan.box import Box
from pathology.arrays import Planes
from pathology.readers.resample import halve

_codecs: Any = imagecodecs  # annotated for bytes only, but takes arrays

SMALLEST_PX = 512
_COMPRESSED_FROM = 3
"""From this level on, halved shards are compressed while they wait: they are few, but wait long."""


def level_sizes(height_px: int, width_px: int, at_least: int) -> tuple[LevelSize, ...]:
    """Return the sizes of a pyramid whose levels halve (ceil).

    Args:
        height_px: Rows of level 0.
        width_px: Columns of level 0.
        at_least: Least number of levels; there are more until the longer side is at most ``SMALLEST_PX``.
    """
    sizes = [LevelSize(height_px, width_px)]
    while len(sizes) < at_least or max(sizes[-1].height_px, sizes[-1].width_px) > SMALLEST_PX:
        sizes.append(LevelSize(-(-sizes[-1].height_px // 2), -(-sizes[-1].width_px // 2)))
    return tuple(sizes)


def fitted(pixels: Planes, size: LevelSize) -> Planes:
    """Return the pixels, cropped or padded with copies of their border to the size of a level.

    Sizes may differ by a pixel, because halving rounds up and resampling rounds to the nearest.
    """
    _, height, width = pixels.shape
    more = ((0, 0), (0, max(0, size.height_px - height)), (0, max(0, size.width_px - width)))
    cropped = pixels[:, : size.height_px, : size.width_px]
    return np.ascontiguousarray(np.pad(cropped, more, mode="edge") if any(map(any, more)) else cropped)


@dataclass(frozen=True, slots=True)
class PyramidBuilder:
    """Builds all levels from boxes of level 0.

    Attributes:
        sizes: From `level_sizes`.
        read: Returns the ``(3, h, w)`` uint8 pixels of a box of level 0; called once for every shard.
        write: Called with (level, y0, x0, block) for every shard of every level.
        shard_px: Side of a shard, even.
    """

    sizes: Sequence[LevelSize]
    read: Callable[[Box], Planes]
    write: Callable[[int, int, int, Planes], None]
    shard_px: int = SHARD_PX

    def build(self) -> None:
        """Build and write every shard of every level once."""
        top = self.sizes[-1]
        for row in range(-(-top.height_px // self.shard_px)):
            for column in range(-(-top.width_px // self.shard_px)):
                self._build(len(self.sizes) - 1, row, column)

    def _build(self, level: int, row: int, column: int) -> Planes:
        """Build, write and return one shard, after all shards below it."""
        box = self._shard_box(level, row, column)
        block = self.read(box) if level == 0 else self._from_below(level, box, row, column)
        self.write(level, box.y0, box.x0, block)
        return block

    def _from_below(self, level: int, box: Box, row: int, column: int) -> Planes:
        """Return a shard of a level, made of the four shards of the finer level below it, each halved.

        Args:
            level: Index of the shard's level.
            box: Box of the shard, in pixels of its level.
            row: Row of the shard among shards.
            column: Column of the shard among shards.
        """
        # The block is allocated after all quarters exist: while finer shards are built, only quarters are in memory.
        quarters: dict[tuple[int, int], Planes | _Compressed] = {}
        for y in (0, 1):
            for x in (0, 1):
                if not self._shard_box(level - 1, 2 * row + y, 2 * column + x).empty:
                    quarter = halve(self._build(level - 1, 2 * row + y, 2 * column + x))
                    quarters[y, x] = quarter if level < _COMPRESSED_FROM else _Compressed.of(quarter)
                    # Otherwise this name would keep the uncompressed quarter while the next one is built.
                    del quarter
        block: Planes = np.empty((3, *box.shape), np.uint8)
        half = self.shard_px // 2
        # `pop` frees each quarter after it is copied.
        for y, x in list(quarters):
            stored = quarters.pop((y, x))
            part = stored.pixels() if isinstance(stored, _Compressed) else stored
            _, height, width = part.shape
            block[:, y * half : y * half + height, x * half : x * half + width] = part
        return block

    def _shard_box(self, level: int, row: int, column: int) -> Box:
        size, side = self.sizes[level], self.shard_px
        whole = Box(row * side, (row + 1) * side, column * side, (column + 1) * side)
        return whole.intersect(Box.of_size(size.height_px, size.width_px))


@dataclass(frozen=True, slots=True)
class _Compressed:
    """Pixels compressed with zstd."""

    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, pixels: Planes) -> _Compressed:
        return cls(pixels.shape, bytes(_codecs.zstd_encode(pixels, level=1)))

    def pixels(self) -> Planes:
        out: Planes = np.empty(self.shape, np.uint8)
        _codecs.zstd_decode(self.data, out=out.reshape(-1))
        return out
