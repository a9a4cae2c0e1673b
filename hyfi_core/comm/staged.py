"""Reductions of several stages under way at once: each begins a stage when the one before it is done, in one order.

    reduction 0   stage 1 ══▶ stage 2 ══▶ stage 3
    reduction 1   stage 1 ══▶ ………………………… waits for its turn …… stage 2 ══▶ stage 3

A rank begins a stage when it finds the one before done, which is sooner on one rank than on another. So every stage has
a communicator of its own: on each of them all ranks start the same operations in the same order, whatever is started on
the others meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

from hyfi_core.comm.base import Pending

Stages = Generator[Pending, None, None]
"""Starts a stage each time it is resumed, and yields what is under way then."""


class StagedQueue:
    """The reductions of one communicator that are under way, the oldest first."""

    def __init__(self) -> None:
        self._open: deque[StagedReduction] = deque()

    def start(self, stages: Stages) -> StagedReduction:
        """Start the first stage of a reduction."""
        reduction = StagedReduction(self, stages)
        self._open.append(reduction)
        return reduction

    def advance(self, wait_for: StagedReduction | None = None) -> None:
        """Bring reductions further, in order; with ``wait_for`` until that one is done."""
        while self._open:
            first = self._open[0]
            if not first.advance(wait=wait_for is not None):
                return
            self._open.popleft()
            if first is wait_for:
                return


class StagedReduction:
    """One reduction on its way through its stages."""

    needs_polls = True

    def __init__(self, queue: StagedQueue, stages: Stages) -> None:
        self._queue, self._stages = queue, stages
        self._pending = next(stages, None)

    def test(self) -> bool:
        """Make progress without blocking; whether all of it is finished."""
        if self._pending is not None:
            self._queue.advance()
        return self._pending is None

    def wait(self) -> None:
        """Return when all of it is finished."""
        if self._pending is not None:
            self._queue.advance(self)

    def advance(self, wait: bool) -> bool:
        """Go through the stages as far as they are done; whether all are."""
        while self._pending is not None:
            if wait:
                self._pending.wait()
            elif not self._pending.test():
                return False
            self._pending = next(self._stages, None)
        return True
