"""Current activity of this process, read by the thread that detects ranks that wait forever.

Updates are plain assignments and cost almost nothing; text is created only on request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Wait:
    """One wait of this process for other ranks.

    Attributes:
        what: returns a description: ``an exchange with ranks 1, 3``.
        since_s: when it began, by ``time.monotonic``.
        on_end: called at its end, if not None.
        nbytes: size of the messages that it waits for.
    """

    what: Callable[[], str]
    since_s: float
    on_end: Callable[[], None] | None = None
    nbytes: int = 0


@dataclass
class Activity:
    """The current activity of a process.

    Attributes:
        step: the current training step; a resumed run first sets it to the step of its checkpoint.
        begun: number of training steps that this process has begun.
        action: the current action, any object with a text form; None outside of steps.
        wait: the current wait for other ranks; None while it does not wait.
        count: number of events in a service, such as messages received and files written.
        idle_s: when it last paused because it had nothing to do, by ``time.monotonic``.
        slow: actions in progress that may take long without any event, the latest last.
        helpers: ids of the child processes that work for this one.
    """

    step: int = 0
    begun: int = 0
    action: Any = None
    wait: Wait | None = None
    count: int = 0
    idle_s: float = float("-inf")
    slow: list[str] = field(default_factory=list)
    helpers: set[int] = field(default_factory=set)

    def begin_step(self) -> None:
        """Record the begin of a training step."""
        self.step += 1
        self.begun += 1

    @contextmanager
    def slowly(self, action: str) -> Iterator[None]:
        """Record an action that may take many minutes without any event: compiling, writing to a slow disk."""
        self.slow.append(action)
        try:
            yield
        finally:
            self.slow.remove(action)
            # Its end is an event: otherwise the stall rule would count the time of the action as time without progress.
            self.count += 1

    @contextmanager
    def waiting(self, describe: Callable[[], str], nbytes: int = 0) -> Iterator[None]:
        """Record a wait during the body.

        Args:
            describe: returns what is waited for; called only if that is shown.
            nbytes: size of the messages that it waits for.
        """
        self.wait = wait = Wait(describe, time.monotonic(), nbytes=nbytes)
        try:
            yield
        finally:
            self.wait = None
            if wait.on_end is not None:  # set by the thread that has reported this wait
                wait.on_end()

    def where(self) -> str:
        """Return the place in the program: ``step 3, F0.s1.d0``."""
        words: list[str] = []
        if self.step:
            words.append(f"step {self.step}")
        elif self.action is None:  # a service, such as a loader, has actions without steps
            words.append("before the first step")
        if self.action is not None:
            words.append(str(self.action))
        return ", ".join(words + self.slow)


ACTIVITY = Activity()
"""Activity of this process. Ranks as threads share it and do not read it."""


def named_ranks(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []  # [first, last] of consecutive ranks
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
