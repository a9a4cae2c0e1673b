"""Reading of tiles: each chunk of the store is decoded once for all tiles of a call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from data.samples.augment import Augment
from data.store.layout import BACKGROUND
from data.store.slide_store import SlideStore
from data.tiles.decoded_chunks import ChunkPlace, DecodedChunks
from data.tiles.resample import reduced
from data.tiles.tissue_tiles import Corners, TissueTiles
from hyfi_core.plan.box import Box

CACHE_BYTES = 2**26
"""Decoded chunks that a reader keeps: about those of one file of the store, 8 × 8 of 512 px, and its border."""


class StoreTiles:
    """The tiles of one slide of a store; a :class:`hyfi_core.tiles.source.TileSource`. May be pickled.

    Memory: the tiles of a call, as they are and at the resolution of the level that is read, and ``cache_bytes``.

    Args:
        slide: The open slide.
        tiles: Its tiles.
        augment: Ranges of the augmentation of each tile; None: none.
        seed, epoch: Keys of the augmentation, together with slide and corner of a tile.
        cache_bytes: Decoded chunks that stay in memory between calls.
    """

    def __init__(
        self,
        slide: SlideStore,
        tiles: TissueTiles,
        *,
        augment: Augment | None = None,
        seed: int = 0,
        epoch: int = 0,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.name, self.tiles = slide.slide_id, tiles
        self._augment, self._key = augment, (seed, epoch)
        self._chunks = DecodedChunks(slide, tiles.plane.level, cache_bytes)

    def __len__(self) -> int:
        """Return the number of tiles."""
        return len(self.tiles)

    @property
    def coords(self) -> Corners:
        """``(N, 2)`` int64: (y, x) of each tile's upper left corner; see `TissueTiles.coords`."""
        return self.tiles.coords

    def read(self, indices: Sequence[int]) -> torch.Tensor:
        """Return tiles ``(n, 3, size_px, size_px)`` uint8 that the caller owns; white outside the slide.

        Raises:
            StoreError: A file of the store is missing or damaged.
            IndexError: There is no such tile.
        """
        return torch.from_numpy(self.read_array(indices))

    def read_array(self, indices: Sequence[int]) -> NDArray[np.uint8]:
        """Return the same as :meth:`read`, as an array of NumPy's."""
        corners = self.tiles.corners[np.asarray(indices, dtype=np.intp)]
        plane, size = self.tiles.plane, (self.tiles.size_px, self.tiles.size_px)
        pixels = self._level_pixels([self.tiles.level_box(corner) for corner in corners])
        result = np.empty((len(corners), 3, *size), np.uint8)
        for tile, (y, x), level in zip(result, corners.tolist(), pixels, strict=True):
            tile[...] = level if plane.is_level else reduced(level, (y, x), size, plane.step)
            if self._augment is not None:
                tile[...] = self._augment.draw(*self._key, f"{self.name}@{y},{x}", size).apply(tile)
        return result

    def _level_pixels(self, boxes: Sequence[Box]) -> list[NDArray[np.uint8]]:
        """Return the pixels of boxes of the level."""
        pixels = [np.full((3, *box.shape), BACKGROUND, np.uint8) for box in boxes]
        users: dict[ChunkPlace, list[int]] = defaultdict(list)
        for index, box in enumerate(boxes):
            for place in self._chunks.places(box):
                users[place].append(index)
        for place, chunk in self._chunks.read(list(users)):
            whole = self._chunks.box(place)
            for index in users[place]:
                common = whole.intersect(boxes[index])
                target = (slice(None), *common.relative_to(boxes[index]).slices())
                pixels[index][target] = chunk[(slice(None), *common.relative_to(whole).slices())]
        return pixels
