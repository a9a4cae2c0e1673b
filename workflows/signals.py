"""Requests to stop: what SIGTERM, SIGUSR1 and Ctrl-C do, from the first line of a command to its last.

::

    first lines    a process alone ends at once with code 3: nothing has begun.   A rank remembers the request.
    body           a process alone is interrupted (KeyboardInterrupt).            A rank remembers the request; all
                                                                                  ranks act on it together.

A rank must never leave alone: its peers would wait for it, in MPI's start-up or in their next exchange. Only the
standard library is imported here, so that a rank listens before anything slow is loaded.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from hyfi_core.runtime.launch import inside_launcher
from workflows.exit_codes import STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_requested = False


def requested() -> bool:
    """Whether this process has been asked to stop since it began to remember such requests."""
    return _requested


def request() -> None:
    """Act as if a signal to stop had been received."""
    global _requested
    _requested = True


def listen_from_start() -> None:
    """Answer requests in the first lines of a command, whatever it turns out to be."""
    _handle(_remember if inside_launcher() else _exit)


def interrupt_on_request() -> None:
    """Raise KeyboardInterrupt in the main thread on a request; for single processes."""
    _handle(_interrupt)


def remember_requests() -> None:
    """Only remember a request, see :func:`requested`: for a rank, which stops together with all others."""
    _handle(_remember)


def ignore_requests() -> None:
    """Ignore further requests, also while the interpreter shuts down: for a rank that is about to leave.

    A launcher that sees the first rank leave with the code of a stop may end the others (``srun --kill-on-bad-exit``),
    whose own code would be lost.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"hyfi: stopped on request\n")
    os._exit(STOPPED)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _remember(number: int, frame: FrameType | None) -> None:
    request()
