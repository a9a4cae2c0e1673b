"""Pending reductions with several phases each; all ranks start the phases in the same order.

    reduction 0   phase 1 ══▶ phase 2 ══▶ phase 3
    reduction 1   phase 1 ══▶ ………………………… waits …………………… phase 2 ══▶ phase 3

A rank starts a phase when its previous one has completed, which happens at different times on different ranks. So every
phase has its own communicator, on which all ranks start the same operations in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

from hyfi_core.comm.base import Pending

Phases = Generator[Pending, None, None]
"""Generator that starts a phase each time it is resumed, and yields its pending communication."""


class PhasedQueue:
    """The pending reductions of one communicator, the oldest first."""

    def __init__(self) -> None:
        self._open: deque[PhasedReduction] = deque()

    def start(self, phases: Phases) -> PhasedReduction:
        """Start the first phase of a reduction."""
        reduction = PhasedReduction(self, phases)
        self._open.append(reduction)
        return reduction

    def advance(self, wait_for: PhasedReduction | None = None) -> None:
        """Start the next phase of the oldest reduction when its previous one has completed; drop complete reductions.

        With ``wait_for``, wait until that reduction is complete; otherwise return as soon as a phase is pending.
        """
        while self._open:
            first = self._open[0]
            # Later reductions stay where they are: all ranks must start phases on the same communicators in one order.
            if not first.advance(wait=wait_for is not None):
                return
            self._open.popleft()
            if first is wait_for:
                return


class PhasedReduction:
    """One pending reduction of several phases."""

    needs_polls = True

    def __init__(self, queue: PhasedQueue, phases: Phases) -> None:
        self._queue, self._phases = queue, phases
        self._pending = next(phases, None)

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
        """Start phases until one is pending; return whether all have completed.

        With ``wait``, wait for each of them.
        """
        while self._pending is not None:
            if wait:
                self._pending.wait()
            elif not self._pending.test():
                return False
            self._pending = next(self._phases, None)
        return True
