"""Gated attention pooling."""

from __future__ import annotations

import math

import torch
from torch import nn

from hyfi_core.errors import RequestError


class GatedScore(nn.Module):
    """Scores of each tile, ``wᵀ(tanh(V h) ⊙ σ(U h))``: Ilse et al. 2018, equation 9, before the softmax.

    Args:
        features: Length D of a feature vector.
        hidden: Rows of V and U.
        dropout: Probability with which each of their outputs is left out in training.
        heads: Number M of vectors w.
    """

    def __init__(self, features: int, hidden: int, dropout: float, heads: int = 1) -> None:
        super().__init__()
        self.v, self.u, self.w = nn.Linear(features, hidden), nn.Linear(features, hidden), nn.Linear(hidden, heads)
        self.dropout = nn.Dropout(dropout)

    def forward(self, bag: torch.Tensor) -> torch.Tensor:
        """Return scores ``(N, M)`` of tiles ``(N, D)``."""
        gated = self.dropout(self.v(bag).tanh()) * self.dropout(self.u(bag).sigmoid())
        scores: torch.Tensor = self.w(gated)
        return scores


class GatedAttention(nn.Module):
    """Tiles are averaged with weights computed from their own features: ``logits = W Σ a_i h_i + b``.

    Ilse, Tomczak and Welling, "Attention-based Deep Multiple Instance Learning", ICML 2018 (arXiv:1802.04712),
    equations 7 and 9: ``a = softmax_i(wᵀ(tanh(V h_i) ⊙ σ(U h_i)))``. With M heads, each has its own w, and W classifies
    their M averages side by side.

    With one head and PyTorch's initial weights, all of N tiles begin with about 1/N of the attention, hence of the
    gradient. Several heads of a larger ``spread`` begin on a few tiles each, in M directions.

    Args:
        features: Length D of a feature vector.
        classes: Number K of logits.
        hidden: Rows of V and U.
        dropout: Dropout in the attention, in training.
        heads: Number M of heads.
        spread: Factor of the initial w.

    Raises:
        RequestError: There is no head, or the spread is not positive.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        hidden: int = 128,
        dropout: float = 0.0,
        heads: int = 1,
        spread: float = 1.0,
    ) -> None:
        super().__init__()
        if heads < 1:
            raise RequestError(f"heads is {heads}; use at least 1")
        if not 0 < spread < math.inf:
            raise RequestError(f"spread is {spread}; use a number above 0, such as 8")
        self.score = GatedScore(features, hidden, dropout, heads)
        self.classifier = nn.Linear(heads * features, classes)
        # A spread above 1 makes the scores differ more: each head begins with its attention on a few tiles.
        with torch.no_grad():
            self.score.w.weight.mul_(spread)

    def forward(self, bag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits ``(K,)`` and attention ``(N,)``, the mean of the heads', of tiles ``(N, D)``."""
        # Tiles are the second last dim, so that (1, N, D) works as well.
        attention = self.score(bag).softmax(-2)
        return self.classifier((attention.mT @ bag).flatten(-2)), attention.mean(-1)
