"""What this process is doing: noted where it happens, read by the thread that looks for ranks that wait forever.

Notes are plain assignments, so that they cost nothing on the way; text is made only when somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Wait:
    """One wait of this process for other ranks.

    Attributes:
        what: says what for, in words: ``an exchange with ranks 1, 3``.
        since_s: when it began, by ``time.monotonic``.
        ended: called when it is over; None: nothing is.
    """

    what: Callable[[], str]
    since_s: float
    ended: Callable[[], None] | None = None


@dataclass
class Activity:
    """What a process does now.

    Attributes:
        step: training steps begun.
        action: what of the step, anything with a text form; None outside of steps.
        wait: for other ranks, None while it does not wait.
    """

    step: int = 0
    action: Any = None
    wait: Wait | None = None

    @contextmanager
    def waiting(self, what: Callable[[], str]) -> Iterator[None]:
        """Note a wait for as long as the body takes."""
        self.wait = wait = Wait(what, time.monotonic())
        try:
            yield
        finally:
            self.wait = None
            if wait.ended is not None:
                wait.ended()

    def where(self) -> str:
        """Return the place in the program: ``step 3, F0.s1.d0``."""
        where = f"step {self.step}" if self.step else "before the first step"
        return where if self.action is None else f"{where}, {self.action}"


ACTIVITY = Activity()
"""That of this process. Thread-ranks share it and do not read it."""


def named_ranks(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
