"""Reductions in two levels: inside each node first, then between one rank of each node, then back.

    node A   0 ─┐                ┌─▶ 0
             1 ─┴─▶ 0 ══╗    ╔═▶ 0 ┴─▶ 1        every link between nodes carries a tensor once a node,
    node B   2 ─┐       ╠════╣                  not once a rank
             3 ─┴─▶ 2 ══╝    ╚═▶ 2 ┬─▶ 2
                                   └─▶ 3

All of it is under way at once for several tensors; each level takes them in the order in which they were started, so
that all ranks agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from hyfi_core.comm.base import Communicator, Message, Pending, ReduceOp


def two_level(comm: Communicator, nodes: Sequence[str]) -> Communicator:
    """Return ``comm`` with reductions in two levels where that saves something (collective over ``comm``).

    Args:
        comm: any group.
        nodes: the name of each rank's node, the same list on every rank.
    """
    if len(set(nodes)) == 1 or len(set(nodes)) == comm.size:
        return comm
    names = list(dict.fromkeys(nodes))
    inside = comm.split(names.index(nodes[comm.rank]), comm.rank)
    assert inside is not None
    across = comm.split(0 if inside.rank == 0 else None, comm.rank)
    return TwoLevelCommunicator(comm, inside, across)


class TwoLevelCommunicator:
    """Passes everything on to another communicator but reductions under way.

    Args:
        comm: the whole group.
        inside: the ranks of this node; its first is the node's leader.
        across: the leaders, None on other ranks.
    """

    def __init__(self, comm: Communicator, inside: Communicator, across: Communicator | None) -> None:
        self._comm, self._inside, self._across = comm, inside, across
        self._open: deque[_TwoLevelReduction] = deque()

    @property
    def rank(self) -> int:
        """This rank, counted in the group."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self._comm.size

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start reducing in place; see the protocol."""
        reduction = _TwoLevelReduction(self, tensor, op, self._inside.start_all_reduce(tensor, op))
        self._open.append(reduction)
        return reduction

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place."""
        self.start_all_reduce(tensor, op).wait()

    def advance(self, wait_for: _TwoLevelReduction | None = None) -> None:
        """Bring reductions further, in order; with ``wait_for`` until that one is done."""
        while self._open:
            first = self._open[0]
            if not first.advance(wait=wait_for is not None):
                return
            self._open.popleft()
            if first is wait_for:
                return

    def __getattr__(self, name: str) -> Any:
        """Everything else is passed on."""
        return getattr(self._comm, name)


class _TwoLevelReduction:
    """One reduction on its way through the levels."""

    needs_polls = True

    def __init__(self, owner: TwoLevelCommunicator, tensor: torch.Tensor, op: ReduceOp, inside: Pending) -> None:
        self._owner, self._tensor, self._op = owner, tensor, op
        self._pending = inside
        self._level = 0
        self.done = False

    def test(self) -> bool:
        if not self.done:
            self._owner.advance()
        return self.done

    def wait(self) -> None:
        if not self.done:
            self._owner.advance(self)

    def advance(self, wait: bool) -> bool:
        """Go through the levels as far as they are done; whether all are."""
        while not self.done:
            if wait:
                self._pending.wait()
            elif not self._pending.test():
                return False
            self._level += 1
            self.done = not self._start_level()
        return True

    def _start_level(self) -> bool:
        """Start the level that comes now; whether there is one."""
        inside, across = self._owner._inside, self._owner._across
        if self._level == 1 and across is not None:
            self._pending = across.start_all_reduce(self._tensor, self._op)
        elif self._level in (1, 2) and inside.size > 1 and (across is None) == (self._level == 1):
            if across is None:
                self._pending = inside.exchange([], [Message(0, self._tensor)])
            else:
                others = range(1, inside.size)
                self._pending = inside.exchange([Message(peer, self._tensor) for peer in others], [])
        else:
            return False
        return True
