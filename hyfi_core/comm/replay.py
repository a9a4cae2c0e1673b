"""Recompute without repeating communication: what came from other ranks is kept, and played back.

    first run    exchange ──▶ peers        received ──▶ log
    second run   exchange ──▶ nobody       received ◀── log

Kept is only what was received (strips of halo, sums of statistics), in the order in which it was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyfi_core.comm.base import Completed, ForwardingCommunicator, Message, Pending, ReduceOp
from hyfi_core.comm.counted import KindCommunicator

Log = list[list[torch.Tensor]]


class RecordingCommunicator(ForwardingCommunicator):
    """Forwards all calls to another communicator and keeps copies of what is received.

    Args:
        comm: the other one.
        log: where to keep it, so that two communicators can share one log; None for a new one.

    Attributes:
        log: what was received, call by call; for ``ReplayingCommunicator``.
    """

    _comm: KindCommunicator

    def __init__(self, comm: KindCommunicator, log: Log | None = None) -> None:
        super().__init__(comm)
        self.log: Log = [] if log is None else log

    def of(self, kind: str) -> RecordingCommunicator:
        """Return the same ranks and the same log, with messages counted as ``kind``."""
        return RecordingCommunicator(self._comm.of(kind), self.log)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start sends and receives; what arrives is kept when it has."""
        return self._kept(self._comm.exchange(sends, receives), [message.tensor for message in receives])

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place; the result is kept."""
        self._comm.all_reduce(tensor, op)
        self.log.append([tensor.clone()])

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start reducing in place; the result is kept when it is there."""
        return self._kept(self._comm.start_all_reduce(tensor, op), [tensor])

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite ``tensor`` with the root's; it is kept."""
        self._comm.broadcast(tensor, root)
        self.log.append([tensor.clone()])

    def _kept(self, pending: Pending, tensors: list[torch.Tensor]) -> Pending:
        entry: list[torch.Tensor] = []
        self.log.append(entry)  # its place is that of the call, whenever it ends
        return _RecordedPending(pending, tensors, entry)


class _RecordedPending:
    """Communication under way whose results are copied when they are there."""

    def __init__(self, pending: Pending, tensors: list[torch.Tensor], entry: list[torch.Tensor]) -> None:
        self._pending, self._tensors, self._entry = pending, tensors, entry

    @property
    def needs_polls(self) -> bool:
        return self._pending.needs_polls

    def test(self) -> bool:
        done = self._pending.test()
        if done:
            self._keep()
        return done

    def wait(self) -> None:
        self._pending.wait()
        self._keep()

    def _keep(self) -> None:
        self._entry.extend(tensor.clone() for tensor in self._tensors)
        self._tensors = []


class ReplayingCommunicator:
    """Gives again what a ``RecordingCommunicator`` kept; nothing is sent.

    Args:
        log: of the first run; taken from its beginning, and emptied.
        rank: this rank, counted in the group.
        size: ranks in the group.
    """

    def __init__(self, log: Log, rank: int, size: int) -> None:
        self._log = log
        self.rank = rank
        self.size = size

    def of(self, kind: str) -> ReplayingCommunicator:
        """Return itself: nothing is sent that could be counted."""
        return self

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Fill the receives with what came the first time."""
        return self._filled([message.tensor for message in receives])

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Overwrite ``tensor`` with the first time's result."""
        self._filled([tensor])

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Overwrite ``tensor`` with the first time's result."""
        return self._filled([tensor])

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite ``tensor`` with the first time's."""
        self._filled([tensor])

    def _filled(self, tensors: list[torch.Tensor]) -> Pending:
        for tensor, kept in zip(tensors, self._log.pop(0), strict=True):
            tensor.copy_(kept)
        return Completed()

    def __getattr__(self, name: str) -> Any:
        """Nothing else is part of a forward."""
        raise AttributeError(f"{name} cannot be replayed: no forward of a stage calls it")
