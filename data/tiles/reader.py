"""Reading of tiles: each chunk of the store is decoded once for all tiles of a call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from data.samples.augment import Augment
from data.samples.colours.stain_normalisation import ColourMap
from data.store.layout import BACKGROUND
from data.store.sharded_array import thread_pool
from data.store.slide_store import SlideStore
from data.tiles.decoded_chunks import ChunkPlace, DecodedChunks
from data.tiles.resample import reduced
from data.tiles.tissue_tiles import Corners, TissueTiles
from hyfi_core.plan.box import Box

CACHE_BYTES = 2**26
"""Decoded chunks that a reader keeps: about those of one file of the store, 8 × 8 of 512 px, and its border."""


class StoreTiles:
    """The tiles of one slide of a store; a :class:`hyfi_core.tiles.source.TileSource`. May be pickled.

    Memory: the tiles of a call, the pixels of the level that they are made from, and ``cache_bytes``.

    Args:
        slide: The open slide.
        tiles: The slide's tiles.
        colours: Stain normalisation of the slide, before augmentation; None: none.
        augment: Ranges of the augmentation of each tile; None: none.
        seed, epoch: Keys of the augmentation, together with the slide and a tile's corner.
        cache_bytes: Most bytes of decoded chunks that stay in memory between calls.
        threads: Number of chunks decoded, or tiles reduced, at a time.
    """

    def __init__(
        self,
        slide: SlideStore,
        tiles: TissueTiles,
        *,
        colours: ColourMap | None = None,
        augment: Augment | None = None,
        seed: int = 0,
        epoch: int = 0,
        cache_bytes: int = CACHE_BYTES,
        threads: int = 1,
    ) -> None:
        self.name, self.tiles = slide.slide_id, tiles
        self._colours, self._augment, self._key = colours, augment, (seed, epoch)
        self._threads = threads
        self._chunks = DecodedChunks(slide, tiles.plane.level, cache_bytes, threads)

    def __len__(self) -> int:
        """Return the number of tiles."""
        return len(self.tiles)

    @property
    def like(self) -> tuple[tuple[int, ...], torch.dtype]:
        """(shape, dtype) of a tile."""
        return (3, self.tiles.size_px, self.tiles.size_px), torch.uint8

    @property
    def kept_bytes(self) -> int:
        """Bytes of decoded chunks that may stay in memory until `forget` is called."""
        return self._chunks.most_bytes

    def forget(self) -> None:
        """Free decoded chunks; they are read again if they are needed."""
        self._chunks.forget()

    @cached_property
    def identity(self) -> str:
        """Text that differs whenever a tile differs; empty if tiles are augmented, or the store has no digest."""
        if self._augment is not None or not self.tiles.content:
            return ""
        return self.tiles.digest() + ("" if self._colours is None else f" {self._colours.identity}")

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
        """Return the same as :meth:`read`, as a NumPy array."""
        corners = self.tiles.corners[np.asarray(indices, dtype=np.intp)]
        pixels = self.read_level(indices)
        result = np.empty((len(corners), 3, self.tiles.size_px, self.tiles.size_px), np.uint8)

        def finish(index: int) -> None:
            y, x = corners[index].tolist()
            result[index] = self._finished(y, x, pixels[index])

        # Plain tiles are only copied, which threads do not speed up.
        plain = self.tiles.plane.is_level and self._augment is None and self._colours is None
        if self._threads > 1 and not plain:
            list(thread_pool(self._threads).map(finish, range(len(corners))))
        else:
            for index in range(len(corners)):
                finish(index)
        return result

    def read_level(self, indices: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Return, for each tile, the pixels ``(3, h, w)`` of the level that it covers; white outside the slide.

        Raises:
            StoreError: A file of the store is missing or damaged.
            IndexError: There is no such tile.
        """
        corners = self.tiles.corners[np.asarray(indices, dtype=np.intp)]
        return self._level_pixels([self.tiles.level_box(corner) for corner in corners])

    def _finished(self, y: int, x: int, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a finished tile: reduced, with its colours normalised, augmented.

        Args:
            y: First row of the tile in the plane.
            x: First column of the tile in the plane.
            pixels: Pixels of the level that the tile covers.
        """
        plane, size = self.tiles.plane, (self.tiles.size_px, self.tiles.size_px)
        tile = pixels if plane.is_level else reduced(pixels, (y, x), size, plane.step)
        if self._colours is not None:
            tile = self._colours(tile)
        if self._augment is None:
            return tile
        # The key has the corner, not an index: it does not depend on which tiles were drawn.
        return self._augment.draw(*self._key, f"{self.name}@{y},{x}", size).apply(tile)

    def _level_pixels(self, boxes: Sequence[Box]) -> list[NDArray[np.uint8]]:
        """Return the pixels of boxes of the level."""
        pixels = [np.full((3, *box.shape), BACKGROUND, np.uint8) for box in boxes]
        # Chunk by chunk: each is decoded once for all tiles that overlap it.
        users: dict[ChunkPlace, list[int]] = defaultdict(list)
        for index, box in enumerate(boxes):
            for position in self._chunks.places(box):
                users[position].append(index)
        for position, chunk in self._chunks.read(list(users)):
            chunk_box = self._chunks.box(position)
            for index in users[position]:
                common = chunk_box.intersect(boxes[index])
                target = (slice(None), *common.relative_to(boxes[index]).slices())
                pixels[index][target] = chunk[(slice(None), *common.relative_to(chunk_box).slices())]
        return pixels
