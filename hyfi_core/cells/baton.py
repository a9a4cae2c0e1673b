"""The baton: the cells of a process are threads, and only the one that has it runs.

    cell 0   ── run ── needs a halo │                             │ ── run ── …
    cell 1                          │ ── run ── needs a halo │    │
    cell 2                                                   │ ── run

A cell keeps the baton until it has to wait; the next cell that can continue follows, in cyclic order, so that runs are
reproducible.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_NAP_S = 1e-4  # sleep between two rounds in which all cells wait for other processes


class OtherCellFailedError(RuntimeError):
    """Another cell has failed, so this one ends. Never the first error."""


class Baton:
    """Runs the cells of one process, one at a time.

    Args:
        size: number of cells.
        switched: called with a cell whenever it has the baton again after others had it.
        begun: called in the thread of each cell before anything else.

    Attributes:
        after_failure: called when all cells have ended and one of them had failed, to remove what it left unfinished.
    """

    def __init__(
        self,
        size: int,
        switched: Callable[[int], None] = lambda cell: None,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self.size = size
        self.cell = 0
        self.after_failure: list[Callable[[], None]] = []
        self._switched, self._begun = switched, begun
        self._lock = threading.Lock()
        # One for each cell: waking all of them for every hand-over would take time in the square of their number.
        self._wake = [threading.Condition(self._lock) for _ in range(size)]
        self._running: set[int] = set()
        self._failed = False
        self._idle = 0
        self._outside: set[int] = set()

    def run(self, body: Callable[[int], T]) -> list[T]:
        """Run ``body(cell)`` for every cell and return the results.

        Raises:
            BaseException: the first error of any cell, after all cells have ended.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []
        self.cell, self._failed, self._idle = 0, False, 0
        self._running = set(range(self.size))

        def target(cell: int) -> None:
            try:
                self._begun()
                self._take(cell)
                results[cell] = body(cell)
            except BaseException as error:
                errors.append(error)
                self._fail()
            self._end(cell)

        threads = [threading.Thread(target=target, args=(c,), name=f"cell-{c}", daemon=True) for c in range(self.size)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # raised by a signal in the main thread
            self._fail()
            raise
        if errors:
            for clear in self.after_failure:
                clear()
            raise next((error for error in errors if not isinstance(error, OtherCellFailedError)), errors[0])
        return results

    def wait(self, ready: Callable[[], bool], outside: bool = False) -> None:
        """Return when ``ready()``; until then other cells run.

        Args:
            ready: called by this cell only, while it has the baton.
            outside: whether another process may make it true.

        Raises:
            RuntimeError: all cells wait for each other.
        """
        self._idle = 0  # this cell has run since its last wait, and others may be able to continue
        if ready():
            return
        cell = self.cell
        while True:
            self._idle += 1
            if outside:
                self._outside.add(cell)
            # Every running cell has asked once since any of them ran: only another process can still change an answer.
            if self._idle > len(self._running):
                if not self._outside:
                    raise RuntimeError(f"cells {sorted(self._running)} wait for each other (deadlock)")
                time.sleep(_NAP_S)
            self._pass()
            self._take(cell)
            if ready():
                break
        self._idle = 0
        self._outside.discard(cell)
        self._switched(cell)

    def _pass(self) -> None:
        with self._lock:
            if self._running:
                following = range(self.cell + 1, self.cell + 1 + self.size)
                self.cell = next(cell % self.size for cell in following if cell % self.size in self._running)
            self._wake[self.cell].notify()

    def _take(self, cell: int) -> None:
        with self._lock:
            self._wake[cell].wait_for(lambda: self._failed or self.cell == cell)
        if self._failed:
            raise OtherCellFailedError("another cell has failed")

    def _end(self, cell: int) -> None:
        self._running.discard(cell)
        self._idle = 0
        if not self._failed:
            self._pass()

    def _fail(self) -> None:
        with self._lock:
            self._failed = True
            for wake in self._wake:
                wake.notify()
