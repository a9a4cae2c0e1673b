"""Optimizers with other weights for evaluation than for training, as schedule-free ones."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class SwitchingOptimizer(Protocol):
    """An optimizer with other weights for evaluation than for training."""

    def eval(self) -> None:
        """Make the parameters those to evaluate."""

    def train(self, /) -> None:
        """Make them those to train."""
