"""Exponential backoff for polling: a long wait must not occupy a core."""

from __future__ import annotations

import time
from collections.abc import Callable

from hyfi_core.comm.activity import ACTIVITY


class Backoff:
    """Pauses that double from ``first_s`` to ``max_s`` seconds until ``reset``."""

    def __init__(self, first_s: float = 1e-3, max_s: float = 10e-3) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    def pause(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Sleep, and double the next pause; ``sleep`` is called with the seconds and may return early."""
        ACTIVITY.idle_s = time.monotonic()
        sleep(self._next_s)
        self._next_s = min(self._max_s, self._next_s * 2)

    def reset(self) -> None:
        """Start again with the shortest pause; call it after every success."""
        ACTIVITY.count += 1
        self._next_s = self._first_s
