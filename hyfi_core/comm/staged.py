"""Pending reductions of several stages, which all start in the same order.

    reduction 0   stage 1 ══▶ stage 2 ══▶ stage 3
    reduction 1   stage 1 ══▶ ………………………… waits …………………… stage 2 ══▶ stage 3

A rank begins a stage when the previous one has completed, at different times on different ranks. So every stage has its
own communicator, on which all ranks start the same operations in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

from hyfi_core.comm.base import Pending

Stages = Generator[Pending, None, None]
"""Generator that starts a stage each time it is resumed, and yields its pending communication."""


class StagedQueue:
    """The pending reductions of one communicator, the oldest first."""

    def __init__(self) -> None:
        self._open: deque[StagedReduction] = deque()

    def start(self, stages: Stages) -> StagedReduction:
        """Start the first stage of a reduction."""
        reduction = StagedReduction(self, stages)
        self._open.append(reduction)
        return reduction

    def advance(self, wait_for: StagedReduction | None = None) -> None:
        """Advance reductions in order; with ``wait_for``, until that one has completed."""
        while self._open:
            first = self._open[0]
            if not first.advance(wait=wait_for is not None):
                return
            self._open.popleft()
            if first is wait_for:
                return


class StagedReduction:
    """One pending reduction of several stages."""

    needs_polls = True

    def __init__(self, queue: StagedQueue, stages: Stages) -> None:
        self._queue, self._stages = queue, stages
        self._pending = next(stages, None)

    def test(self) -> bool:
        """Make progress without blocking; return whether it has completed."""
        if self._pending is not None:
            self._queue.advance()
        return self._pending is None

    def wait(self) -> None:
        """Return when it has completed."""
        if self._pending is not None:
            self._queue.advance(self)

    def advance(self, wait: bool) -> bool:
        """Advance through the completed stages; return whether all have completed."""
        while self._pending is not None:
            if wait:
                self._pending.wait()
            elif not self._pending.test():
                return False
            self._pending = next(self._stages, None)
        return True
