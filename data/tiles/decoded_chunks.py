"""A cache of the decoded chunks of one level of a slide."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from data.location import ahead, is_far
from data.store.sharded_array import thread_pool
from data.store.slide_store import SlideStore
from hyfi_core.plan.box import Box

ChunkPlace = tuple[int, int]
"""Row and column of a chunk in its level."""


class DecodedChunks:
    """Reads the chunks of one level, and keeps those that were used last. May be pickled; not thread-safe.

    Args:
        slide: The open slide.
        level: Index of the level.
        cache_bytes: Most bytes of decoded chunks that stay in memory.
        threads: Number of chunks decoded at a time.
    """

    def __init__(self, slide: SlideStore, level: int, cache_bytes: int, threads: int = 1) -> None:
        size = slide.levels[level]
        self._slide, self._level, self._threads = slide, level, threads
        self._px = slide.images[size.path].layout.chunk_px
        self.bounds = Box.of_size(size.height_px, size.width_px)
        self._most_chunks = cache_bytes // (3 * self._px[0] * self._px[1])
        self._recent: OrderedDict[ChunkPlace, NDArray[np.uint8]] = OrderedDict()

    @property
    def most_bytes(self) -> int:
        """Most bytes that stay in memory: those of the cache, or of the whole level if it is smaller."""
        return min(self._most_chunks * 3 * self._px[0] * self._px[1], 3 * self.bounds.area)

    def forget(self) -> None:
        """Free what is in memory."""
        self._recent.clear()

    def places(self, box: Box) -> list[ChunkPlace]:
        """Return the places of the chunks that hold a box."""
        inside = box.intersect(self.bounds)
        if inside.empty:
            return []
        (height, width), (y0, y1, x0, x1) = self._px, (inside.y0, inside.y1, inside.x0, inside.x1)
        rows, columns = range(y0 // height, -(-y1 // height)), range(x0 // width, -(-x1 // width))
        return [(row, column) for row in rows for column in columns]

    def box(self, at: ChunkPlace) -> Box:
        """Return the part of the level that a chunk has."""
        (height, width), (row, column) = self._px, at
        return Box(row * height, (row + 1) * height, column * width, (column + 1) * width).intersect(self.bounds)

    def read(self, places: Sequence[ChunkPlace]) -> Iterator[tuple[ChunkPlace, NDArray[np.uint8]]]:
        """Yield (place, chunk ``(3, h, w)`` uint8), each once: first chunks in memory, then the others.

        The caller must not change the chunks. Over a network many are requested at a time.

        Raises:
            StoreError: A file of the store is missing or damaged.
        """
        missing = [at for at in places if at not in self._recent]
        # Chunks in memory first, because decoding the others may evict them.
        for at in places:
            if at in self._recent:
                self._recent.move_to_end(at)
                yield at, self._recent[at]
        for at, chunk in zip(missing, self._decoded(missing), strict=True):
            self._recent[at] = chunk
            while len(self._recent) > self._most_chunks:
                self._recent.popitem(last=False)
            yield at, chunk

    def _decoded(self, places: Sequence[ChunkPlace]) -> Iterator[NDArray[np.uint8]]:
        """Yield decoded chunks in order; two for each thread are decoded in advance."""
        if self._threads <= 1 or is_far(self._slide.path):
            yield from ahead(self._decode, places, self._slide.path)
            return
        pool, remaining = thread_pool(self._threads), iter(places)
        under_way = deque(pool.submit(self._decode, at) for at in islice(remaining, 2 * self._threads))
        while under_way:
            chunk = under_way.popleft().result()
            under_way.extend(pool.submit(self._decode, at) for at in islice(remaining, 1))
            yield chunk

    def _decode(self, at: ChunkPlace) -> NDArray[np.uint8]:
        """Return a chunk's pixels ``(3, h, w)``, without what lies beyond the level."""
        return self._slide.read(self.box(at), self._level)
