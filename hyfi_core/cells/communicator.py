"""Cells as ranks: the communicator of a group whose ranks are the cells of all processes.

Messages between cells of one process are copies; messages to cells of other processes, and the last step of every
reduction, use the process's communicator. For the order of execution see ``cells.lockstep``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyfi_core.cells.baton import Baton
from hyfi_core.cells.group import CellGroup, CollectiveOfCells
from hyfi_core.comm.base import Communicator, Completed, Message, Pending, ReduceOp, Tensors, version_of
from hyfi_core.comm.combined import Combination, Combined
from hyfi_core.comm.wire import reduced


class _Exchange:
    """Pending sends and receives of one cell."""

    needs_polls = False

    def __init__(
        self, group: CellGroup, rank: int, receives: list[Message], outside: Pending, leaving: Sequence[torch.Tensor]
    ) -> None:
        self._group, self._rank, self._receives, self._outside = group, rank, receives, outside
        self._leaving = leaving  # alive until they have been sent

    def test(self) -> bool:
        """Take the messages that have arrived; return whether all have been sent and received.

        Those of cells of this process wait in queues of the group; other processes' are received by ``_outside``.
        """
        missing = []
        for message in self._receives:
            queue = self._group.copies.get((message.peer, self._rank, message.tag))
            if not queue:
                missing.append(message)
            elif message.moves:
                # The receiver takes over the copy's memory; the object stays, because its owner refers to it.
                message.tensor.data = queue.popleft()
            else:
                message.tensor.copy_(queue.popleft())
        self._receives = missing
        # Tested even while messages of this process's cells are missing, because a test makes messages progress.
        if not self._outside.test():
            # Without this note, the baton would report a deadlock when all cells wait.
            self._group.baton.note_outside()
            return False
        return not missing

    def wait(self) -> None:
        self._group.baton.wait(self.test)


class _Swap:
    """Tensors of other cells of this process, by reference.

    Args:
        group: shared by the cells of the process.
        pairs: (sender, receiver) of each tensor: cells, as ranks of the group.
    """

    needs_polls = False

    def __init__(self, group: CellGroup, pairs: Sequence[tuple[int, int]]) -> None:
        self._group, self._pairs = group, pairs

    def test(self) -> bool:
        return all(self._group.shown.get(pair) for pair in self._pairs)

    def wait(self) -> None:
        self._group.baton.wait(self.test)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors, once all have been sent; call it once.

        Raises:
            RuntimeError: a tensor was changed before all cells had read it.
        """
        return tuple(self._read(sender, receiver) for sender, receiver in self._pairs)

    def _read(self, sender: int, receiver: int) -> torch.Tensor:
        """Return the sender's own tensor, the oldest that the receiver has not read.

        Raises:
            RuntimeError: the sender has changed it since it sent it.
        """
        tensor, version = self._group.shown[sender, receiver].popleft()
        if version_of(tensor) != version:
            raise RuntimeError(
                f"cell {sender} changed a tensor of shape {tuple(tensor.shape)} before another cell had read it"
            )
        return tensor


class _JoinedCall:
    """A pending collective call; ``last`` is called when the last cell of this process has entered it.

    Attributes:
        call: shared by the cells of the process.
    """

    needs_polls = False

    def __init__(self, comm: CellCommunicator, value: Any, last: Callable[[CollectiveOfCells], None]) -> None:
        self._group = comm.group
        self._open = True
        self._number, self.call = comm.enter_call(value, last)

    def test(self) -> bool:
        """Whether the call's result has arrived; the first time that it has, pass it to ``_land``."""
        if self._open and not self._group.finished(self.call):
            return False
        if self._open:
            # ``leave`` counts the cells that have their result, so it is called once, however often ``test`` is.
            self._land(self._group.leave(self._number, self.call))
            self._open = False
        return True

    def wait(self) -> None:
        self._group.baton.wait(self.test)

    def _land(self, result: Any) -> None:
        """Called with the result, once."""


class _Reduction(_JoinedCall):
    """A pending reduction in place."""

    def __init__(self, comm: CellCommunicator, tensor: torch.Tensor, op: ReduceOp) -> None:
        self._tensor = tensor
        super().__init__(comm, tensor.detach(), lambda call: comm.group.start_sum(call, reduced(call.ordered, op), op))

    def _land(self, result: Any) -> None:
        self._tensor.copy_(result)


