"""Operations of an encoder for one tile."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hyfi_core.runtime.executor import evaluating


def tile_flops(encoder: nn.Module, size_px: int) -> float:
    """Return the operations of forward and backward for one tile, as products and sums of matrices and convolutions.

    Backward counts twice a forward if something is trained; what is computed again counts once.

    Args:
        encoder: In any mode, which it keeps.
        size_px: Height and width of a tile.
    """
    like = next(encoder.parameters(), torch.empty(0))
    tile = torch.zeros((1, 3, size_px, size_px), dtype=like.dtype, device=like.device)
    with evaluating(encoder, like.device), torch.no_grad(), FlopCounterMode(display=False) as counter:
        encoder(tile)
    trains = any(parameter.requires_grad for parameter in encoder.parameters())
    return float(counter.get_total_flops() * (3 if trains else 1))
