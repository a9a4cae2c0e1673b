"""DSMIL: attention by similarity to the tile with the largest logit."""

from __future__ import annotations

import torch
from torch import nn


class Dsmil(nn.Module):
    """The mean of two classifiers: one of each class's best tile, one of all tiles weighted by similarity to it.

    Li, Li and Eliceiri, "Dual-stream Multiple Instance Learning Network for Whole Slide Image Classification with
    Self-supervised Contrastive Learning", CVPR 2021 (arXiv:2011.08939), with the scaled softmax of its code::

        c = W₀ h                     logits of each tile              m_k = argmax_i c_ik
        q = Q h,  v = V h            query and information            u_ik = softmax_i(q_i · q_{m_k} / √d)
        b_k = Σ_i u_ik v_i           the bag as class k sees it       logits = ½ (max_i c_i + W_b [b_1 … b_K])

    Args:
        features: Length D of a feature vector.
        classes: Number K of logits.
        hidden: Length d of a query.
        dropout: Dropout of features before V, in training.
    """

    def __init__(self, features: int, classes: int, hidden: int = 128, dropout: float = 0.0) -> None:
        super().__init__()
        self.tile_classifier = nn.Linear(features, classes)
        self.query = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.Tanh())
        self.information = nn.Sequential(nn.Dropout(dropout), nn.Linear(features, features), nn.ReLU())
        self.bag_classifier = nn.Linear(classes * features, classes)

    def forward(self, bag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits ``(K,)`` and attention ``(N,)``, the mean of the classes', of tiles ``(N, D)``."""
        best, critical = self.tile_classifier(bag).max(0)
        queries = self.query(bag)
        # The softmax is over tiles, for each class separately.
        similar = (queries @ queries[critical].mT / queries.shape[1] ** 0.5).softmax(0)
        seen = similar.mT @ self.information(bag)
        return (best + self.bag_classifier(seen.flatten())) / 2, similar.mean(1)
