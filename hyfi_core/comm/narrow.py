"""All-reduce of 16-bit floats sent as 16 bits: each rank adds one part of the tensor in float32 and rounds once.

    rank 0   [a0 b0]  ── b0 ──▶  rank 1      rank 0   a = a0 + a1  ── a ──▶  rank 1
    rank 1   [a1 b1]  ── a1 ──▶  rank 0      rank 1   b = b0 + b1  ── b ──▶  rank 0

The result is bitwise equal on all ranks. A rank sends 2 (P - 1) / P of the tensor, the minimum of an all-reduce;
libraries without support for the dtype would send float32, twice as much, or round at every hop.
"""

from __future__ import annotations

import torch

from hyfi_core.comm.base import Communicator, ForwardingCommunicator, Message, Pending, ReduceOp
from hyfi_core.comm.staged import StagedQueue, Stages
from hyfi_core.comm.wire import reduced

NARROW = (torch.bfloat16, torch.float16)


def narrow(comm: Communicator) -> Communicator:
    """Return ``comm`` with sums of 16-bit floats sent as 16 bits (collective over ``comm``)."""
    if comm.size == 1:
        return comm
    scatter, gather = comm.split(0, comm.rank), comm.split(0, comm.rank)
    assert scatter is not None and gather is not None
    return NarrowCommunicator(comm, scatter, gather)


class NarrowCommunicator(ForwardingCommunicator):
    """Forwards all calls to another communicator except sums of 16-bit floats.

    Args:
        comm: the group.
        scatter: the same ranks, for the first stage.
        gather: the same ranks, for the second.
    """

    def __init__(self, comm: Communicator, scatter: Communicator, gather: Communicator) -> None:
        super().__init__(comm)
        self._scatter, self._gather = scatter, gather
        self._queue = StagedQueue()

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start reducing in place; see the protocol."""
        if op != "sum" or tensor.dtype not in NARROW:
            return self._comm.start_all_reduce(tensor, op)
        return self._queue.start(self._stages(tensor))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place."""
        self.start_all_reduce(tensor, op).wait()

    def _stages(self, tensor: torch.Tensor) -> Stages:
        flat = tensor.reshape(-1)
        parts = list(flat.tensor_split(self.size))
        others = [peer for peer in range(self.size) if peer != self.rank]
        own = parts[self.rank]
        came = {peer: torch.empty_like(own) for peer in others}
        yield self._scatter.exchange(
            [Message(peer, parts[peer]) for peer in others if parts[peer].numel()],
            [Message(peer, box) for peer, box in came.items() if own.numel()],
        )
        total = reduced([came.get(rank, own) for rank in range(self.size)], "sum")
        yield self._gather.exchange(
            [Message(peer, total) for peer in others if own.numel()],
            [Message(peer, parts[peer]) for peer in others if parts[peer].numel()],
        )
        own.copy_(total)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
