"""Buffers of messages, kept from step to step: after the first step a message takes no memory that is new.

    step 1    take ▒▒▒▒  send, drop        take ▒▒▒▒ ▒▒▒▒  receive, saved until backward
    step 2    the same ▒▒▒▒                the same ▒▒▒▒ ▒▒▒▒

Buffers are not given back. One to which no reference is left, nor to a view of it, is free: so what is in flight, or
saved for as many micro-batches as a schedule keeps open, is never handed out twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod

import torch

_BLOCKS: set[int] = set()  # storages of all blocks of all buffers


class Buffers:
    """The buffers of one operator on one rank; they live as long as it does."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}

    @property
    def bytes(self) -> int:
        """Memory of all buffers."""
        return sum(block.nbytes for blocks in self._blocks.values() for block in blocks)

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous tensor of any values; it is the caller's until the caller drops it."""
        blocks = self._blocks.setdefault((prod(shape), dtype, device), [])
        block = next((block for block in blocks if _is_free(block)), None)
        if block is None:
            block = torch.empty(prod(shape), dtype=dtype, device=device)
            blocks.append(block)
            key = block.untyped_storage()._cdata
            _BLOCKS.add(key)
            weakref.finalize(block, _BLOCKS.discard, key)
        return block.view(*shape)

    def dense(self, view: torch.Tensor) -> torch.Tensor:
        """Return the values of a view in one run of memory: the view itself where it is one."""
        return view if view.is_contiguous() else self.take(view.shape, view.dtype, view.device).copy_(view)


def is_buffer(storage: torch.UntypedStorage) -> bool:
    """Whether memory is a message's, which is kept and used again."""
    return storage._cdata in _BLOCKS


def _is_free(block: torch.Tensor) -> bool:
    storage = block.untyped_storage()  # one more reference, while we look
    return int(torch._C._storage_Use_Count(storage._cdata)) == 2
