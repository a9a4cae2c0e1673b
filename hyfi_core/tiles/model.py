"""Encoder and aggregator as one module: checkpoints and gradients use its names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class TileModel(nn.Module):
    """An encoder of tiles and an aggregator of their features: ``encoder.*`` and ``aggregator.*``.

    Args:
        encoder: ``(n, 3, T, T)`` to ``(n, D)``.
        aggregator: ``(N, D)`` to ``(K,)``, or ``(1, N, D)`` to ``(1, K)``.
    """

    def __init__(self, encoder: nn.Module, aggregator: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.aggregator = aggregator

    def forward(self, tiles: torch.Tensor) -> Any:
        """Return what the aggregator returns for all tiles of a slide, in one graph; for small slides."""
        return self.aggregator(self.encoder(tiles))


class OneStage:
    """All parameters and buffers of a model as one stage (``runtime.lowered_model.StageNames``)."""

    def __init__(self, model: TileModel) -> None:
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self.names: list[list[str]] = [[name for name, _ in named]]
