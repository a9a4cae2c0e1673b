"""Moments of a map, and the tensor in which ranks send them: few in rows of their own, many as sums.

rows      pixels │ mean │ variance     of each rank: no cancellation, however large the mean
totals    pixels │ Σ x  │ Σ x²         of all ranks in one row: as long for any number of ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

import torch

from hyfi_core.ops.constants import Constant

Moments: TypeAlias = tuple[int, torch.Tensor, torch.Tensor]
"""Pixels of a rank, mean and biased variance of each channel over them."""


def moments_of(own: torch.Tensor) -> Moments:
    """Return the moments of a rank's map, not rounded to 16 bits.

    The CPU's kernel returns moments in the dtype of running statistics, or in the map's dtype without any. So for a
    16-bit map it gets running statistics in float32, which are then dropped.
    """
    channels = own.shape[1]
    if not own.numel():
        nothing = own.new_zeros(channels, dtype=torch.float64)
        return 0, nothing, nothing
    unread: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if own.element_size() <= 2:
        unread = own.new_zeros(channels, dtype=torch.float32), own.new_ones(channels, dtype=torch.float32)
    mean, variance = torch.batch_norm_update_stats(own, *unread, 0.0)
    return own.numel() // channels, mean, variance


def packed_rows(moments: Mapping[int, Moments], ranks: int) -> torch.Tensor:
    """Return pixels, mean and variance of each rank in a row of its own: (ranks, 3, channels), float64.

    The rows of ranks that are not among ``moments`` are zero, so that an all-reduce gathers all rows without rounding.
    """
    here = sorted(moments)
    like = moments[here[0]][1]
    rows = like.new_zeros((ranks, 3, len(like)), dtype=torch.float64)
    if len(here) == ranks:
        # In three kernels for all ranks, instead of three for each.
        rows[:, 0] = _pixels(moments, like.device)
        rows[:, 1:] = _stacked(moments)
        return rows
    for rank in here:
        for to, value in zip(rows[rank], moments[rank], strict=True):
            to.copy_(value) if isinstance(value, torch.Tensor) else to.fill_(value)
    return rows


def packed_totals(moments: Mapping[int, Moments]) -> torch.Tensor:
    """Return pixels, Σ x and Σ x², summed over these ranks: (1, 3, channels), float64."""
    means, variances = _stacked(moments).double().unbind(1)
    pixels = _pixels(moments, means.device)
    # E x² is the variance plus the square of the mean.
    terms = (pixels.expand_as(means), pixels * means, pixels * (variances + means * means))
    return torch.stack(terms).sum(1)[None]


def _stacked(moments: Mapping[int, Moments]) -> torch.Tensor:
    """Return mean and variance of each rank, in rank order: (ranks, 2, channels)."""
    both = torch.stack([tensor for rank in sorted(moments) for tensor in moments[rank][1:]])
    return both.view(len(moments), 2, -1)


def _pixels(moments: Mapping[int, Moments], device: torch.device) -> torch.Tensor:
    """Return the pixels of each rank, in rank order: (ranks, 1), float64."""
    return _column(tuple(moments[rank][0] for rank in sorted(moments))).on(device, torch.float64)


@lru_cache(maxsize=4096)
def _column(numbers: tuple[int, ...]) -> Constant:
    """Return the numbers as a column (n, 1), copied to a GPU once: a copy in every step would make the host wait."""
    return Constant(torch.tensor(numbers, dtype=torch.float64)[:, None])
