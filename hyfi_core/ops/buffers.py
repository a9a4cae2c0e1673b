"""Persistent message buffers: after the first step, messages allocate no memory of a CPU.

    send       take ▒▒▒▒   copy, send, wait           give back
    receive    take ▒▒▒▒   arrives, copied or added   give back
    saved      take ▒▒▒▒   arrives, saved             … backward has read it: give back

The caller of ``take`` owns a buffer until it calls ``give_back``, after its last read. A buffer that is never given
back (a step failed, a forward had no backward) is ordinary memory, freed with the last tensor on it.

New memory of a CPU is slow: the system maps its pages at the first write. On a GPU, PyTorch's allocator keeps freed
memory for whatever needs some next, so buffers are allocated there and freed: kept, they took 24 GB between the steps
of a ResNet-50 at 16384 x 16384.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch


def is_kept(device: torch.device) -> bool:
    """Whether buffers on a device are kept for the next message."""
    return device.type == "cpu"


class Buffers:
    """The buffers of one operator on one rank, which live as long as the operator.

    Attributes:
        bytes: memory of all buffers created so far on devices where they are kept.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}
        self.bytes = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous uninitialised tensor; the caller owns it until ``give_back``."""
        if not is_kept(device):
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        # By the number of elements: messages of other shapes share memory.
        free = self._free.get((prod(shape), dtype, device))
        if free:
            return free.pop().view(*shape)
        block = torch.empty(prod(shape), dtype=dtype, device=device)
        self.bytes += block.nbytes
        return block.view(*shape)

    def give_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Release tensors of ``take``; they and their views must no longer be read."""
        for tensor in tensors:
            if not is_kept(tensor.device):
                continue
            free = self._free.setdefault((tensor.numel(), tensor.dtype, tensor.device), [])
            # Empty tensors all have the address 0.
            assert all(block.data_ptr() != tensor.data_ptr() for block in free if tensor.numel()), (
                "buffer released twice"
            )
            # Detached: an autograd graph would live as long as the buffer.
            free.append(tensor.detach().view(-1))

    def dense(self, view: torch.Tensor) -> torch.Tensor:
        """Return the values of a view in contiguous memory: the view itself if it is contiguous, else a buffer."""
        return view if view.is_contiguous() else self.take(view.shape, view.dtype, view.device).copy_(view)
