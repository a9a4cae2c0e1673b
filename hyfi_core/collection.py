"""Python's garbage collection, out of the way of work that makes many objects."""

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

    The collector goes through all objects of the process, PyTorch's too, whenever enough new ones have been made: in a
    third of a capture's time, which frees nothing. What has become garbage is collected afterwards.

    Contexts may be nested, and of several threads: the last one to end switches collection on, if it was on before.
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
