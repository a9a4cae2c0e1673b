"""Sums over ranks of which each rank reads only what is computed from them.

    rank       contribute ── pack ── all-reduce ── combine ──▶ result
    cells      contribute ┐
               contribute ┼─ pack ── all-reduce ── combine ──▶ the result of all
               contribute ┘

Cells of one process pack what they contribute together and combine it once: the host starts every kernel of a GPU, and
for the small tensors of a norm that takes longer than the kernels.
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
        pack: returns a tensor from the contributions of some ranks, by rank; summed over all ranks, it has everything.
        combine: returns the values from that sum. Ranks that share memory must all pass the same function of the same
            values, and must not change what it returns.
        sent_bytes: bytes of the tensor.
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
        own: returns what this rank contributes; not called where the values are known from an earlier run.
        combination: the same on all ranks.
        kept: whether the values are used again after the next wait: then cells that spill have copies of their own.
    """
    # Only cells, what forwards to them, and what replays values have the method.
    start = getattr(comm, "start_combined", None)
    result: Combined = reduced_by(comm, own, combination) if start is None else start(own, combination, kept)
    return result


def reduced_by(comm: Communicator, own: Callable[[], Any], combination: Combination) -> Combined:
    """Start combining by an all-reduce of what this rank alone has packed."""
    packed = combination.pack({comm.rank: own()})
    return Combined(comm.start_all_reduce(packed), lambda: combination.combine(packed))
