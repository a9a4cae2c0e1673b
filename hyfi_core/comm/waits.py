"""Computations that wait for messages: generators that yield each communication that they need completed.

    steps     ── compute ── yield pending │          │ compute ── yield … ── return result
    driver                                │ waits ──▶│

A rank waits at each yield (``waited``). The cells of a process share one driver, which continues another cell instead:
see ``cells.lockstep``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, TypeVar

from hyfi_core.comm.base import Pending

T = TypeVar("T")
Waits: TypeAlias = Generator[Pending, None, T]
"""Yields pending communications, and continues when they have completed; returns a result."""
Context: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""Creates a context."""


class Driver(Protocol):
    """Runs the computations of a rank, or of one of its cells."""

    def run(self, steps: Waits[T]) -> T:
        """Return the result of a computation."""
        ...

    def within(self, context: Context, steps: Waits[T]) -> Waits[T]:
        """Return a computation in a context that other computations of the thread do not see."""
        ...


class OwnThread:
    """The driver of a rank: nothing else runs in its thread."""

    def run(self, steps: Waits[T]) -> T:
        """Return the result of a computation."""
        return waited(steps)

    def within(self, context: Context, steps: Waits[T]) -> Waits[T]:
        """Return a computation in a context, which is entered once."""
        with context():
            return (yield from steps)


def waited(steps: Waits[T]) -> T:
    """Run a computation and return its result; wait at each of its yields."""
    while True:
        try:
            pending = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        pending.wait()


def within(context: Context, steps: Waits[T]) -> Waits[T]:
    """Run a computation in a context that is left at each wait and entered again afterwards.

    Contexts such as ``torch.no_grad`` belong to the thread, in which other computations run during a wait.
    """
    while True:
        with context():
            try:
                pending = next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
        yield pending
