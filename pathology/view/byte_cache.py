"""A cache of arrays with a limit in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from numpy.typing import NDArray


class ByteCache:
    """Arrays by key; the least recently used are dropped first. Safe to use from several threads.

    Args:
        limit_bytes: Maximum size of all arrays together; a larger array is not cached.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._arrays: OrderedDict[Hashable, NDArray[Any]] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of all cached arrays."""
        return self._held_bytes

    def get(self, key: Hashable, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return the array of a key, from the cache or from ``make``; it is read-only.

        If two threads need the same missing array, both make it, instead of one waiting for the other.
        """
        with self._lock:
            cached = self._arrays.get(key)
            if cached is not None:
                self._arrays.move_to_end(key)
                return cached
        array = make()
        # Read-only, because several threads may hold the same array.
        array.flags.writeable = False
        with self._lock:
            # Not added twice if another thread was faster: counted twice, it would shrink the cache for good.
            if key not in self._arrays and array.nbytes <= self._limit_bytes:
                self._arrays[key] = array
                self._held_bytes += array.nbytes
                while self._held_bytes > self._limit_bytes:
                    self._held_bytes -= self._arrays.popitem(last=False)[1].nbytes
        return array
