"""Lockstep: one thread runs the tapes of all cells of a process, and changes to another cell where one has to wait.

    cell 0   ── convolution ── norm: needs sums │                               │ ── relu ── …
    cell 1                                      │ ── convolution ── norm ──┐    │
    cell 2                                                                 │ ── convolution ── norm │

A tape is a generator that yields what it waits for (see ``comm.waits``). A cell runs all steps between two waits before
the next cell follows, in cyclic order, so that runs are reproducible. Nothing is locked and no thread is woken; cells
that could only wait for each other are an error at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hyfi_core.comm.base import Pending
from hyfi_core.comm.waits import Waits

NAP_S = 1e-4
"""Sleep between two rounds in which all cells wait for other processes."""


def run_in_lockstep(
    cells: Mapping[int, Waits[Any]], turn: Callable[[int, bool], None], waited_for_other_process: Callable[[], bool]
) -> dict[int, Any]:
    """Run the computations of cells in turns, each up to its next wait; return cell -> result of its computation.

    Args:
        cells: cell -> computation, in the order of turns.
        turn: called with a cell, and whether it continues after a wait, before it runs.
        waited_for_other_process: whether any cell has waited for another process since this was last called.

    Raises:
        RuntimeError: all cells wait for each other.
    """
    pending: dict[int, Pending | None] = dict.fromkeys(cells)
    results: dict[int, Any] = {}
    try:
        while pending:
            has_run = False
            # A copy, because cells that end are removed on the way.
            for cell, wait in tuple(pending.items()):
                if wait is not None and not wait.test():
                    continue
                has_run = True
                turn(cell, wait is not None)
                try:
                    pending[cell] = _until_wait(cells[cell])
                except StopIteration as end:
                    results[cell] = end.value
                    del pending[cell]
            # Called first, in every round, because the call also clears what cells have noted since.
            if not waited_for_other_process() and not has_run:
                raise RuntimeError(f"cells {sorted(pending)} wait for each other (deadlock)")
            if not has_run:
                time.sleep(NAP_S)
    finally:
        for steps in cells.values():
            # After a failure, the other computations end here, in this thread, not when the garbage collector runs.
            steps.close()
    return results


def _until_wait(steps: Waits[Any]) -> Pending:
    """Run a computation until it waits for something that is not complete yet, and return what it waits for."""
    while True:
        pending = next(steps)
        if not pending.test():
            return pending
