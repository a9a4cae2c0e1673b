"""How the endless stream of samples is cut into batches: who learns which sample number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
