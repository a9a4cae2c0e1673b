"""A cache, of limited size, of values computed from the slides used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

_LOCK = threading.Lock()  # one for all caches: these are pickled for decoding processes, and a lock cannot be pickled


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
        """Return the value of the slide ``index``, from the cache or else from ``make``.

        Threads may call it at the same time: two may both make the value of a slide, but they get the same one.
        """
        with _LOCK:
            if index in self._values:
                self._values.move_to_end(index)
                return self._values[index]
        # Outside the lock, because other threads need other values while this one reads a slide.
        made = make()
        with _LOCK:
            # The first value stays, so that all threads share its memory.
            value = self._values.setdefault(index, made)
            if value is made:
                self._kept_bytes += self._bytes_of(value)
            self._values.move_to_end(index)
            while self._kept_bytes > self._most_bytes and len(self._values) > 1:
                self._kept_bytes -= self._bytes_of(self._values.popitem(last=False)[1])
        return value
