"""Explanation of a slide by its tiles: the logits of each tile alone, and its contribution to the slide's logits."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.runtime.executor import without_grad
from hyfi_core.tiles.aggregator_call import AggregatorCall
from hyfi_core.tiles.spread import attention_of_tiles

_TOGETHER = 1024
"""Number of tiles that one call of vmap aggregates, each as a slide of its own."""


@dataclass(frozen=True)
class TileExplanation:
    """The explanation of a slide by its tiles; float32 or wider, on the engine's device, the same on every rank.

    Attributes:
        logits: ``(K,)`` of the slide.
        attention: ``(N,)``, with sum 1; None if the aggregator returns none, or no weight for each tile.
        alone: ``(N, K)``: for each tile, the logits of a slide that has only this tile.
        contributions: ``(N, K)``: attention × ``alone``. Their sum is the logits if the aggregator is a linear
            classifier of averaged vectors (mean, gated attention of one head). Without attention: vectors × gradients
            of logits.
    """

    logits: torch.Tensor
    attention: torch.Tensor | None
    alone: torch.Tensor
    contributions: torch.Tensor


def explained(
    call: AggregatorCall,
    bag: torch.Tensor,
    coords: Any,
    result: tuple[torch.Tensor, torch.Tensor | None],
    comm: Communicator,
) -> TileExplanation:
    """Return the explanation of a slide (collective).

    Args:
        call: calls the aggregator, which is in evaluation mode.
        bag: features of all tiles ``(N, D)``, on every rank.
        coords: ``(N, 2)``, None if unknown.
        result: (logits, attention) of the slide.
        comm: ranks that divide the tiles among them.
    """
    logits, attention = result
    logits, count = logits.detach(), len(bag)
    own = slice(count * comm.rank // comm.size, count * (comm.rank + 1) // comm.size)
    wide = torch.promote_types(logits.dtype, torch.float32)
    # The logits of each tile as a slide of its own. A rank fills its rows and leaves zeros elsewhere: the sum over
    # ranks gathers all rows.
    alone = torch.zeros((count, len(logits)), dtype=wide, device=bag.device)
    if own.stop > own.start:
        alone[own] = _alone(call, bag[own], None if coords is None else torch.as_tensor(coords)[own]).to(wide)
    if comm.size > 1:
        comm.all_reduce(alone)
    # A tensor without a dim of length `count` is no attention over tiles.
    if attention is None or count not in attention.shape:
        contributions = _gradients(call, bag, coords).to(wide)
        return TileExplanation(logits.to(wide), None, alone, contributions)
    weights = attention_of_tiles(attention, count).to(wide)
    return TileExplanation(logits.to(wide), weights, alone, contributions=weights[:, None] * alone)


def _alone(call: AggregatorCall, bag: torch.Tensor, coords: torch.Tensor | None) -> torch.Tensor:
    """Return the logits ``(n, K)`` of tiles, each as a slide of its own."""
    inputs = (bag,) if coords is None else (bag, coords)

    def logits(tile: torch.Tensor, place: torch.Tensor | None = None) -> torch.Tensor:
        return call(tile[None], None if place is None else place[None], None)[0]

    with without_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # vmap's request to report it to PyTorch
        try:
            together = torch.vmap(logits, chunk_size=_TOGETHER)
            return together(*inputs)
        except Exception:  # vmap does not support everything that an aggregator may do; one tile after the other works
            return torch.stack([logits(*tile) for tile in zip(*inputs, strict=True)])


def _gradients(call: AggregatorCall, bag: torch.Tensor, coords: Any) -> torch.Tensor:
    """Return ``(N, K)``: for each tile and logit, the dot product of the tile's vector and the logit's gradient."""
    with torch.inference_mode(False), torch.enable_grad():
        # A clone, because a tensor that was created in inference mode cannot require a gradient.
        leaf = bag.detach().clone().requires_grad_()
        logits = call(leaf, coords, None)[0]
        # One backward for each logit, so the graph stays.
        gradients = [torch.autograd.grad(logit, leaf, retain_graph=True)[0] for logit in logits]
    return torch.stack([(gradient * bag).sum(1) for gradient in gradients], 1)
