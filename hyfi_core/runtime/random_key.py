"""What random operators are keyed by: a seed, a step, a micro-batch. No generator has a state."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class RandomKey:
    """The part of the key that changes from run to run and from step to step.

    Attributes:
        seed: rank 0's ``torch.initial_seed()`` when the engine was made.
        step: how often gradients have been computed; to go on from a checkpoint, set it to what it was.
        first: this replica's first micro-batch, counted over all replicas.
    """

    seed: int
    step: int = 0
    first: int = 0

    def words(self, microbatch: int) -> torch.Tensor:
        """Return (seed, step, micro-batch) as int64, on the host."""
        return torch.tensor([self.seed, self.step, self.first + microbatch], dtype=torch.int64)
