"""Evaluation of slides as bags of tiles: always all tissue tiles, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from data.tiles.bags import Bags, BagSource
from hyfi_core.tiles.engine import TilesEngine


class AllTiles:
    """The engine's input for each slide: all of its tissue tiles, or their features.

    Args:
        bags: The slides.
    """

    def __init__(self, bags: Bags) -> None:
        self.bags = bags

    def of(self, index: int) -> list[BagSource]:
        """Return a batch of one slide."""
        return [self.bags.of(index)]


class TileInference:
    """An engine of tiles with the interface that evaluation needs.

    Args:
        engine: The engine of this rank.
    """

    def __init__(self, engine: TilesEngine) -> None:
        self._engine = engine

    def predict(self, images: Sequence[BagSource]) -> torch.Tensor:
        """Return logits ``(B, K)``, the same on every rank of a replica."""
        return self._engine.predict(images)[0]

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load weights, on every rank."""
        self._engine.load_state_dict(state)
