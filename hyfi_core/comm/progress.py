"""Progress while a rank computes.

MPI moves large messages only inside calls. Cutting the computation in slices with a call between them costs more than
it brings (a convolution of 64 channels in eight slices takes a quarter longer, a deep one twice as long), so a helper
thread makes the calls: torch releases the interpreter lock while it computes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from hyfi_core.comm.base import Pending

_FIRST_S = 100e-6
_MOST_S = 2e-3


class _ProgressThread:
    """One thread for the process, asleep while nothing is watched."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: list[Pending] = []
        self._thread: threading.Thread | None = None

    def watch(self, pending: Pending) -> None:
        with self._changed:
            self._watched.append(pending)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="hyfi-progress")
                self._thread.start()
            self._changed.notify()

    def leave(self, pending: Pending) -> None:
        with self._changed:  # once this is held, no call of the helper is under way
            self._watched = [other for other in self._watched if other is not pending]

    def _run(self) -> None:
        pause_s = _FIRST_S
        while True:
            with self._changed:
                if not self._watched:
                    pause_s = _FIRST_S
                    self._changed.wait()
                self._watched = [pending for pending in self._watched if not _done(pending)]
            time.sleep(pause_s)
            pause_s = min(_MOST_S, pause_s * 1.5)


def _done(pending: Pending) -> bool:
    try:
        return pending.test()
    except Exception:
        return True  # the thread that waits for it sees the error


_PROGRESS = _ProgressThread()


@contextlib.contextmanager
def polled(pending: Pending | None) -> Iterator[None]:
    """Let a communication go on while the body computes. The body must not communicate.

    Args:
        pending: None, or one that only this call touches.
    """
    if pending is None or not pending.needs_polls or pending.test():
        yield
        return
    _PROGRESS.watch(pending)
    try:
        yield
    finally:
        _PROGRESS.leave(pending)
