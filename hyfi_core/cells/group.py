"""The group of cells: state that the cells of one process share, by which their messages and collective calls meet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hyfi_core.cells.baton import Baton
from hyfi_core.comm.base import Communicator, Completed, Pending, ReduceOp, Tensors


@dataclass
class CollectiveOfCells:
    """One collective call of a group.

    Attributes:
        inputs: rank of a cell of this process -> its input.
        result: set by the last of these cells.
        pending: the part of the call between processes.
        taken: number of cells that have the result.
        computed: what is computed from the result, once for all cells; None before.
    """

    inputs: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    pending: Pending = field(default_factory=Completed)
    taken: int = 0
    computed: Tensors | None = None

    @property
    def ordered(self) -> list[Any]:
        """The inputs in rank order, whichever cell came last: sums are then rounded alike in every run."""
        return [self.inputs[rank] for rank in sorted(self.inputs)]


class CellGroup:
    """State of a group that the cells of one process share.

    Args:
        comm: the processes of the group.
        baton: baton of this process's cells.
        members: (process, cell) of every rank of the group, in order.
        spills: whether maps of cells may be moved out of memory.
    """

    def __init__(
        self, comm: Communicator, baton: Baton, members: Sequence[tuple[int, int]], spills: bool = False
    ) -> None:
        self.comm, self.baton, self.members, self.spills = comm, baton, tuple(members), spills
        self.here = [rank for rank, (process, _) in enumerate(self.members) if process == comm.rank]  # of this process
        # Messages between cells of this process. (sender, receiver, tag) -> copies not yet received; (sender, receiver)
        # -> tensors that the receiver reads in place, each with its version: has the sender changed it too early?
        self.copies: dict[tuple[int, int, int], deque[torch.Tensor]] = {}
        self.shown: dict[tuple[int, int], deque[tuple[torch.Tensor, int | None]]] = {}
        self._calls: dict[int, CollectiveOfCells] = {}
        # Cell -> number of calls that it has entered. Cells reach a call at different times: the number says to which
        # call a value belongs.
        self._entered = dict.fromkeys(self.here, 0)
        baton.groups.add(self)

    def clear(self) -> None:
        """Remove unfinished messages and calls: the next run would take them for its own."""
        for unfinished in (self.copies, self.shown, self._calls):
            unfinished.clear()
        self._entered = dict.fromkeys(self.here, 0)

    def enter(self, rank: int) -> int:
        """Return the number of the next collective call of a cell."""
        self._entered[rank] += 1
        return self._entered[rank]

    def call(self, number: int, rank: int, value: Any, last: Callable[[CollectiveOfCells], None]) -> CollectiveOfCells:
        """Add a cell's value to a collective call; the last cell of this process runs ``last``."""
        call = self._calls.setdefault(number, CollectiveOfCells())
        call.inputs[rank] = value
        # The last cell runs it, with all inputs: messages to other processes are sent once for all cells.
        if len(call.inputs) == len(self.here):
            last(call)
        return call

    def finished(self, call: CollectiveOfCells) -> bool:
        """Whether all cells have entered a call and its communication with other processes has completed."""
        if len(call.inputs) < len(self.here):
            return False
        if not call.pending.test():
            self.baton.note_outside()
            return False
        return True

    def leave(self, number: int, call: CollectiveOfCells) -> Any:
        """Return a call's result to a cell; the last cell removes the call."""
        call.taken += 1
        if call.taken == len(self.here):
            del self._calls[number]
        return call.result

    def start_sum(self, call: CollectiveOfCells, total: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Set a call's result to ``total``, the sum of this process's cells, and start reducing it over processes."""
        call.result = total
        if self.comm.size > 1:
            call.pending = self.comm.start_all_reduce(total, op)
