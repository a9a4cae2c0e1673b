"""How attention is spread over tiles: if it stays on few of them, training of the encoder collapses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionSpread:
    """Attention of some slides, each summing to 1 over its N tiles.

    Attributes:
        peak: mean over slides of the largest attention × N: 1 if all tiles weigh the same, N if one has all.
        effective_tiles: mean over slides of 1 / Σ a²: the number of tiles that would weigh as much if they weighed the
            same, from 1 to N.
    """

    peak: float
    effective_tiles: float

    @classmethod
    def of(cls, attention: Sequence[torch.Tensor]) -> AttentionSpread | None:
        """Return the spread of slides' attention, whatever its sum; None without slides.

        Args:
            attention: one tensor a slide; heads or classes, in other dims than the longest, are averaged.
        """
        slides = [attention_of_tiles(of_slide) for of_slide in attention]
        if not slides:
            return None
        peaks = [weights.max() * len(weights) for weights in slides]
        effective = [1.0 / weights.square().sum() for weights in slides]
        # One tensor for both, so that the host waits for the device once.
        peak, tiles = torch.stack([torch.stack(peaks).mean(), torch.stack(effective).mean()]).tolist()
        return cls(peak, tiles)


def attention_of_tiles(attention: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """Return attention ``(N,)`` that sums to 1, float32 or float64; heads or classes in other dims are averaged.

    Args:
        attention: of one slide, as the aggregator returns it.
        count: N, which one of its dims must be; None: its longest dim is that of tiles.
    """
    wide = attention.detach().to(torch.promote_types(attention.dtype, torch.float32))
    tiles = wide.shape.index(max(wide.shape) if count is None else count) if wide.dim() else 0
    flat = wide.reshape(-1) if wide.dim() < 2 else wide.movedim(tiles, 0).flatten(1).mean(1)
    # Attention of zeros stays zeros.
    return flat / flat.sum().clamp(min=torch.finfo(flat.dtype).tiny)
