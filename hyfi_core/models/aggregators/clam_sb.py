"""CLAM with a single branch of attention."""

from __future__ import annotations

import torch
from torch import nn

from hyfi_core.models.aggregators.gated_attention import GatedScore


class ClamSb(nn.Module):
    """Gated attention over compressed features: ``h = ReLU(W₁ x)``, ``logits = W Σ a_i h_i + b``.

    The bag classifier of CLAM-SB: Lu et al., "Data-efficient and weakly supervised computational pathology on
    whole-slide images", Nature Biomedical Engineering 5:555 (2021; arXiv:2004.09666). The paper adds a loss that
    clusters the tiles of highest and lowest attention; it needs the label inside of the model, and is not part of this
    module.

    Args:
        features: Length D of a feature vector.
        classes: Number K of logits.
        hidden: Length of a compressed feature vector; the attention has half as many rows.
        dropout: Dropout of compressed features, and in the attention, in training.
    """

    def __init__(self, features: int, classes: int, hidden: int = 512, dropout: float = 0.25) -> None:
        super().__init__()
        self.compress = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Dropout(dropout))
        self.score = GatedScore(hidden, max(1, hidden // 2), dropout)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, bag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits ``(K,)`` and attention ``(N,)`` of tiles ``(N, D)``."""
        compressed = self.compress(bag)
        attention = self.score(compressed).squeeze(1).softmax(0)
        return self.classifier(attention @ compressed), attention
