"""Optimizers with different weights for evaluation and training, such as schedule-free ones."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class SwitchingOptimizer(Protocol):
    """An optimizer with different weights for evaluation and training."""

    def eval(self) -> None:
        """Switch the parameters to the weights for evaluation."""

    def train(self, /) -> None:
        """Switch the parameters to the weights for training."""


def statistics_warning(name: str, instead: str) -> str:
    """Return the warning that an optimizer averages weights, but not the running statistics of batch norm.

    Args:
        name: Name of the optimizer.
        instead: A setting without running statistics.
    """
    return (
        f"validation and prediction use the average of the weights that {name} keeps, but batch norm's running "
        f"statistics of the weights in training; {instead} has none"
    )
