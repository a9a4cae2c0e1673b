"""Progress of communication while a rank computes, and waiting for it without a full core.

MPI moves large messages only inside calls to it. Computing in slices, with a call between slices, costs too much (a
convolution of 64 channels takes a quarter longer in eight slices, one of a deep layer twice as long). So a helper
thread makes the calls: PyTorch releases the interpreter lock while it computes.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hyfi_core.comm.activity import ACTIVITY
from hyfi_core.comm.base import Pending
from hyfi_core.current_device import current_device, make_current

_FIRST_S = 100e-6
_MOST_S = 2e-3
_SPIN_S = 100e-6
_SLEEP_FIRST_S = 50e-6


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a waiting rank keeps its core.

    Attributes:
        yield_s: time for which it yields the core again and again, before it sleeps.
        sleep_most_s: its longest sleep between two calls of MPI.
    """

    yield_s: float
    sleep_most_s: float


# If MPI sends a message in pieces, both ends must call it for each piece: with earlier sleeps, a step took twenty times
# as long (shared memory without cross-memory attach).
OWN_CORE = Patience(yield_s=0.1, sleep_most_s=2e-3)
"""For a rank that has a core for itself."""
SHARED_CORE = Patience(yield_s=1e-3, sleep_most_s=100e-6)
"""For a node with more ranks than cores: yielding takes time from the ranks that compute."""
_patience = OWN_CORE


def set_patience(patience: Patience) -> None:
    """Set how long the waits of this process keep their core."""
    global _patience
    _patience = patience


class _ProgressThread:
    """One thread per process, which sleeps while nothing is pending."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: list[Pending] = []
        self._thread: threading.Thread | None = None

    def watch(self, pending: Pending) -> None:
        """Add an operation to those that are tested; the first one starts the thread."""
        with self._changed:
            self._watched.append(pending)
            if self._thread is None:
                # Each thread has a current device of its own; copies of a message must be on the caller's.
                device = current_device()
                self._thread = threading.Thread(target=self._run, args=(device,), daemon=True, name="hyfi-progress")
                self._thread.start()
            self._changed.notify()

    def leave(self, pending: Pending) -> None:
        """Remove an operation; when this returns, the thread makes no more calls for it."""
        with self._changed:  # the helper thread makes calls only while it holds this
            self._watched = [watched for watched in self._watched if watched is not pending]

    def _run(self, device: torch.device) -> None:
        """Test the watched operations for ever, first every 0.1 ms, then less often; drop those that are over."""
        make_current(device)
        pause_s = _FIRST_S
        while True:
            with self._changed:
                if not self._watched:
                    pause_s = _FIRST_S
                    self._changed.wait()
                self._watched = [pending for pending in self._watched if not _is_over(pending)]
            # Without the lock, so that ``leave`` does not wait for the end of this sleep.
            time.sleep(pause_s)
            pause_s = min(_MOST_S, pause_s * 1.5)


def _is_over(pending: Pending) -> bool:
    try:
        return pending.test()
    except Exception:
        return True  # the waiting thread raises the error


_PROGRESS = _ProgressThread()


@contextlib.contextmanager
def polled(pending: Pending | None) -> Iterator[None]:
    """Make progress on a communication while the body computes. The body must not communicate.

    Args:
        pending: not used elsewhere during the body; None: just run the body.
    """
    # A completed communication needs no thread: waking it takes longer than most small messages.
    if pending is None or not pending.needs_polls or pending.test():
        yield
        return
    _PROGRESS.watch(pending)
    try:
        yield
    finally:
        _PROGRESS.leave(pending)


def backed_off(ready: Callable[[], bool], describe: Callable[[], str], nbytes: Callable[[], int] = lambda: 0) -> None:
    """Return when ``ready()``: first spin, then yield the core, then sleep for increasing times.

    Args:
        ready: called repeatedly.
        describe: describes the wait, called if it takes long.
        nbytes: returns the pending bytes, called if it takes long.
    """
    start = time.perf_counter()
    while not ready():
        waited_s = time.perf_counter() - start
        if waited_s < _SPIN_S:
            continue
        if waited_s >= _patience.yield_s:
            break
        os.sched_yield()
    else:
        return
    sleep_s = _SLEEP_FIRST_S
    # Recorded only from here on: for the many short waits that would take longer than the wait itself.
    with ACTIVITY.waiting(describe, nbytes()):
        while not ready():
            time.sleep(sleep_s)
            sleep_s = min(_patience.sleep_most_s, sleep_s * 1.5)
