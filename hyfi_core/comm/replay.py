"""Recomputation without repeated communication: received tensors are kept and replayed.

    first run    exchange ──▶ peers        received ──▶ log        moments ─▶ sum ─▶ statistics ──▶ log
    second run   exchange (not sent)       received ◀── log                          statistics ◀── log

Kept are, in the order of the calls, received tensors (halo strips, sums) and combined values (statistics). The second
run does not compute what a rank contributes to a combination, because the combined values are known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyfi_core.comm.base import Completed, ForwardingCommunicator, Message, Pending, ReduceOp, Tensors
from hyfi_core.comm.combined import Combination, Combined, start_combined
from hyfi_core.comm.counted import KindCommunicator

Log = list[list[torch.Tensor]]


class RecordingCommunicator(ForwardingCommunicator):
    """Forwards all calls to another communicator and keeps copies of received tensors.

    Args:
        comm: the other communicator.
        log: an existing log to share; None for a new one.
        copies: whether the log gets copies of combined values: a pager may spill those that the forward uses.

    Attributes:
        log: received tensors, call by call; for ``ReplayingCommunicator``.
    """

    _comm: KindCommunicator

    def __init__(self, comm: KindCommunicator, log: Log | None = None, copies: bool = False) -> None:
        super().__init__(comm)
        self.log: Log = [] if log is None else log
        self._copies = copies

    def of(self, kind: str) -> RecordingCommunicator:
        """Return the same ranks and the same log, with traffic counted as ``kind``."""
        return RecordingCommunicator(self._comm.of(kind), self.log, self._copies)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start sends and receives; received tensors are kept."""
        return self._kept(self._comm.exchange(sends, receives), [message.tensor for message in receives])

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place; the result is kept."""
        self._comm.all_reduce(tensor, op)
        self.log.append([tensor.clone()])

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start reducing in place; the result is kept."""
        return self._kept(self._comm.start_all_reduce(tensor, op), [tensor])

    def start_combined(self, own: Callable[[], Any], combination: Combination, kept: bool) -> Combined:
        """Start combining what ranks contribute; the results are logged, so that a second run need not combine again.

        Args:
            own: returns what this rank contributes.
            combination: the same on all ranks.
            kept: whether the results are used again after the next wait.
        """
        combined = start_combined(self._comm, own, combination, kept)
        entry: list[torch.Tensor] = []
        self.log.append(entry)

        def result() -> Tensors:
            values = combined.result()
            # Combined values are never changed, so the log may share them unless a pager may spill them.
            entry[:] = (value.clone() for value in values) if self._copies else values
            return values

        return Combined(combined.pending, result)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite ``tensor`` with the root's; it is kept."""
        self._comm.broadcast(tensor, root)
        self.log.append([tensor.clone()])

    def _kept(self, pending: Pending, tensors: list[torch.Tensor]) -> Pending:
        entry: list[torch.Tensor] = []
        self.log.append(entry)  # in the order of calls, not of completion
        return _RecordedPending(pending, tensors, entry)


class _RecordedPending:
    """Pending communication whose results are logged on completion."""

    def __init__(self, pending: Pending, received: list[torch.Tensor], entry: list[torch.Tensor]) -> None:
        self._pending, self._received, self._entry = pending, received, entry
        self._open = True

    @property
    def needs_polls(self) -> bool:
        return self._pending.needs_polls

    def test(self) -> bool:
        is_over = self._pending.test()
        if is_over:
            self._keep()
        return is_over

    def wait(self) -> None:
        self._pending.wait()
        self._keep()

    def _keep(self) -> None:
        # Only the first time: a later ``test`` or ``wait`` may find other contents in the same memory.
        if self._open:
            self._entry.extend(tensor.clone() for tensor in self._received)
            self._open = False


class ReplayingCommunicator:
    """Replays the log of a ``RecordingCommunicator``; nothing is sent.

    Args:
        log: recorded in the first run; entries are removed from its beginning.
        rank: this rank in the group.
        size: number of ranks in the group.
    """

    def __init__(self, log: Log, rank: int, size: int) -> None:
        self._log = log
        self.rank = rank
        self.size = size

    def of(self, kind: str) -> ReplayingCommunicator:
        """Return itself: nothing is sent, so nothing is counted."""
        return self

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Fill the receives with the tensors of the first run."""
        return self._filled([message.tensor for message in receives])

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Overwrite ``tensor`` with the result of the first run."""
        self._filled([tensor])

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Overwrite ``tensor`` with the result of the first run."""
        return self._filled([tensor])

    def start_combined(self, own: Callable[[], Any], combination: Combination, kept: bool) -> Combined:
        """Return the values of the first run."""
        values = tuple(self._log.pop(0))
        return Combined(Completed(), lambda: values)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite ``tensor`` with that of the first run."""
        self._filled([tensor])

    def _filled(self, tensors: list[torch.Tensor]) -> Pending:
        for tensor, recorded in zip(tensors, self._log.pop(0), strict=True):
            tensor.copy_(recorded)
        return Completed()

    def __getattr__(self, name: str) -> Any:
        """Refuse all other calls: the forward of a stage does not make them."""
        raise AttributeError(f"{name} cannot be replayed: no forward of a stage calls it")
