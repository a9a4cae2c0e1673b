"""Actions of a failing rank, after it has reported its error and before it ends all ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

# Weak, because a method that is kept here would keep its object, such as a writer with gigabytes of buffers.
_actions: list[weakref.WeakMethod[Callable[[], Any]]] = []


def add(action: Callable[[], Any]) -> None:
    """Call a method if this process fails as a rank and its object still exists.

    Args:
        action: Must be quick and may not communicate; its errors are ignored.
    """
    _actions.append(weakref.WeakMethod(action))


def run_actions() -> None:
    """Call all methods that were added."""
    for reference in _actions:
        action = reference()
        if action is not None:
            # The first error is reported already: another one must not keep this rank from ending the others.
            with contextlib.suppress(Exception):
                action()
