"""One object for each thread of each process, of a kind that two threads must not share and no fork may inherit."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_living: weakref.WeakSet[PerThread[Any]] = weakref.WeakSet()
_left_behind: list[Any] = []
"""Objects of a parent process: a thread of it may have been inside one, so a child must not even close them."""


class PerThread(Generic[T]):
    """Makes a thread's own object when it first asks.

    Args:
        make: Makes one; may raise.
        close: Ends one.
    """

    def __init__(self, make: Callable[[], T], close: Callable[[T], None]) -> None:
        self._make, self._close = make, close
        self._objects: dict[threading.Thread, T] = {}
        _living.add(self)

    def get(self) -> T:
        """Return this thread's object."""
        thread = threading.current_thread()
        found = self._objects.get(thread)
        if found is None:
            self._end([other for other in list(self._objects) if not other.is_alive()])
            found = self._objects[thread] = self._make()
        return found

    def drop(self) -> None:
        """End this thread's object; the next `get` makes a new one."""
        self._end([threading.current_thread()])

    def close(self) -> None:
        """End all of them; no other thread may be using its own."""
        self._end(list(self._objects))

    def _end(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            gone = self._objects.pop(thread, None)
            if gone is not None:
                self._close(gone)

    def forget(self) -> None:
        """Never touch the objects again: they belong to the process that this one was forked from."""
        _left_behind.append(self._objects)
        self._objects = {}


def _after_fork() -> None:
    for each in list(_living):
        each.forget()


os.register_at_fork(after_in_child=_after_fork)
