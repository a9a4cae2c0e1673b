"""A communicator that counts messages, bytes and waiting time by kind of traffic.

Waits for NCCL return at once: only the GPU's stream waits. Its waiting time is measured by two events on the stream,
one before and one after the wait, and read when both have completed, so that the host does not wait for it.

    stream   ── kernel ── event ┄┄ waits for messages ┄┄ event ── kernel ──▶
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol, Self

import torch

from hyfi_core.comm.base import (
    Communicator,
    ForwardingCommunicator,
    Message,
    Pending,
    ReduceOp,
)
from hyfi_core.comm.combined import Combination, Combined, reduced_by, start_combined

KINDS = ("halo", "stage", "reduce", "input")
Span = tuple[str, float, float]
"""Kind, begin and end by ``time.perf_counter``."""


class TrafficCounts:
    """Messages, bytes and seconds of waiting, by kind.

    Attributes:
        messages: number of messages sent since the last reset.
        sent_bytes: number of bytes sent since the last reset.
        seconds: time spent on starting and waiting for messages; ``collect`` adds the waits of a GPU's stream.
        spans: list to which every time that the host spends is appended; ``reset`` leaves it alone. None: not recorded.
    """

    def __init__(self) -> None:
        self.spans: list[Span] | None = None
        self._on_stream: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self.reset()

    def reset(self) -> None:
        """Count from zero again; waits of a stream that ``collect`` has not added yet count afterwards."""
        self.messages = dict.fromkeys(KINDS, 0)
        self.sent_bytes = dict.fromkeys(KINDS, 0)
        self.seconds = dict.fromkeys(KINDS, 0.0)

    def count(self, kind: str, messages: int, sent_bytes: int) -> None:
        """Add to the count of one kind."""
        self.messages[kind] += messages
        self.sent_bytes[kind] += sent_bytes

    def spend(self, kind: str, begin_s: float) -> None:
        """Add the time since ``begin_s`` to one kind."""
        end_s = perf_counter()
        self.seconds[kind] += end_s - begin_s
        if self.spans is not None:
            self.spans.append((kind, begin_s, end_s))

    def spend_on_stream(self, kind: str, begin: torch.cuda.Event) -> None:
        """Add the time from an event to now on the current stream to one kind; ``collect`` adds it when it is known."""
        self._on_stream.append((kind, begin, marked()))

    def collect(self) -> None:
        """Add the waits of streams that are over to ``seconds``."""
        # They end in the order of the list, as on the stream: behind one that is not over, no other is.
        while self._on_stream and self._on_stream[0][2].query():
            kind, begin, end = self._on_stream.popleft()
            self.seconds[kind] += begin.elapsed_time(end) / 1e3


def marked() -> torch.cuda.Event:
    """Return an event on the current stream of the GPU, for measuring time."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class KindCommunicator(Communicator, Protocol):
    """A communicator that counts its traffic by kind."""

    def of(self, kind: str) -> Self:
        """Return the same communicator with traffic counted as ``kind``."""
        ...


class CountedCommunicator(ForwardingCommunicator):
    """Forwards all calls to another communicator and counts messages, bytes and seconds under its kind.

    Args:
        comm: the other communicator.
        kind: kind of traffic; ``of`` returns the same communicator for another kind.
        counts: to which the traffic is added; None for new counts.

    Attributes:
        counts: shared by all communicators that ``of`` returns.
    """

    def __init__(self, comm: Communicator, kind: str = "halo", counts: TrafficCounts | None = None) -> None:
        super().__init__(comm)
        self._kind = kind
        self.counts = TrafficCounts() if counts is None else counts
        self._views: dict[str, CountedCommunicator] = {kind: self}

    @property
    def kind(self) -> str:
        """The kind of traffic; it never changes."""
        return self._kind

    def of(self, kind: str) -> CountedCommunicator:
        """Return this communicator with traffic counted as ``kind``."""
        if kind not in self._views:
            view = CountedCommunicator(self._comm, kind, self.counts)
            # Shared, so that ``of`` returns the same object again, from whichever view it is called.
            view._views = self._views
            self._views[kind] = view
        return self._views[kind]

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start sends and receives; sends count."""
        self.counts.count(self._kind, len(sends), sum(m.tensor.numel() * m.tensor.element_size() for m in sends))
        start_s = perf_counter()
        pending = self._comm.exchange(sends, receives)
        self.counts.spend(self._kind, start_s)
        return self._timed(pending, [message.tensor for message in (*sends, *receives)])

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place; counts as one message of the tensor's bytes."""
        self._count_reduction(tensor)
        if self._waits_on_stream((tensor,)):
            begin = marked()
            self._comm.all_reduce(tensor, op)
            self.counts.spend_on_stream(self._kind, begin)
            return
        start_s = perf_counter()
        self._comm.all_reduce(tensor, op)
        self.counts.spend(self._kind, start_s)

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start reducing in place; counts as one message of the tensor's bytes."""
        self._count_reduction(tensor)
        return self._timed(self._comm.start_all_reduce(tensor, op), (tensor,))

    def start_combined(self, own: Callable[[], Any], combination: Combination, kept: bool) -> Combined:
        """Start combining; counts as one message of the packed tensor's bytes, for each of several cells, too."""
        if not hasattr(self._comm, "start_combined"):
            return reduced_by(self, own, combination)
        self.counts.count(self._kind, 1, combination.sent_bytes)
        combined = start_combined(self._comm, own, combination, kept)
        return Combined(self._timed(combined.pending, ()), combined.result)

    def _timed(self, pending: Pending, tensors: Sequence[torch.Tensor]) -> Pending:
        return _TimedPending(pending, self.counts, self._kind, self._waits_on_stream(tensors))

    def _waits_on_stream(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the GPU's stream waits for these messages instead of the host."""
        return self._comm.in_order and any(tensor.is_cuda for tensor in tensors)

    def _count_reduction(self, tensor: torch.Tensor) -> None:
        if self._comm.size > 1:
            self.counts.count(self._kind, 1, tensor.numel() * tensor.element_size())


class _TimedPending:
    """Pending communication whose waiting time is counted."""

    __slots__ = ("_counts", "_kind", "_on_stream", "_pending")

    def __init__(self, pending: Pending, counts: TrafficCounts, kind: str, on_stream: bool) -> None:
        self._pending, self._counts, self._kind, self._on_stream = pending, counts, kind, on_stream

    @property
    def needs_polls(self) -> bool:
        return self._pending.needs_polls

    def test(self) -> bool:
        return self._pending.test()

    def wait(self) -> None:
        """Wait, and count the time: on a GPU by events, because its stream waits later, and not this thread now."""
        if self._on_stream:
            begin = marked()  # an event in the stream
            self._pending.wait()
            self._counts.spend_on_stream(self._kind, begin)
            return
        start_s = perf_counter()
        self._pending.wait()
        self._counts.spend(self._kind, start_s)
