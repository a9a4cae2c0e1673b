"""One object per thread and process, for objects that are neither thread-safe nor usable after a fork."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_living: weakref.WeakSet[PerThread[Any]] = weakref.WeakSet()
_left_behind: list[Any] = []
"""Keeps objects of the parent process alive: a thread may have been using one at the fork, so it must not be closed."""


class PerThread(Generic[T]):
    """Makes an object for each thread at its first `get`.

    Args:
        make: Returns a new object; may raise.
        close: Closes an object.
    """

    def __init__(self, make: Callable[[], T], close: Callable[[T], None]) -> None:
        self._make, self._close = make, close
        # By thread object, not by number: numbers of ended threads are given to new ones.
        self._objects: dict[threading.Thread, T] = {}
        _living.add(self)

    def get(self) -> T:
        """Return this thread's object, a new one if it has none. Objects of threads that have ended are closed."""
        thread = threading.current_thread()
        own = self._objects.get(thread)
        if own is None:
            # `threading.local` would drop the objects of ended threads, but not close their files.
            self._close_those_of([ended for ended in list(self._objects) if not ended.is_alive()])
            own = self._objects[thread] = self._make()
        return own

    def drop(self) -> None:
        """Close this thread's object; the next `get` makes a new one."""
        self._close_those_of([threading.current_thread()])

    def close(self) -> None:
        """Close all objects; no other thread may be using its own."""
        self._close_those_of(list(self._objects))

    def _close_those_of(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            # Popped before it is closed: `pop` is atomic, so of two threads one closes it.
            unused = self._objects.pop(thread, None)
            if unused is not None:
                self._close(unused)

    def forget(self) -> None:
        """Drop the objects without closing them: after a fork they belong to the parent process."""
        _left_behind.append(self._objects)
        self._objects = {}


def _after_fork() -> None:
    for each in list(_living):
        each.forget()


os.register_at_fork(after_in_child=_after_fork)
