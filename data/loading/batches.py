"""How the endless stream of samples is divided into batches: which replica trains on which sample numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchLayout:
    """Division of the stream into batches.

    A turn is one batch of every replica. It has one or more rounds; in each round every replica takes its share::

        number   0 1 | 2 3 | 4 5 | 6 7 | 8 9        shares = (2, 2), rounds = 1
        replica   0  |  1  |  0  |  1  |  0
        turn         0     |     1     |  2         turn = step × accumulate + k

        number   0 1 2 | 3 4 5 | 6 7 8 | …          shares = (2, 1), rounds = 2
        replica  0 0 1 | 0 0 1 | 0 0 1 |
        turn           0       |       1

    Which samples belong to a round or a turn depends only on the sum of the shares.

    Attributes:
        shares: Number of samples that each replica takes in a round, at least one.
        rounds: Number of rounds in a turn.
    """

    shares: tuple[int, ...]
    rounds: int = 1

    @classmethod
    def uniform(cls, batch: int, replicas: int = 1) -> BatchLayout:
        """Return the layout of ``replicas`` replicas that take ``batch`` samples each, in one round."""
        return cls((batch,) * replicas)

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas."""
        return len(self.shares)

    @property
    def turn_samples(self) -> int:
        """Number of samples in one turn, of all replicas together."""
        return sum(self.shares) * self.rounds

    def batch_of(self, replica: int) -> int:
        """Return the number of samples in one replica's batch."""
        return self.shares[replica] * self.rounds

    def numbers(self, turn: int, replica: int) -> Sequence[int]:
        """Return the sample numbers of one replica's batch."""
        round_samples, share = sum(self.shares), self.shares[replica]
        first = turn * self.turn_samples + sum(self.shares[:replica])
        return [first + round_ * round_samples + i for round_ in range(self.rounds) for i in range(share)]

    def replica_of(self, number: int) -> int:
        """Return the replica that a sample belongs to."""
        return self._position_in_round(number)[1]

    def index_in_replica(self, number: int) -> int:
        """Return the index of a sample among all samples of its replica, from turn 0 on."""
        position, replica = self._position_in_round(number)
        return number // sum(self.shares) * self.shares[replica] + position

    def position_of(self, number: int) -> int:
        """Return a sample's index in its replica's batch."""
        return self.index_in_replica(number) % self.batch_of(self.replica_of(number))

    def _position_in_round(self, number: int) -> tuple[int, int]:
        """Return (index among its replica's samples of the round, replica)."""
        position = number % sum(self.shares)
        for replica, share in enumerate(self.shares):
            if position < share:
                return position, replica
            position -= share
        raise AssertionError("unreachable: the shares add up to the samples of a round")
