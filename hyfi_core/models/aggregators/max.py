"""The tile with the largest logit, for each class."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class MaxAggregator(nn.Module):
    """Each tile is classified; a logit of the slide is the largest of its tiles: ``logits_k = max_i (W h_i + b)_k``.

    Max pooling as in Campanella et al., "Clinical-grade computational pathology using weakly supervised deep learning
    on whole slide images", Nature Medicine 25:1301 (2019). Only K tiles get a gradient in a step.

    Args:
        features: Length D of a feature vector.
        classes: Number K of logits.
    """

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(features, classes)

    def forward(self, bag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits ``(K,)`` and attention ``(N,)``, the share of classes that take a tile, of ``(N, D)``."""
        logits, chosen = self.classifier(bag).max(0)
        # A maximum has no attention of its own: each class gives its share to the tile that it took.
        return logits, F.one_hot(chosen, len(bag)).to(logits.dtype).mean(0)
