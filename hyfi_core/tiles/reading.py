"""Tiles read ahead: the next chunk is read while the encoder is at work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from hyfi_core.tiles.chunks import TileChunk
from hyfi_core.tiles.source import TileSource, read_tiles

Like = tuple[tuple[int, ...], torch.dtype]
"""(shape, dtype) of a tile as it is read."""


class ChunkReader(Protocol):
    """Reads the tiles of a step's chunks.

    Attributes:
        ahead: chunks that may be in memory, as they are read, beside the one at work.
    """

    ahead: int

    def read(
        self,
        slides: Sequence[TileSource],
        chunks: Sequence[TileChunk],
        like: Like,
        waited: Callable[[float], None],
        last: bool,
    ) -> Iterator[tuple[TileChunk, torch.Tensor]]:
        """Yield chunks with their tiles, in order.

        Args:
            slides: slides of the batch.
            chunks: chunks of this rank.
            like: shape and dtype of a tile.
            waited: called with the seconds for which a chunk was not ready when it was needed.
            last: whether this is the last call of ``read`` in this step.
        """
        ...

    def kept_bytes(self, slides: Sequence[TileSource]) -> int:
        """Return the most bytes that slides of a batch keep between reads."""
        ...


class SourceReader:
    """Reads from the slides themselves, one chunk ahead."""

    ahead = 1

    def read(
        self,
        slides: Sequence[TileSource],
        chunks: Sequence[TileChunk],
        like: Like,
        waited: Callable[[float], None],
        last: bool,
    ) -> Iterator[tuple[TileChunk, torch.Tensor]]:
        """Yield chunks with their tiles, in order; a thread reads the next one meanwhile. ``last`` is not used."""
        return read_ahead(slides, chunks, like, waited)

    def kept_bytes(self, slides: Sequence[TileSource]) -> int:
        """Return the most that any slide keeps: only one keeps memory at a time."""
        return max((getattr(slide, "kept_bytes", 0) for slide in slides), default=0)


def read_ahead(
    slides: Sequence[TileSource],
    chunks: Sequence[TileChunk],
    like: Like,
    waited: Callable[[float], None] = lambda seconds: None,
) -> Iterator[tuple[TileChunk, torch.Tensor]]:
    """Yield chunks with their tiles, in order; one chunk is read ahead by another thread.

    A slide that keeps memory between reads frees it when another slide is read, and at the end.

    Args:
        slides: slides of the batch.
        chunks: chunks of this rank; those without tiles are not read.
        like: (shape, dtype) of a tile.
        waited: called with the seconds for which a chunk was not ready when it was needed.

    Raises:
        RequestError: a source returned something other than tiles.
    """
    reading: list[int] = []  # index of the slide whose chunks are read; empty before the first

    def read(chunk: TileChunk) -> torch.Tensor:
        """Return the tiles of a chunk; when another slide begins, free the memory that the one before it keeps."""
        if not len(chunk):
            return torch.empty((0, *like[0]), dtype=like[1])
        if reading != [chunk.slide]:
            _forget(slides, reading)
            reading[:] = [chunk.slide]
        return read_tiles(slides[chunk.slide], chunk.slide, chunk.tiles)

    try:
        # One thread: a source is read by one at a time.
        with ThreadPoolExecutor(1, thread_name_prefix="hyfi-tiles") as reader:
            ahead: Future[torch.Tensor] | None = None
            for number, chunk in enumerate(chunks):
                start_s = time.perf_counter()
                tiles = read(chunk) if ahead is None else ahead.result()
                waited(time.perf_counter() - start_s)
                # Submitted before the yield, so that it is read while the consumer computes.
                ahead = reader.submit(read, chunks[number + 1]) if number + 1 < len(chunks) else None
                yield chunk, tiles
                # Otherwise this chunk would stay in memory until the next one has arrived.
                del tiles
    finally:
        # Also if a read failed, or if the consumer stopped early.
        _forget(slides, reading)


def _forget(slides: Sequence[TileSource], which: Sequence[int]) -> None:
    """Free the memory that some slides keep between reads; not all sources keep any."""
    for slide in which:
        forget = getattr(slides[slide], "forget", None)
        if forget is not None:
            forget()
