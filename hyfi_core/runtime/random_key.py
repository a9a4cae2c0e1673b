"""What random operators are keyed by: a seed, a step, a sample's place in the batch. No generator has a state."""

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
        share: where replicas share each micro-batch: (its samples before this replica's, all of its samples).
    """

    seed: int
    step: int = 0
    first: int = 0
    share: tuple[int, int] | None = None

    def words(self, microbatch: int, images: int) -> torch.Tensor:
        """Return (seed, step, first sample) of a micro-batch of so many images, as int64, on the host."""
        if self.share is None:
            sample = (self.first + microbatch) * images
        else:
            before, whole = self.share
            sample = microbatch * whole + before
        return torch.tensor([self.seed, self.step, sample], dtype=torch.int64)
