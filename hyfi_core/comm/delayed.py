"""A communicator with added latency, for tests and benchmarks of latency hiding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, sleep

import torch

from hyfi_core.comm.base import Communicator, ForwardingCommunicator, Message, Pending, ReduceOp


@dataclass
class Latency:
    """Added latency, and its cost on one rank.

    Attributes:
        seconds: smallest time from send to receive.
        injected_s: total added latency of messages that this rank has waited for.
        visible_s: the part of it in which the rank was idle.
    """

    seconds: float
    injected_s: float = 0.0
    visible_s: float = 0.0

    def left_s(self, stamps: Sequence[torch.Tensor]) -> float:
        """Return the remaining latency of messages with these stamps."""
        return max((float(stamp) for stamp in stamps), default=-math.inf) + self.seconds - perf_counter()

    def wait_out(self, stamps: Sequence[torch.Tensor]) -> None:
        """Wait for the remaining latency of messages with these stamps, and count it."""
        left_s = max(0.0, self.left_s(stamps))
        sleep(left_s)
        self.visible_s += left_s
        self.injected_s += self.seconds if stamps else 0.0


class DelayedCommunicator(ForwardingCommunicator):
    """Forwards all calls and delays the messages of exchanges.

    A stamp of the sender's clock travels with each message, so all ranks must run on one machine.

    Args:
        comm: the communicator to delay.
        latency: shared with all groups split off from this one.
        reductions: whether reductions are delayed, too, counted from the call on this rank.
    """

    def __init__(self, comm: Communicator, latency: Latency, reductions: bool = False) -> None:
        super().__init__(comm)
        self._latency = latency
        self._reductions = reductions

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start sends and receives, followed by their time stamps."""
        now_s = perf_counter()
        # ``perf_counter`` is a clock of the machine, not of the process: stamps of all its ranks can be compared.
        stamps = [torch.tensor([now_s], dtype=torch.float64) for _ in sends]
        arriving = [torch.zeros(1, dtype=torch.float64) for _ in receives]
        pending = self._comm.exchange(
            # Each stamp is sent after its message with the same tag: between two ranks these arrive in order.
            [*sends, *(Message(m.peer, stamp, m.tag) for m, stamp in zip(sends, stamps, strict=True))],
            [*receives, *(Message(m.peer, stamp, m.tag) for m, stamp in zip(receives, arriving, strict=True))],
        )
        return _DelayedPending(self._latency, pending, arriving)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place, with latency."""
        if self._reductions:
            self.start_all_reduce(tensor, op).wait()
        else:
            self._comm.all_reduce(tensor, op)

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start a reduction, with latency if reductions are delayed."""
        stamps = [torch.tensor([perf_counter()], dtype=torch.float64)] if self._reductions else []
        pending = self._comm.start_all_reduce(tensor, op)
        return _DelayedPending(self._latency, pending, stamps) if stamps else pending

    def split(self, color: int | None, key: int = 0) -> DelayedCommunicator | None:
        """Return the group of all ranks that gave the same color; with the same latency."""
        group = self._comm.split(color, key)
        return None if group is None else DelayedCommunicator(group, self._latency, self._reductions)

    def subgroup(self, members: Sequence[int]) -> DelayedCommunicator | None:
        """Return the group of ``members``; with the same latency."""
        group = self._comm.subgroup(members)
        return None if group is None else DelayedCommunicator(group, self._latency, self._reductions)


class _DelayedPending:
    """A pending exchange that completes when its messages have arrived and their latency has passed."""

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
