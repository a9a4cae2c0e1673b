"""Arrays that are kept while there is room, counted in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from numpy.typing import NDArray


class ByteCache:
    """Arrays by key; who was asked for longest ago leaves first. Threads may share one.

    Args:
        limit_bytes: of all arrays together; one that is larger than this is not kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._arrays: OrderedDict[Hashable, NDArray[Any]] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes of all arrays that are kept."""
        return self._held_bytes

    def get(self, key: Hashable, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return the array of a key, made where it is not kept; nobody may write to it.

        Two threads that miss at once both make it: neither waits for the other's disk.
        """
        with self._lock:
            found = self._arrays.get(key)
            if found is not None:
                self._arrays.move_to_end(key)
                return found
        made = make()
        made.flags.writeable = False
        with self._lock:
            if key not in self._arrays and made.nbytes <= self._limit_bytes:
                self._arrays[key] = made
                self._held_bytes += made.nbytes
                while self._held_bytes > self._limit_bytes:
                    self._held_bytes -= self._arrays.popitem(last=False)[1].nbytes
        return made
