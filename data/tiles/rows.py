"""Bags as images: loaders, which send boxes of images, then send tiles.

::

    epoch         0        1        2     …
    tile 0     ▒▒▒▒▒▒▒▒ ▒▒▒▒▒▒▒▒ ▒▒▒▒▒▒▒▒        a row has the bytes of one tile, or of one vector;
    tile 1     ▒▒▒▒▒▒▒▒ ▒▒▒▒▒▒▒▒ ▒▒▒▒▒▒▒▒        each epoch draws and augments its tiles anew
    …
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
import torch

from data.arrays import Pixels
from data.tiles.bags import Bags, BagSource
from data.tiles.reader import CACHE_BYTES
from data.tiles.recent import Recent
from hyfi_core.plan.box import Box

_BANDS = 3
_SLIDES = 2
"""Number of slides whose decoded chunks a process keeps."""


@dataclass(frozen=True)
class TileRow:
    """The row of a tile: its bytes in three bands.

    Attributes:
        shape: Shape of a tile.
        dtype: Dtype of a tile.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Number of columns."""
        return -(-self.size_bytes // _BANDS)

    @property
    def size_bytes(self) -> int:
        """Bytes of a tile; three times the width may be a little more."""
        return prod(self.shape) * self.dtype.itemsize

    def pack(self, tiles: torch.Tensor) -> Pixels:
        """Return the rows ``(3, n, width)`` of tiles ``(n, *shape)``."""
        # As bytes, whatever the dtype: loaders send only uint8.
        flat = tiles.contiguous().view(len(tiles), -1).view(torch.uint8).numpy()
        # Pad to a multiple of three: a row has three bands of equal width.
        padded = np.pad(flat, ((0, 0), (0, _BANDS * self.width - self.size_bytes)))
        return np.ascontiguousarray(padded.reshape(len(tiles), _BANDS, self.width).transpose(1, 0, 2))

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the tiles ``(n, *shape)`` of rows ``(3, n, width)`` uint8, in new memory."""
        # A new tensor: the memory of ``rows`` receives the next message, and a `view` as another dtype must be aligned.
        flat = torch.empty((rows.shape[1], self.size_bytes), dtype=torch.uint8)
        flat.copy_(rows.transpose(0, 1).reshape(len(flat), -1)[:, : self.size_bytes])
        return flat.view(self.dtype).view(len(flat), *self.shape)


class BagRows:
    """The bags of a dataset as images; `data.loading.decode.Samples`. May be pickled.

    Memory: decoded chunks of the two slides read last.

    Args:
        bags: The slides.
        row: How a tile becomes a row.

    Attributes:
        kept_bytes: Most bytes of decoded chunks between reads.
    """

    kept_bytes: ClassVar[int] = _SLIDES * CACHE_BYTES

    def __init__(self, bags: Bags, row: TileRow) -> None:
        self._bags, self._row = bags, row
        self._sources: Recent[BagSource] = Recent(self.kept_bytes, _cache_bytes)

    def source(self, index: int, box: Box, epoch: int | None) -> Box:
        """Return the box in the columns of the epoch, by which `read_plain` recognises the epoch."""
        first = (epoch or 0) * self._row.width
        return Box(box.y0, box.y1, box.x0 + first, box.x1 + first)

    def read_plain(self, index: int, box: Box) -> Pixels:
        """Return the tiles ``[box.y0, box.y1)`` of a slide, each as a row of an image: ``(3, n, width)`` uint8.

        The box's columns say in which epoch the tiles are drawn: those of epoch k begin at k times the width, see
        `source`.

        Raises:
            StoreError: A file of the store is missing or damaged.
            RequestError: A file of features is.
        """
        epoch = box.x0 // self._row.width
        source = self._sources.get((index, epoch), lambda: self._bags.of(index, epoch))
        return self._row.pack(source.read(range(box.y0, box.y1)))

    def vary(self, index: int, epoch: int | None, pixels: Pixels) -> Pixels:
        """Return the rows: each tile was augmented when it was read."""
        return pixels


def _cache_bytes(source: BagSource) -> int:
    return CACHE_BYTES