class CellCommunicator:
    """One cell's view of a group whose ranks are cells.

    Args:
        group: state that the cells of this process share.
        cell: index of this cell in the process.

    Attributes:
        group: shared by the cells of the process.
    """

    def __init__(self, group: CellGroup, cell: int) -> None:
        self.group = group
        self._cell = cell
        self._rank = group.members.index((group.comm.rank, cell))

    @property
    def rank(self) -> int:
        """Rank of this cell in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of cells in the group, in all processes."""
        return len(self.group.members)

    @property
    def in_order(self) -> bool:
        """Whether operations run in the order in which they start: those of several processes may, cells do not."""
        return self.group.comm.in_order and self.group.comm.size > 1

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start sends and receives; messages to cells of this process are copied at once.

        Messages need not be contiguous.
        """
        group = self.group
        process_rank, cells = group.comm.rank, group.baton.size
        # Sends to other processes, receives from other processes, receives from cells of this process.
        leaving, arriving, near = [], [], []
        for message in sends:
            process, cell = group.members[message.peer]
            if process == process_rank:
                queue = group.copies.setdefault((self._rank, message.peer, message.tag), deque())
                # A copy: the sender may overwrite its tensor before the receiver has its turn.
                queue.append(message.tensor.detach().clone(memory_format=torch.contiguous_format))
            else:
                dense = message.tensor.contiguous()
                leaving.append(Message(process, dense, tag_of_cells(self._cell, cell, cells, message.tag)))
        for message in receives:
            process, cell = group.members[message.peer]
            if process == process_rank:
                near.append(message)
            else:
                arriving.append(Message(process, message.tensor, tag_of_cells(cell, self._cell, cells, message.tag)))
        outside = group.comm.exchange(leaving, arriving) if leaving or arriving else Completed()
        return _Exchange(group, self._rank, near, outside, [message.tensor for message in leaving])

    def swap(self, sends: Sequence[Message], peers: Sequence[int]) -> _Swap:
        """Start exchanging tensors with cells of this process by reference, without copies.

        Returns:
            The pending exchange, whose ``tensors`` then returns those of ``peers``.

        Raises:
            RuntimeError: a peer is a cell of another process.
        """
        group = self.group
        if any(group.members[peer][0] != group.comm.rank for peer in (*peers, *(m.peer for m in sends))):
            raise RuntimeError("cells of different processes share no memory")
        for message in sends:
            # Nothing is copied, so the reader checks by the version that the tensor is still the one that was sent.
            shown = (message.tensor, version_of(message.tensor))
            group.shown.setdefault((self._rank, message.peer), deque()).append(shown)
        return _Swap(group, [(peer, self._rank) for peer in peers])

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place; bitwise equal in every cell."""
        self.start_all_reduce(tensor, op).wait()

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start reducing in place; cells of one process are added first, in rank order."""
        return _Reduction(self, tensor, op)

    def start_combined(self, own: Callable[[], Any], combination: Combination, kept: bool) -> Combined:
        """Start combining values of all ranks; packing and combining happen once for all cells of a process.

        Args:
            own: returns the value of this cell.
            combination: packs values of cells into a tensor, and computes the result from the sum of these tensors.
            kept: whether the result is used again after the next wait.
        """
        group, copies = self.group, kept and self.group.spills
        pending = _JoinedCall(self, own(), lambda call: group.start_sum(call, combination.pack(call.inputs)))
        call = pending.call

        def result() -> Tensors:
            if call.computed is None:
                call.computed = combination.combine(call.result)
            # A copy for each cell that keeps the result: of a shared one, the pager could spill the memory before the
            # next cell reads it.
            return tuple(tensor.clone() for tensor in call.computed) if copies else call.computed

        return Combined(pending, result)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite ``tensor`` with the root's."""
        process, _ = self.group.members[root]

        def last(call: CollectiveOfCells) -> None:
            # Any cell may enter last. In a process without the root, the result is received into new memory.
            call.result = call.inputs[root] if root in call.inputs else torch.empty_like(tensor)
            self.group.comm.broadcast(call.result, process)

        arrived = self._together(tensor.detach().clone() if self._rank == root else None, last)
        if self._rank != root:
            tensor.copy_(arrived)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's value."""
        process, _ = self.group.members[root]

        def last(call: CollectiveOfCells) -> None:
            call.result = self.group.comm.broadcast_object(call.inputs.get(root), process)

        return self._together(value, last)

    def gather_objects(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return all cells' values in rank order on the root, None elsewhere."""
        values = self._all_objects(value)
        return values if self._rank == root else None

    def barrier(self) -> None:
        """Return when every cell of the group has entered the call."""
        self._together(None, lambda call: self.group.comm.barrier())

    def split(self, color: int | None, key: int = 0) -> CellCommunicator | None:
        """Return the group of all cells with the same ``color``, ordered by ``key``; None for the color None.

        All cells of a process have one color.
        """
        cells = self._all_objects([color, key, self._rank])
        if len({c for c, _, rank in cells if rank in self.group.here}) > 1:
            raise AssertionError("cells of one process must be in the same group")
        # A process has one place in the new communicator: that of its first cell.
        process_key = min(k for _, k, rank in cells if rank in self.group.here)
        same_color = sorted((k, rank) for c, k, rank in cells if c == color)

        def last(call: CollectiveOfCells) -> None:
            """Make the new group that the cells of this process share: split the processes, then list its cells.

            ``same_color``: (key, rank) of the cells in the new group, in its order.
            """
            comm = self.group.comm.split(color, process_key)
            if comm is None:
                return
            # A process's rank in the new communicator may differ from that in the old one.
            processes = comm.broadcast_object(comm.gather_objects(self.group.comm.rank))
            new_number = {process: number for number, process in enumerate(processes)}
            members = [self.group.members[rank] for _, rank in same_color]
            renumbered = [(new_number[process], cell) for process, cell in members]
            call.result = CellGroup(comm, self.group.baton, renumbered, self.group.spills)

        group = self._together(None, last)
        return None if group is None else CellCommunicator(group, self._cell)

    def subgroup(self, members: Sequence[int]) -> CellCommunicator | None:
        """Return the group of ``members``, in their order; cells of one process must be in the same one."""
        if not members:
            return self.split(None)
        return self.split(members[0], members.index(self._rank))

    def enter_call(self, value: Any, last: Callable[[CollectiveOfCells], None]) -> tuple[int, CollectiveOfCells]:
        """Enter the group's next collective call; return its number and the call.

        Args:
            value: value of this cell.
            last: called by the last cell of this process that enters the call, with the values of all its cells; sets
                the result.
        """
        number = self.group.enter(self._rank)
        return number, self.group.call(number, self._rank, value, last)

    def _together(self, value: Any, last: Callable[[CollectiveOfCells], None]) -> Any:
        """Return the result of the group's next collective call, when all cells have entered it; see ``enter_call``."""
        number, call = self.enter_call(value, last)
        self.group.baton.wait(lambda: self.group.finished(call))
        return self.group.leave(number, call)

    def _all_objects(self, value: Any) -> list[Any]:
        """Return the objects of all cells of all processes, by rank (collective)."""

        def last(call: CollectiveOfCells) -> None:
            comm = self.group.comm
            own = [[rank, call.inputs[rank]] for rank in self.group.here]
            by_process = comm.broadcast_object(comm.gather_objects(own))
            # Sorted by rank, because the cells of a process need not have consecutive ranks.
            pairs = sorted((pair for of_process in by_process for pair in of_process), key=lambda pair: pair[0])
            call.result = [item for _, item in pairs]

        values: list[Any] = self._together(value, last)
        return values

    def __getattr__(self, name: str) -> Any:
        """Refuse all other calls: a step does not need them."""
        raise AttributeError(f"cells have no {name}: no step calls it")


def tag_of_cells(source: int, target: int, cells: int, tag: int = 0) -> int:
    """Return a tag for messages between two cells of two processes that no other pair of cells has.

    Args:
        source: the cell that sends.
        target: the cell that receives.
        cells: number of cells of each process.
        tag: tag of the message between the cells.
    """
    return (tag * cells + source) * cells + target


def cell_communicators(
    comm: Communicator, baton: Baton, members: Sequence[tuple[int, int]], spills: bool = False
) -> list[CellCommunicator]:
    """Return the communicator of each cell of this process in the group of all cells.

    Args:
        comm: communicator of the processes.
        baton: baton of this process's cells.
        members: (process, cell) of every rank of the group, in order.
        spills: whether maps of cells may be spilled.
    """
    group = CellGroup(comm, baton, members, spills)
    return [CellCommunicator(group, cell) for cell in range(baton.size)]
