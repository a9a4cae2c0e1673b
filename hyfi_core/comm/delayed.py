"""A communicator on which messages take longer than they do: for tests and benchmarks of what hides latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, sleep

import torch

from hyfi_core.comm.base import Communicator, ForwardingCommunicator, Message, Pending, ReduceOp


@dataclass
class Latency:
    """How late messages are, and what that cost one rank.

    Attributes:
        seconds: for which a message is under way at least.
        injected_s: latency of everything late that this rank has waited for, together.
        visible_s: how much of it the rank spent waiting, with nothing left to wait for but the latency.
    """

    seconds: float
    injected_s: float = 0.0
    visible_s: float = 0.0

    def left_s(self, stamps: Sequence[torch.Tensor]) -> float:
        """Return for how long messages with these stamps are still on their way."""
        return max((float(stamp) for stamp in stamps), default=-math.inf) + self.seconds - perf_counter()

    def wait_out(self, stamps: Sequence[torch.Tensor]) -> None:
        """Wait until messages with these stamps are there, and count."""
        left_s = max(0.0, self.left_s(stamps))
        sleep(left_s)
        self.visible_s += left_s
        self.injected_s += self.seconds if stamps else 0.0


class DelayedCommunicator(ForwardingCommunicator):
    """Forwards all calls; a message of an exchange is there only some time after it was sent.

    A stamp of the sender's clock travels with each message, so all ranks must run on one machine.

    Args:
        comm: what carries the messages.
        latency: how late they are; shared with all groups that are split off.
        reductions: whether sums over ranks are as late, counted from when this rank gave its share.
    """

    def __init__(self, comm: Communicator, latency: Latency, reductions: bool = False) -> None:
        super().__init__(comm)
        self._latency = latency
        self._reductions = reductions

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start sends and receives, with stamps behind them."""
        now_s = perf_counter()
        stamps = [torch.tensor([now_s], dtype=torch.float64) for _ in sends]
        boxes = [torch.zeros(1, dtype=torch.float64) for _ in receives]
        pending = self._comm.exchange(
            [*sends, *(Message(m.peer, stamp, m.tag) for m, stamp in zip(sends, stamps, strict=True))],
            [*receives, *(Message(m.peer, box, m.tag) for m, box in zip(receives, boxes, strict=True))],
        )
        return _DelayedPending(self._latency, pending, boxes)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce, and take as long as is asked for."""
        if self._reductions:
            self.start_all_reduce(tensor, op).wait()
        else:
            self._comm.all_reduce(tensor, op)

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start a reduction."""
        stamps = [torch.tensor([perf_counter()], dtype=torch.float64)] if self._reductions else []
        pending = self._comm.start_all_reduce(tensor, op)
        return _DelayedPending(self._latency, pending, stamps) if stamps else pending

    def split(self, color: int | None, key: int = 0) -> DelayedCommunicator | None:
        """Return the group of all ranks that gave the same color; its messages are as late."""
        group = self._comm.split(color, key)
        return None if group is None else DelayedCommunicator(group, self._latency, self._reductions)


class _DelayedPending:
    """An exchange that is over when its messages have come and their latency has passed."""

    def __init__(self, latency: Latency, pending: Pending, stamps: list[torch.Tensor]) -> None:
        self._latency, self._pending, self._stamps = latency, pending, stamps
        self._waited = False

    @property
    def needs_polls(self) -> bool:
        return self._pending.needs_polls

    def test(self) -> bool:
        return self._pending.test() and self._latency.left_s(self._stamps) <= 0

    def wait(self) -> None:
        self._pending.wait()
        if not self._waited:
            self._latency.wait_out(self._stamps)
        self._waited = True
