"""Waiting without occupying a core: a long wait polls less and less often."""

from __future__ import annotations

import time
from collections.abc import Callable


class Backoff:
    """A pause that doubles from ``first_s`` to ``most_s`` and is reset after every success."""

    def __init__(self, first_s: float = 1e-3, most_s: float = 10e-3) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._next_s = first_s

    def pause(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Sleep; the next pause is twice as long. ``sleep``: another way to, which may wake up early."""
        sleep(self._next_s)
        self._next_s = min(self._most_s, self._next_s * 2)

    def reset(self) -> None:
        """Something has happened: begin with the short pause again."""
        self._next_s = self._first_s
