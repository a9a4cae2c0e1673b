"""Reductions in two levels: inside each node first, then between one rank of each node, then back.

    node A   0 ─┐                ┌─▶ 0
             1 ─┴─▶ 0 ══╗    ╔═▶ 0 ┴─▶ 1        links between nodes carry a tensor once per node,
    node B   2 ─┐       ╠════╣                  not once per rank
             3 ─┴─▶ 2 ══╝    ╚═▶ 2 ┬─▶ 2
                                   └─▶ 3

Several tensors may be pending at once; every level has its own communicator (see ``comm.staged``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hyfi_core.comm.base import Communicator, ForwardingCommunicator, Message, Pending, ReduceOp
from hyfi_core.comm.narrow import narrow
from hyfi_core.comm.staged import StagedQueue, Stages


def two_level(comm: Communicator, nodes: Sequence[str], narrowed: bool = False) -> Communicator:
    """Return ``comm`` with reductions in two levels if that saves traffic (collective over ``comm``).

    Args:
        comm: any group.
        nodes: the name of each rank's node, the same list on every rank.
        narrowed: whether 16-bit floats are sent as 16 bits (``comm.narrow``) on every level.
    """
    if len(set(nodes)) == 1 or len(set(nodes)) == comm.size:
        return narrow(comm) if narrowed else comm
    node = list(dict.fromkeys(nodes)).index(nodes[comm.rank])
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
        self._queue = StagedQueue()

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start reducing in place; see the protocol."""
        return self._queue.start(self._stages(tensor, op))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place."""
        self.start_all_reduce(tensor, op).wait()

    def _stages(self, tensor: torch.Tensor, op: ReduceOp) -> Stages:
        yield self._inside.start_all_reduce(tensor, op)
        if self._across is None:
            yield self._back.exchange([], [Message(0, tensor)])
            return
        yield self._across.start_all_reduce(tensor, op)
        others = range(1, self._back.size)
        yield self._back.exchange([Message(peer, tensor) for peer in others], [])
