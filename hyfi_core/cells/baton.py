"""The baton: between their tapes, the cells of a process are threads, and only the thread that has the baton runs.

    cell 0   ── run ── needs a loss │                  │   joins │                              │ ── run ── …
    cell 1                          │ ── run ── joins  │         │                              │
    the caller's thread                                          │ ── runs the tapes of all ──▶ │

A cell keeps the baton until it has to wait; the next cell that can continue follows, in cyclic order, so that runs are
reproducible. When all cells have come to their tapes, the caller's thread runs these in lockstep: see
``cells.lockstep``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch

from hyfi_core.cells.lockstep import NAP_S, run_in_lockstep
from hyfi_core.comm.waits import Context, Waits, within

T = TypeVar("T")


class OtherCellFailedError(RuntimeError):
    """Another cell has failed, so this one ends. Never the first error."""


class Unfinished(Protocol):
    """Something that a failed run may leave unfinished, such as messages of a group."""

    def clear(self) -> None:
        """Remove unfinished entries, which the next run would take for its own."""


class Baton:
    """Runs the cells of one process, one at a time.

    Args:
        size: number of cells.
        switched: called with a cell whenever it continues after other cells have run.
        prepared: called in the thread that calls ``run``; returns a function that each cell's thread calls first.

    Attributes:
        cell: the cell that runs.
        groups: cleared when all cells have ended and one of them has failed. Weak references, because an engine makes
            groups for each capture, and the baton lives as long as the engine.
    """

    def __init__(
        self,
        size: int,
        switched: Callable[[int], None] = lambda cell: None,
        prepared: Callable[[], Callable[[], None]] = lambda: lambda: None,
    ) -> None:
        self.size = size
        self.cell = 0
        self._holder = 0  # a cell, or ``size`` for the thread that runs tapes, in which ``cell`` goes on changing
        self.groups: WeakSet[Unfinished] = WeakSet()
        self._switched, self._prepared = switched, prepared
        self._lock = threading.Lock()
        # One for each cell, and one for the thread that runs tapes: waking all of them for every hand-over would take
        # time in the square of their number.
        self._wake = [threading.Condition(self._lock) for _ in range(size + 1)]
        self._running: set[int] = set()  # cells that have not ended
        self._joined: dict[int, Waits[Any]] = {}  # tapes of the cells that have reached one, to be run together
        self._results: dict[int, Any] = {}  # of these tapes, until their cells take them
        self._failed = self._in_tapes = False
        self._idle = 0  # how many answers "not ready" cells have given since any of them last ran
        self._noted_outside = False
        self._outside: set[int] = set()  # the cells that wait for another process

    def run(self, body: Callable[[int], T]) -> list[T]:
        """Run ``body(cell)`` for every cell and return the results.

        Raises:
            BaseException: the first error of any cell, after all cells have ended.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []
        self._reset()
        prepare_thread = self._prepared()

        def target(cell: int) -> None:
            """Run ``body`` for a cell, in the cell's thread."""
            try:
                # In each thread, because settings such as CUDA's current device and stream belong to a thread.
                prepare_thread()
                self._take(cell)  # the baton
                results[cell] = body(cell)
            except BaseException as error:
                errors.append(error)
                self._fail()  # all other cells raise OtherCellFailedError
            self._end(cell)

        # Daemons: a cell that waits for ever, after a signal has ended the others, must not keep the process alive.
        threads = [threading.Thread(target=target, args=(c,), name=f"cell-{c}", daemon=True) for c in range(self.size)]
        try:
            for thread in threads:
                thread.start()
            # Threads run a cell between its tapes; all tapes run in this thread, because handing them over between
            # threads takes time.
            self._run_tapes(errors)
            for thread in threads:
                thread.join()
        except BaseException:  # raised by a signal in the main thread
            self._fail()
            raise
        if errors:
            self._joined, self._results = {}, {}  # releases their tensors
            for group in self.groups:
                group.clear()
            raise next((error for error in errors if not isinstance(error, OtherCellFailedError)), errors[0])
        return results

    def _reset(self) -> None:
        """Let all cells begin, the first one with the baton; forget what a run that a signal ended has left."""
        self.cell, self._holder, self._failed, self._idle = 0, 0, False, 0
        self._joined, self._results, self._noted_outside, self._outside = {}, {}, False, set()
        self._running = set(range(self.size))

    def together(self, steps: Waits[T]) -> T:
        """Return the result of a cell's computation (its tape), which runs in lockstep with those of all other cells.

        It runs in the thread that has called ``run``, without gradients unless it enables them.
        """
        cell = self.cell
        self._joined[cell] = steps
        self._idle = 0
        # Give the baton away. The thread that runs tapes gets it when all cells are here; this cell, after that.
        self._pass()
        self._take(cell)
        self._switched(cell)
        result: T = self._results.pop(cell)
        return result

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when ``ready()``; until then other cells run.

        Args:
            ready: called by this cell only, while it has the baton. It returns whether the wait is over; if not, and
                another process may end it, it calls ``note_outside`` first.

        Raises:
            RuntimeError: all cells wait for each other.
        """
        assert not self._in_tapes, "a tape yields what it waits for"
        self._idle = 0  # this cell has run since its last wait, and others may be able to continue
        if ready():
            return
        cell = self.cell
        while True:
            self._idle += 1
            if self.waited_for_other_process():
                self._outside.add(cell)
            else:
                self._outside.discard(cell)
            # Every cell between tapes has found that it is not ready since any of them ran: only another process can
            # still change that.
            if self._idle > len(self._running) - len(self._joined):
                if not self._outside:
                    raise RuntimeError(f"cells {sorted(self._running)} wait for each other (deadlock)")
                # The baton stays here during the nap, because no other cell can continue either.
                time.sleep(NAP_S)
            self._pass()
            self._take(cell)
            if ready():
                break
        self._idle = 0
        self._outside.discard(cell)
        self._switched(cell)

    def note_outside(self) -> None:
        """Record that a cell waits for another process."""
        self._noted_outside = True

    def waited_for_other_process(self) -> bool:
        """Return whether a cell has waited for another process since the last call of this method."""
        noted, self._noted_outside = self._noted_outside, False
        return noted

    def _run_tapes(self, errors: list[BaseException]) -> None:
        """Run the tapes of all cells in lockstep whenever all have reached one, until all cells have ended."""
        while True:
            try:
                self._take(self.size)  # the number of this thread: the baton comes here when no cell is between tapes
            except OtherCellFailedError:
                return
            if not self._running:
                return
            try:
                # Whatever contexts the caller of ``run`` is in: tapes enable gradients where they need them.
                with torch.inference_mode(False), torch.no_grad():
                    self._results = self._run_joined()
            except BaseException as error:
                errors.append(error)
                self._fail()
                return
            self._pass()

    def _run_joined(self) -> dict[int, Any]:
        """Run the tapes of all cells in lockstep; return cell -> its result."""
        ended = set(range(self.size)) - self._running
        if ended:
            raise RuntimeError(f"cells {sorted(self._joined)} wait for cells {sorted(ended)}, which have ended")
        # Sorted by cell, not by arrival, so that sums and messages have the same order in every run.
        joined, self._joined = dict(sorted(self._joined.items())), {}
        self._in_tapes = True  # until they end, no cell may call ``wait``
        try:
            return run_in_lockstep(joined, self._set_running, self.waited_for_other_process)
        finally:
            self._in_tapes = False

    def _set_running(self, cell: int, resumes: bool) -> None:
        """Note which cell's tape runs now; ``resumes``: after others have run."""
        self.cell = cell
        if resumes:
            self._switched(cell)

    def _pass(self) -> None:
        """Hand the baton to the next cell that is between tapes; if there is none, to the thread that runs tapes."""
        with self._lock:
            first = 0 if self._holder == self.size else self._holder + 1
            cells = ((first + step) % self.size for step in range(self.size))
            between_tapes = (cell for cell in cells if cell in self._running and cell not in self._joined)
            self._holder = next(between_tapes, self.size)
            self._wake[self._holder].notify()

    def _take(self, cell: int) -> None:
        """Wait until a cell's thread has the baton."""
        with self._lock:
            self._wake[cell].wait_for(lambda: self._failed or self._holder == cell)
        if self._failed:
            raise OtherCellFailedError("another cell has failed")
        # The thread that runs tapes has no cell of its own: ``_set_running`` sets the cell for which it runs.
        if cell < self.size:
            self.cell = cell

    def _end(self, cell: int) -> None:
        self._running.discard(cell)
        self._idle = 0
        if not self._failed:
            self._pass()

    def _fail(self) -> None:
        with self._lock:
            self._failed = True
            # All threads that wait must raise, also those that would never have had a turn.
            for wake in self._wake:
                wake.notify()


class Lockstep:
    """The driver of a cell: its computations run together with those of all other cells of the process.

    Args:
        baton: shared by the cells of the process.
    """

    def __init__(self, baton: Baton) -> None:
        self._baton = baton

    def run(self, steps: Waits[T]) -> T:
        """Return the result of a computation, when all cells have called this."""
        return self._baton.together(steps)

    def within(self, context: Context, steps: Waits[T]) -> Waits[T]:
        """Return a computation in a context that other cells do not see."""
        return within(context, steps)
