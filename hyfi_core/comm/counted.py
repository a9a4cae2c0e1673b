"""A communicator that counts what it sends and how long it waits, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Protocol

import torch

from hyfi_core.comm.base import Communicator, Message, Pending, ReduceOp

KINDS = ("halo", "stage", "reduce", "input")


class _Timed:
    """Communication under way whose waiting is booked on its kind."""

    __slots__ = ("_kind", "_pending", "_seconds")

    def __init__(self, pending: Pending, seconds: dict[str, float], kind: str) -> None:
        self._pending, self._seconds, self._kind = pending, seconds, kind

    @property
    def needs_polls(self) -> bool:
        return self._pending.needs_polls

    def test(self) -> bool:
        return self._pending.test()

    def wait(self) -> None:
        start_s = perf_counter()
        self._pending.wait()
        self._seconds[self._kind] += perf_counter() - start_s


class KindCommunicator(Communicator, Protocol):
    """A communicator that is told what kind of traffic comes next."""

    kind: str


class CountedCommunicator:
    """Passes everything on to another communicator and adds up messages and bytes under the current ``kind``.

    Attributes:
        kind: what the next calls are counted as.
        seconds: by kind, what starting and waiting for messages took since the last reset: time in which this rank did
            not compute. Two readings of a clock for each call.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.kind = "halo"
        self.reset()

    def reset(self) -> None:
        """Start counting anew."""
        self._counts = {kind: {"messages": 0, "bytes": 0} for kind in KINDS}
        self.seconds = dict.fromkeys(KINDS, 0.0)

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return what this rank sent since the last reset."""
        return {kind: dict(counts) for kind, counts in self._counts.items()}

    def count(self, kind: str, messages: int, sent_bytes: int) -> None:
        """Add to the count of one kind."""
        self._counts[kind]["messages"] += messages
        self._counts[kind]["bytes"] += sent_bytes

    @property
    def rank(self) -> int:
        """This rank, counted in the group."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self._comm.size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start sends and receives; sends count."""
        self.count(self.kind, len(sends), sum(m.tensor.numel() * m.tensor.element_size() for m in sends))
        start_s = perf_counter()
        pending = self._comm.exchange(sends, receives)
        self.seconds[self.kind] += perf_counter() - start_s
        return _Timed(pending, self.seconds, self.kind)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place; counts as one message of the tensor's bytes."""
        self._count_reduction(tensor)
        start_s = perf_counter()
        self._comm.all_reduce(tensor, op)
        self.seconds[self.kind] += perf_counter() - start_s

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start reducing in place; counts as one message of the tensor's bytes."""
        self._count_reduction(tensor)
        return _Timed(self._comm.start_all_reduce(tensor, op), self.seconds, self.kind)

    def _count_reduction(self, tensor: torch.Tensor) -> None:
        if self._comm.size > 1:
            self.count(self.kind, 1, tensor.numel() * tensor.element_size())

    def __getattr__(self, name: str) -> Any:
        """Everything else is passed on uncounted."""
        return getattr(self._comm, name)
