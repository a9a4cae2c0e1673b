"""Reductions in two levels: inside each node first, then between one rank of each node, then back.

    node A   0 ─┐                ┌─▶ 0
             1 ─┴─▶ 0 ══╗    ╔═▶ 0 ┴─▶ 1        links between nodes carry a tensor once per node,
    node B   2 ─┐       ╠════╣                  not once per rank
             3 ─┴─▶ 2 ══╝    ╚═▶ 2 ┬─▶ 2
                                   └─▶ 3

Several tensors may be pending at once; every level has its own communicator (see ``comm.phased``).

Sums of 16-bit floats can be sent as 16 bits: each rank adds one part of the tensor in float32 and rounds it once.

    rank 0   [a0 b0]  ── b0 ──▶  rank 1      rank 0   a = a0 + a1  ── a ──▶  rank 1
    rank 1   [a1 b1]  ── a1 ──▶  rank 0      rank 1   b = b0 + b1  ── b ──▶  rank 0

The result is bitwise equal on all ranks. A rank sends 2 (P - 1) / P of the tensor, the minimum of an all-reduce;
libraries without support for the dtype would send float32, twice as much, or round at every hop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyfi_core.comm.base import Communicator, ForwardingCommunicator, Message, Pending, ReduceOp
from hyfi_core.comm.phased import PhasedQueue, Phases
from hyfi_core.comm.wire import reduced

NARROW = (torch.bfloat16, torch.float16)


def two_level(comm: Communicator, nodes: Sequence[str], narrowed: bool = False) -> Communicator:
    """Return ``comm`` with reductions in two levels if that saves traffic (collective over ``comm``).

    Args:
        comm: any group.
        nodes: the name of each rank's node, the same list on every rank.
        narrowed: whether 16-bit floats are sent as 16 bits (see ``narrow``) on every level.
    """
    if len(set(nodes)) == 1 or len(set(nodes)) == comm.size:
        return narrow(comm) if narrowed else comm
    node = list(dict.fromkeys(nodes)).index(nodes[comm.rank])
    # Two groups of the same ranks: in one, the broadcast of a tensor could be paired with the reduction of another.
    inside, back = comm.split(node, comm.rank), comm.split(node, comm.rank)
    assert inside is not None and back is not None
    across = comm.split(0 if inside.rank == 0 else None, comm.rank)
    if narrowed:
        inside, across = narrow(inside), None if across is None else narrow(across)
    return TwoLevelCommunicator(comm, inside, across, back)


class TwoLevelCommunicator(ForwardingCommunicator):
    """Forwards all calls to another communicator except reductions.

    Args:
        comm: the whole group.
        inside: the ranks of this node; its first is the node's leader.
        across: the leaders, None on other ranks.
        back: the ranks of this node again, for the leader's broadcast.
    """

    def __init__(
        self, comm: Communicator, inside: Communicator, across: Communicator | None, back: Communicator
    ) -> None:
        super().__init__(comm)
        self._inside, self._across, self._back = inside, across, back
        self._queue = PhasedQueue()

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start reducing in place; see the protocol."""
        return self._queue.start(self._phases(tensor, op))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place."""
        self.start_all_reduce(tensor, op).wait()

    def _phases(self, tensor: torch.Tensor, op: ReduceOp) -> Phases:
        """Yield the operations of a reduction, which replaces ``tensor``: inside the node, across nodes, and back."""
        yield self._inside.start_all_reduce(tensor, op)
        if self._across is None:
            yield self._back.exchange([], [Message(0, tensor)])
            return
        # Only leaders come here: the other ranks of the node wait for the leader's message that follows.
        yield self._across.start_all_reduce(tensor, op)
        peers = range(1, self._back.size)
        yield self._back.exchange([Message(peer, tensor) for peer in peers], [])


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
        scatter: the same ranks, for the first phase.
        gather: the same ranks, for the second.
    """

    def __init__(self, comm: Communicator, scatter: Communicator, gather: Communicator) -> None:
        super().__init__(comm)
        self._scatter, self._gather = scatter, gather
        self._queue = PhasedQueue()

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start reducing in place; see the protocol."""
        if op != "sum" or tensor.dtype not in NARROW:
            return self._comm.start_all_reduce(tensor, op)
        return self._queue.start(self._phases(tensor))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place."""
        self.start_all_reduce(tensor, op).wait()

    def _phases(self, tensor: torch.Tensor) -> Phases:
        """Yield the exchanges of a sum, which replaces ``tensor``: each rank adds one part and sends it to all."""
        flat = tensor.reshape(-1)
        # Some parts are empty if there are more ranks than numbers; for these no message is sent.
        parts = list(flat.tensor_split(self.size))
        peers = [peer for peer in range(self.size) if peer != self.rank]
        own = parts[self.rank]
        # One tensor for each peer, all added at the end: added as they arrive, they would be rounded in another order.
        received = {peer: torch.empty_like(own) for peer in peers}
        yield self._scatter.exchange(
            [Message(peer, parts[peer]) for peer in peers if parts[peer].numel()],
            [Message(peer, tensor) for peer, tensor in received.items() if own.numel()],
        )
        # Only one rank adds a part, in rank order: all ranks get bitwise the same sum.
        total = reduced([received.get(rank, own) for rank in range(self.size)], "sum")
        yield self._gather.exchange(
            [Message(peer, total) for peer in peers if own.numel()],
            [Message(peer, parts[peer]) for peer in peers if parts[peer].numel()],
        )
        own.copy_(total)
        # Of a tensor with gaps, ``reshape`` has made a copy.
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))
