"""Tiles from loaders are those of the slides, whatever is read again, and never more of them than may be ahead."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from data.loading.batches import BatchLayout
from data.loading.loader import LoaderService
from data.loading.order import SampleStream
from data.loading.tile_feed import MOST_TILES, TileFeed, spans
from data.tiles.rows import BagRows, TileRow
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.tiles.chunks import SlideParts, TileChunk
from hyfi_core.tiles.source import TensorTiles
from tests.data.loading.thread_worker import ThreadWorker

LAYOUT, STREAM = BatchLayout.uniform(2), SampleStream(5, seed=7)
SHAPE, DTYPE, TURNS, AHEAD = (7, 1, 1), torch.float32, 3, 3  # 28 bytes: not a multiple of three bands


class NumberedBags:
    """Slides of 41 to 81 tiles whose numbers say slide, epoch and tile; the last tile of slide ``damaged`` is."""

    def __init__(self, damaged: int | None = None) -> None:
        self.damaged = damaged

    def count(self, index: int) -> int:
        return 41 + 10 * index

    def of(self, index: int, epoch: int | None = None) -> TensorTiles:
        drawn = torch.Generator().manual_seed(1000 * index + (epoch or 0))
        tiles = TensorTiles(torch.randn(self.count(index), *SHAPE, dtype=DTYPE, generator=drawn))
        if index == self.damaged:
            tiles.read = _fail  # type: ignore[method-assign]
        return tiles


def _fail(indices: Sequence[int]) -> torch.Tensor:
    raise OSError("tile cannot be decoded")


def chunks_of(turn: int, rank: int, size: int) -> tuple[list[int], list[TileChunk]]:
    numbers = list(LAYOUT.numbers(turn, 0))
    counts = tuple(NumberedBags().count(STREAM.at(number)[1]) for number in numbers)
    return numbers, SlideParts(counts, 2).chunks(rank, size)


def train(comm: Communicator, feed: TileFeed) -> None:
    """Two passes a turn, in chunks larger and smaller than a message; the second turn has others than expected."""
    bags = NumberedBags()
    for turn in range(TURNS):
        numbers, chunks = chunks_of(turn, comm.rank, 40 if turn != 1 else 16)
        later_numbers, later = chunks_of(turn + 1, comm.rank, 40)
        expected = chunks_of(turn, comm.rank, 40)[1]
        feed.begin(numbers, expected, spans(later, later_numbers)[:AHEAD] if turn + 1 < TURNS else [])
        slides = [bags.of(index, epoch) for epoch, index in map(STREAM.at, numbers)]
        again = chunks[: 1 + turn][::-1] if turn else []  # of the first turn all chunks are kept
        for last, order in ((False, chunks), (True, again)):
            for chunk, tiles in feed.read(slides, order, (SHAPE, DTYPE), lambda seconds: None, last):
                assert torch.equal(tiles, slides[chunk.slide].read(chunk.tiles))
                assert len(feed._open) <= AHEAD
    feed.close(stopped=False)


def job(loaders: int, bags: NumberedBags) -> None:
    def body(comm: Communicator) -> None:
        row = TileRow(SHAPE, DTYPE)
        if comm.rank < 2:
            return train(comm, TileFeed(comm, range(2, 2 + loaders), 0, row, AHEAD))
        service = LoaderService(comm, [0, 1], BagRows(bags, row), STREAM, LAYOUT, 2, start=ThreadWorker)
        service.serve()
        assert service._pool is not None
        slot = 3 * MOST_TILES * row.width
        assert service._pool._memory.slots.array.size == 2 * (AHEAD + 1) * slot  # of two trainers
        return None

    run_ranks(2 + loaders, body)


@pytest.mark.parametrize("loaders", [1, 2])
def test_trainers_get_the_tiles_of_the_slides(loaders: int) -> None:
    job(loaders, NumberedBags())


def test_a_tile_that_cannot_be_read_ends_all_ranks() -> None:
    with pytest.raises(OSError, match="tile cannot be decoded"):
        job(1, NumberedBags(damaged=2))


@pytest.mark.parametrize(("shape", "dtype"), [((3, 4, 4), torch.uint8), ((5, 1, 1), torch.float32), ((2,), torch.half)])
def test_rows_are_tiles(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    row, tiles = TileRow(shape, dtype), (100 * torch.rand(6, *shape)).to(dtype)
    packed = row.pack(tiles)
    assert packed.shape == (3, 6, row.width)
    assert torch.equal(row.unpack(torch.from_numpy(packed)), tiles)
    assert torch.equal(row.unpack(torch.from_numpy(packed[:, 2:3].copy())), tiles[2:3])
