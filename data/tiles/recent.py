"""A cache of what was computed from the slides used last, in limited memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

_LOCK = threading.Lock()  # one for all caches, which are sent to decoding processes: a lock of their own could not be


class Recent(Generic[T]):
    """Keeps values of the slides used last; others are computed again when they are needed.

    Args:
        most_bytes: Limit of all values together; the last one stays, however large.
        bytes_of: Returns the bytes of a value.
    """

    def __init__(self, most_bytes: int, bytes_of: Callable[[T], int]) -> None:
        self._most_bytes, self._bytes_of = most_bytes, bytes_of
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._kept_bytes = 0

    def get(self, index: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a slide, made now if it is not kept; ``index``: names the slide.

        Threads may call it at the same time: two that need the same value may both make it, and get the same one.
        """
        with _LOCK:
            if index in self._values:
                self._values.move_to_end(index)
                return self._values[index]
        # Outside the lock: making a value may read a slide, and other threads need other values meanwhile.
        made = make()
        with _LOCK:
            # The first one stays, so that all threads share one memory.
            value = self._values.setdefault(index, made)
            if value is made:
                self._kept_bytes += self._bytes_of(value)
            self._values.move_to_end(index)
            while self._kept_bytes > self._most_bytes and len(self._values) > 1:
                self._kept_bytes -= self._bytes_of(self._values.popitem(last=False)[1])
        return value
