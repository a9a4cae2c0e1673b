"""Buffers of messages, kept from step to step: after the first step a message takes no memory that is new.

    send       take ▒▒▒▒   copy, send, wait           give back
    receive    take ▒▒▒▒   arrives, copied or added   give back
    saved      take ▒▒▒▒   arrives, saved             … backward has read it: give back

A buffer is its taker's until the taker gives it back, after the last read of it that the program has. One that is never
given back (a step failed, a forward had no backward) is ordinary memory, freed with the last tensor on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch


class Buffers:
    """The buffers of one operator on one rank; they live as long as it does.

    Attributes:
        bytes: memory of all buffers that were ever made.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
        self.bytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous tensor of any values; it is the caller's until the caller gives it back."""
        free = self._free.get((prod(shape), dtype, device))
        if free:
            return free.pop().view(*shape)
        block = torch.empty(prod(shape), dtype=dtype, device=device)
        self.bytes += block.nbytes
        return block.view(*shape)

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take back tensors that ``take`` gave: nobody reads them, or views of them, any more."""
        for tensor in tensors:
            free = self._free.setdefault((tensor.numel(), tensor.dtype, tensor.device), [])
            assert all(block.data_ptr() != tensor.data_ptr() for block in free if tensor.numel()), (
                "buffer released twice"
            )
            free.append(tensor.detach().view(-1))

    def dense(self, view: torch.Tensor) -> torch.Tensor:
        """Return the values of a view in one run of memory: the view itself where it is one, else a taken buffer."""
        return view if view.is_contiguous() else self.take(view.shape, view.dtype, view.device).copy_(view)
