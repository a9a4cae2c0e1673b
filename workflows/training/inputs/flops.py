"""Operations of an encoder for one tile, and of an aggregator for one slide."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hyfi_core.runtime.executor import evaluating


def tile_flops(encoder: nn.Module, size_px: int) -> float:
    """Return the operations of matrix products and convolutions in forward and backward for one tile.

    Only the backward of trained parameters counts. Activations that are computed again count once.

    Args:
        encoder: The encoder; keeps its mode.
        size_px: Height and width of a tile.
    """
    like = next(encoder.parameters(), torch.empty(0))
    # Values do not matter: operations are counted by shapes.
    tile = torch.zeros((1, 3, size_px, size_px), dtype=like.dtype, device=like.device)
    trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    with evaluating(encoder, like.device), torch.enable_grad(), FlopCounterMode(display=False) as counter:
        vectors = encoder(tile)
        if vectors.requires_grad:
            # Not `backward()`, which would leave gradients in the model.
            torch.autograd.grad(vectors.sum(), trained, allow_unused=True)
    return float(counter.get_total_flops())


def bag_flops(aggregator: nn.Module, tiles: int, features: int) -> float:
    """Return the operations of an aggregator for one slide, forward and backward; 0 if it takes more than vectors.

    Args:
        aggregator: The aggregator; keeps its mode.
        tiles: Number of tiles of the slide.
        features: Length of a vector.
    """
    if "coords" in inspect.signature(aggregator.forward).parameters:
        return 0.0
    like = next(aggregator.parameters(), torch.empty(0))
    bag = torch.zeros((tiles, features), dtype=like.dtype, device=like.device)
    trained = [parameter for parameter in aggregator.parameters() if parameter.requires_grad]
    with evaluating(aggregator, like.device), torch.enable_grad(), FlopCounterMode(display=False) as counter:
        try:
            returned = aggregator(bag)
        except Exception:  # an aggregator of the user may take (1, N, D)
            returned = aggregator(bag[None])
        logits = returned[0] if isinstance(returned, tuple) else returned
        if logits.requires_grad:
            torch.autograd.grad(logits.sum(), trained, allow_unused=True)
    return float(counter.get_total_flops())
