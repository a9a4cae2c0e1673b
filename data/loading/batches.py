"""How the endless stream of samples is cut into batches: who learns which sample number, and which part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyfi_core.plan.box import Box


@dataclass(frozen=True)
class BatchLayout:
    """Batches of the stream: turn after turn, each of one round or several, in which every replica takes its share.

    ::

        number   0 1 | 2 3 | 4 5 | 6 7 | 8 9        shares = (2, 2)
        replica   0  |  1  |  0  |  1  |  0
        turn           0   |     1     |   2        turn = step × accumulate + k

        number   0 1 2 | 3 4 5 | 6 7 8 | …          shares = (2, 1), rounds = 2
        replica  0 0 1 | 0 0 1 | 0 0 1 |
        turn           0       |       1

    The samples of a turn, and of each round, are the same whatever the shares.

    Attributes:
        shares: samples of a round that each replica takes, at least one.
        rounds: of a turn.
    """

    shares: tuple[int, ...]
    rounds: int = 1

    @classmethod
    def alike(cls, batch: int, replicas: int = 1) -> BatchLayout:
        """Return the layout of replicas that take ``batch`` samples each, one after the other."""
        return cls((batch,) * replicas)

    @property
    def replicas(self) -> int:
        """Data-parallel copies."""
        return len(self.shares)

    @property
    def turn_samples(self) -> int:
        """Samples of one turn, over all replicas."""
        return sum(self.shares) * self.rounds

    def batch_of(self, replica: int) -> int:
        """Return the samples of one replica's batch."""
        return self.shares[replica] * self.rounds

    def numbers(self, turn: int, replica: int) -> Sequence[int]:
        """Return the sample numbers of one replica's batch."""
        whole, share = sum(self.shares), self.shares[replica]
        first = turn * self.turn_samples + sum(self.shares[:replica])
        return [first + round_ * whole + place for round_ in range(self.rounds) for place in range(share)]

    def replica_of(self, number: int) -> int:
        """Return the replica that a sample belongs to."""
        return self._place_in_round(number)[1]

    def ordinal(self, number: int) -> int:
        """Return which of its replica's samples a sample is, counted from 0 over all turns."""
        place, replica = self._place_in_round(number)
        return number // sum(self.shares) * self.shares[replica] + place

    def place_of(self, number: int) -> int:
        """Return a sample's place in its replica's batch."""
        return self.ordinal(number) % self.batch_of(self.replica_of(number))

    def _place_in_round(self, number: int) -> tuple[int, int]:
        """Return (place among its replica's samples of the round, replica)."""
        place = number % sum(self.shares)
        for replica, share in enumerate(self.shares):
            if place < share:
                return place, replica
            place -= share
        raise AssertionError("a round ends with the last replica's samples")


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
