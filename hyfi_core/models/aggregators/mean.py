"""The mean of all tiles."""

from __future__ import annotations

import torch
from torch import nn


class MeanAggregator(nn.Module):
    """A linear classifier of the mean feature vector: ``logits = W mean(h) + b``.

    The mean pooling of Ilse, Tomczak and Welling, "Attention-based Deep Multiple Instance Learning", ICML 2018
    (arXiv:1802.04712), there a baseline. All tiles weigh the same.

    Args:
        features: Length D of a feature vector.
        classes: Number K of logits.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(features, classes)

    def forward(self, bag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits ``(K,)`` and attention ``(N,)``, all 1/N, of tiles ``(N, D)``."""
        return self.classifier(bag.mean(0)), bag.new_full((len(bag),), 1.0 / len(bag))
