"""The tiles of a step, divided among ranks, and those of a rank into chunks.

::

    slide 0, 10 tiles    rank 0: 0 1 2 3 4    rank 1: 5 6 7 8 9        consecutive, as equal as possible
    slide 1,  1 tile     rank 0:              rank 1: 0                the remainder goes to the last ranks

    rank 0, chunks of 3  [0 1 2] [3 4]        every chunk is of one slide
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TileChunk:
    """Consecutive tiles of one slide, which are encoded together.

    Attributes:
        slide: number of the slide in the batch of this replica.
        start: the first tile.
        stop: the tile after the last.
    """

    slide: int
    start: int
    stop: int

    def __len__(self) -> int:
        """Return the number of tiles."""
        return self.stop - self.start

    @property
    def tiles(self) -> range:
        """The numbers of its tiles in the slide."""
        return range(self.start, self.stop)


@dataclass(frozen=True)
class SlideParts:
    """How the ranks of a replica share the tiles of its slides.

    Attributes:
        tiles: number of tiles of each slide.
        ranks: number of ranks that share them.
        first_slide: number of this replica's first slide in the whole step, over all replicas.
    """

    tiles: tuple[int, ...]
    ranks: int
    first_slide: int = 0

    def part(self, slide: int, rank: int) -> range:
        """Return the numbers of a rank's tiles in a slide; may be empty."""
        count = self.tiles[slide]
        # The end of one rank's part is the start of the next one's: no tile is left out or encoded twice.
        return range(count * rank // self.ranks, count * (rank + 1) // self.ranks)

    def chunks(self, rank: int, size: int | None) -> list[TileChunk]:
        """Return the chunks of a rank, in the order in which they are encoded.

        Args:
            rank: number of the rank in its replica.
            size: tiles of a chunk; None: all tiles of a slide are one chunk, which may be empty.
        """
        chunks: list[TileChunk] = []
        for slide in range(len(self.tiles)):
            part = self.part(slide, rank)
            if size is None:
                # Also if it is empty: a rank without tiles still takes part in the sums of exact norms.
                chunks.append(TileChunk(slide, part.start, part.stop))
                continue
            starts = range(part.start, part.stop, size)
            chunks += [TileChunk(slide, start, min(start + size, part.stop)) for start in starts]
        return chunks


def first_slides(counts: Sequence[int]) -> list[int]:
    """Return the number of each replica's first slide, from the numbers of slides of all replicas."""
    return [sum(counts[:replica]) for replica in range(len(counts))]
