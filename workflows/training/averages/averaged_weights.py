"""The base class of averages that replace the trained weights in validation, prediction and export."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch


class AveragedWeights(ABC):
    """An average of one rank's weights. All trainers have one, and call its methods at the same steps."""

    @abstractmethod
    def update(self, step: int) -> None:
        """Update the average with the weights of ``step``."""

    @abstractmethod
    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Copy a saved average, under the names of the user's model."""

    @abstractmethod
    def of(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return entries of the model's ``state_dict`` that this rank owns, with averages in place of weights."""

    @abstractmethod
    def applied(self) -> AbstractContextManager[None]:
        """Context manager in which the average replaces the weights; they are restored bitwise afterwards."""
