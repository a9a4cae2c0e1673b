"""Gated attention pooling."""

from __future__ import annotations

import torch
from torch import nn


class GatedScore(nn.Module):
    """One score for each tile, ``wᵀ(tanh(V h) ⊙ σ(U h))``: Ilse et al. 2018, equation 9, before the softmax.

    Args:
        features: Length D of a feature vector.
        hidden: Rows of V and U.
        dropout: Probability with which each of their outputs is left out in training.
    """

    def __init__(self, features: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.v, self.u, self.w = nn.Linear(features, hidden), nn.Linear(features, hidden), nn.Linear(hidden, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, bag: torch.Tensor) -> torch.Tensor:
        """Return scores ``(N,)`` of ``(N, D)``."""
        gated = self.dropout(self.v(bag).tanh()) * self.dropout(self.u(bag).sigmoid())
        scores: torch.Tensor = self.w(gated).squeeze(-1)
        return scores


class GatedAttention(nn.Module):
    """Tiles are averaged with weights that they say themselves: ``logits = W Σ a_i h_i + b``.

    Ilse, Tomczak and Welling, "Attention-based Deep Multiple Instance Learning", ICML 2018 (arXiv:1802.04712),
    equations 7 and 9: ``a = softmax_i(wᵀ(tanh(V h_i) ⊙ σ(U h_i)))``.

    Args:
        features: Length D of a feature vector.
        classes: Number K of logits.
        hidden: Rows of V and U.
        dropout: In the attention, in training.
    """

    def __init__(self, features: int, classes: int, hidden: int = 128, dropout: float = 0.0) -> None:
        super().__init__()
        self.score = GatedScore(features, hidden, dropout)
        self.classifier = nn.Linear(features, classes)

    def forward(self, bag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits ``(K,)`` and attention ``(N,)`` of tiles ``(N, D)``."""
        attention = self.score(bag).softmax(0)
        return self.classifier(attention @ bag), attention
