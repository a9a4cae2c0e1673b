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


def statistics_warning(name: str, instead: str) -> str:
    """Return the warning of a run with batch norm: an optimizer averages its parameters only.

    Args:
        name: The optimizer's.
        instead: The setting without such statistics.
    """
    return (
        f"validation and prediction use the average of the weights that {name} keeps, but batch norm's running "
        f"statistics of the weights in training; {instead} has none"
    )
