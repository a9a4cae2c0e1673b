"""How the endless stream of samples is cut into batches: who learns which sample number, and which part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyfi_core.plan.box import Box


@dataclass(frozen=True)
class BatchLayout:
    """Batches of the stream.

    ::

        number   0 1 | 2 3 | 4 5 | 6 7 | 8 9        batch = 2
        replica   0  |  1  |  0  |  1  |  0         replicas = 2
        turn           0   |     1     |   2        turn = step × accumulate + k

    Attributes:
        batch: samples of one replica's batch.
        replicas: data-parallel copies.
    """

    batch: int
    replicas: int = 1

    @property
    def turn_samples(self) -> int:
        """Samples of one turn, over all replicas."""
        return self.batch * self.replicas

    def numbers(self, turn: int, replica: int) -> Sequence[int]:
        """Return the sample numbers of one replica's batch."""
        first = (turn * self.replicas + replica) * self.batch
        return range(first, first + self.batch)

    def replica_of(self, number: int) -> int:
        """Return the replica that a sample belongs to."""
        return number // self.batch % self.replicas

    def ordinal(self, number: int) -> int:
        """Return which of its replica's samples a sample is, counted from 0 over all turns."""
        return number // self.turn_samples * self.batch + number % self.batch

    def place_of(self, number: int) -> int:
        """Return a sample's place in its replica's batch."""
        return number % self.batch


@dataclass(frozen=True)
class Part:
    """A box of some of a batch's images: what one trainer needs of them.

    Attributes:
        box: pixels of each image.
        first, stop: the samples ``[first, stop)`` of the batch.
    """

    box: Box
    first: int
    stop: int

    def holds(self, place: int) -> bool:
        """Whether the sample at this place of the batch is one of them."""
        return self.first <= place < self.stop

    def covers(self, box: Box, first: int, stop: int) -> bool:
        """Whether ``box`` of the samples ``[first, stop)`` is within this part."""
        return self.box.contains(box) and self.first <= first and stop <= self.stop

    def to_json(self) -> list[int]:
        """Return what ``from_json`` takes."""
        return [self.box.y0, self.box.y1, self.box.x0, self.box.x1, self.first, self.stop]

    @classmethod
    def from_json(cls, value: Sequence[int]) -> Part:
        """Return the part of ``to_json``."""
        return cls(Box(*value[:4]), value[4], value[5])
