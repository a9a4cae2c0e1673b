"""Tiles read ahead: the next chunk is read while the encoder is at work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from hyfi_core.tiles.chunks import TileChunk
from hyfi_core.tiles.source import TileSource, read_tiles


def read_ahead(
    slides: Sequence[TileSource], chunks: Sequence[TileChunk], like: tuple[tuple[int, ...], torch.dtype]
) -> Iterator[tuple[TileChunk, torch.Tensor]]:
    """Yield chunks with their tiles, in order; one chunk is read ahead by another thread.

    Args:
        slides: of the batch.
        chunks: of this rank; those without tiles are not read.
        like: (shape, dtype) of a tile.

    Raises:
        RequestError: a source returns something else than tiles.
    """

    def read(chunk: TileChunk) -> torch.Tensor:
        if not len(chunk):
            return torch.empty((0, *like[0]), dtype=like[1])
        return read_tiles(slides[chunk.slide], chunk.slide, chunk.tiles)

    with ThreadPoolExecutor(1, thread_name_prefix="hyfi-tiles") as reader:
        ahead: Future[torch.Tensor] | None = None
        for number, chunk in enumerate(chunks):
            tiles = read(chunk) if ahead is None else ahead.result()
            ahead = reader.submit(read, chunks[number + 1]) if number + 1 < len(chunks) else None
            yield chunk, tiles
            del tiles
