"""How attention is spread over tiles: if it stays on few of them, training of the encoder collapses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionSpread:
    """How concentrated attention is; of each slide, it sums to 1 over its N tiles.

    Attributes:
        peak: mean over slides of the largest attention × N: 1 if all tiles weigh the same, N if one has all.
        effective_tiles: mean over slides of 1 / Σ a²: the number of tiles that would weigh as much if they weighed the
            same, from 1 to N.
    """

    peak: float
    effective_tiles: float

    @classmethod
    def of(cls, attention: Sequence[torch.Tensor], tiles: Sequence[int] | None = None) -> AttentionSpread | None:
        """Return how unevenly attention is spread over the tiles of slides; it may have any sum. None without slides.

        Args:
            attention: one tensor a slide; heads or classes, in other dims than that of tiles, are averaged.
            tiles: number of tiles of each slide; the dim of this length is that of tiles. Without it, or if no dim has
                this length, the longest dim is.
        """
        counts = [None] * len(attention) if tiles is None else tiles
        slides = [
            attention_of_tiles(of_slide, count if count in of_slide.shape else None)
            for of_slide, count in zip(attention, counts, strict=True)
        ]
        if not slides:
            return None
        # Relative to equal weights: 1 if all tiles weigh the same.
        peaks = [weights.max() * len(weights) for weights in slides]
        # The number of tiles that would have this sum of squares if their weights were equal.
        effective = [1.0 / weights.square().sum() for weights in slides]
        # One tensor for both, so that the host waits for the device once.
        peak, effective_tiles = torch.stack([torch.stack(peaks).mean(), torch.stack(effective).mean()]).tolist()
        return cls(peak, effective_tiles)


def attention_of_tiles(attention: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """Return attention ``(N,)`` that sums to 1, float32 or float64; heads or classes in other dims are averaged.

    Args:
        attention: attention of one slide, as the aggregator returns it.
        count: N, which one of its dims must be; None: its longest dim is that of tiles.
    """
    flat = attention.detach().to(torch.promote_types(attention.dtype, torch.float32))
    if flat.dim() < 2:
        flat = flat.reshape(-1)
    else:
        dim_of_tiles = flat.shape.index(max(flat.shape) if count is None else count)
        flat = flat.movedim(dim_of_tiles, 0).flatten(1).mean(1)
    # Attention of zeros stays zeros.
    return flat / flat.sum().clamp(min=torch.finfo(flat.dtype).tiny)
