"""ABMILX: attention in heads, refined by the similarity of tiles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.errors import RequestError


class Abmilx(nn.Module):
    """Each head computes attention from its part of a feature vector; similar tiles share their attention.

    Tang et al., "Revisiting End-to-End Learning with Slide-level Supervision in Computational Pathology", NeurIPS 2025
    (arXiv:2506.02408): attention that concentrates on few tiles early keeps an encoder from learning; heads and
    refinement spread it::

        x = GELU(W₁ h), cut into heads x¹ … xᴹ      s = w₂ᵀ GELU(W₂ xᵐ)             local attention of each head
        s' = s + softmax(q kᵀ / √d) (v s)           q, k = W_qk LayerNorm(xᵐ)       refinement by similarity
        z = [Σ_i softmax_i(s'¹) x¹_i  …  xᴹ]        logits = W W_p z

    The refinement takes time proportional to N², and memory proportional to N if PyTorch has a fused attention.

    Args:
        features: Length D of a feature vector.
        classes: Number K of logits.
        hidden: Length of x, a multiple of ``heads``.
        heads: Number M of heads.
        dropout: Dropout of x, in training.

    Raises:
        RequestError: There is no head, or heads do not divide x.
    """

    def __init__(self, features: int, classes: int, hidden: int = 512, heads: int = 8, dropout: float = 0.25) -> None:
        super().__init__()
        if heads < 1:
            raise RequestError(f"heads is {heads}; use at least 1")
        if hidden % heads:
            raise RequestError(f"hidden is {hidden}; use a multiple of heads, {heads}")
        self.heads, of_head = heads, hidden // heads  # features of each head
        self.compress = nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Dropout(dropout))
        self.score = nn.Sequential(nn.Linear(of_head, of_head), nn.GELU(), nn.Linear(of_head, 1))
        # Makes queries and keys, side by side.
        self.norm, self.similarity = nn.LayerNorm(of_head), nn.Linear(of_head, 2 * of_head, bias=False)
        self.shared = nn.Parameter(torch.ones(1))  # factor of similar tiles' scores, added to a tile's own
        self.projection, self.classifier = nn.Linear(hidden, hidden), nn.Linear(hidden, classes)

    def forward(self, bag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits ``(K,)`` and attention ``(N,)``, the mean of the heads', of tiles ``(N, D)``."""
        parts = self.compress(bag).unflatten(1, (self.heads, -1)).transpose(0, 1)  # (M, N, features of a head)
        attention = self._refined(parts, self.score(parts)).softmax(1)
        pooled = (attention * parts).sum(1).flatten()
        return self.classifier(self.projection(pooled)), attention.mean(0).squeeze(1)

    def _refined(self, parts: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores ``(M, N, 1)``: the score of each tile plus a weighted sum of the scores of similar tiles."""
        queries, keys = self.similarity(self.norm(parts)).chunk(2, -1)
        # Fused kernels need values as wide as keys; without such kernels, N x N similarities would be in memory.
        values = F.pad(self.shared * scores, (0, keys.shape[-1] - 1))
        spread = F.scaled_dot_product_attention(queries[None], keys[None], values[None])[0]
        return scores + spread[..., :1]
