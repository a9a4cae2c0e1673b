"""A communicator that counts what it sends, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyfi_core.comm.base import Communicator, Message, Pending, ReduceOp

KINDS = ("halo", "stage", "reduce", "input")


class CountedCommunicator:
    """Passes everything on to another communicator and adds up messages and bytes under the current ``kind``.

    Attributes:
        kind: what the next calls are counted as.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.kind = "halo"
        self.reset()

    def reset(self) -> None:
        """Start counting anew."""
        self._counts = {kind: {"messages": 0, "bytes": 0} for kind in KINDS}

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
        return self._comm.exchange(sends, receives)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place; counts as one message of the tensor's bytes."""
        self._count_reduction(tensor)
        self._comm.all_reduce(tensor, op)

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start reducing in place; counts as one message of the tensor's bytes."""
        self._count_reduction(tensor)
        return self._comm.start_all_reduce(tensor, op)

    def _count_reduction(self, tensor: torch.Tensor) -> None:
        if self._comm.size > 1:
            self.count(self.kind, 1, tensor.numel() * tensor.element_size())

    def __getattr__(self, name: str) -> Any:
        """Everything else is passed on uncounted."""
        return getattr(self._comm, name)
