"""Sums over ranks from which all ranks compute the same values, such as the statistics of a norm.

    rank       contribute ── pack ── all-reduce ── combine ──▶ result
    cells      contribute ┐
               contribute ┼─ pack ── all-reduce ── combine ──▶ the result of all
               contribute ┘

The cells of one process pack their contributions together and compute the result once: for the small tensors of a norm,
the host takes longer to start a GPU's kernels than the kernels take to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hyfi_core.comm.base import Communicator, Pending, Tensors


@dataclass(frozen=True)
class Combination:
    """How the contributions of ranks become values that all of them read.

    Attributes:
        pack: takes rank -> contribution, for some of the ranks, and returns a tensor; ``combine`` takes the sum of
            these tensors over all ranks.
        combine: returns the values, computed from that sum. Ranks that share memory share the values, too: they must
            all pass an equal function, and must not change what it returns.
        sent_bytes: size of the tensor.
    """

    pack: Callable[[Mapping[int, Any]], torch.Tensor]
    combine: Callable[[torch.Tensor], Tensors]
    sent_bytes: int


@dataclass(frozen=True)
class Combined:
    """A combination under way.

    Attributes:
        pending: the sum over all ranks.
        result: returns the combined values, once the sum is complete.
    """

    pending: Pending
    result: Callable[[], Tensors]


def start_combined(
    comm: Communicator, own: Callable[[], Any], combination: Combination, kept: bool = False
) -> Combined:
    """Start combining what all ranks contribute (collective).

    Args:
        comm: the ranks.
        own: returns what this rank contributes; not called if the values are replayed from an earlier run.
        combination: the same on all ranks.
        kept: whether the values are used again after the next wait; if so, each cell that spills gets its own copy.
    """
    # Not part of the protocol: only the communicators of cells, those around them, and replaying ones have the method.
    start = getattr(comm, "start_combined", None)
    result: Combined = reduced_by(comm, own, combination) if start is None else start(own, combination, kept)
    return result


def reduced_by(comm: Communicator, own: Callable[[], Any], combination: Combination) -> Combined:
    """Start combining by an all-reduce; this rank packs only its own contribution."""
    packed = combination.pack({comm.rank: own()})
    return Combined(comm.start_all_reduce(packed), lambda: combination.combine(packed))
