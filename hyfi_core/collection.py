"""Pauses of Python's garbage collection during work that makes many objects."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_LOCK = threading.Lock()
_pauses = 0
_was_on = True


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Context without automatic garbage collection.

    Whenever enough new objects have been made, the collector goes through all objects of the process, PyTorch's too.
    That would take a third of a capture's time and free nothing. Garbage is collected after the context.

    Contexts may be nested, and several threads may have one: the last to end switches collection on, if it was on
    before.
    """
    global _pauses, _was_on
    with _LOCK:
        if not _pauses:
            _was_on = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _LOCK:
            _pauses -= 1
            if not _pauses and _was_on:
                gc.enable()
