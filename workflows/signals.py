"""Requests to stop: how a command handles SIGTERM, SIGUSR1 and Ctrl-C.

::

                         a single process                a rank of several
    while it imports     exits at once with code 3       remembers the request
    while it runs        KeyboardInterrupt               remembers the request; all ranks act on it together

A rank must not exit alone: its peers would wait for it, in MPI's start-up or in their next exchange. This module
imports little, so that the handlers are installed before anything slow is loaded.
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
    """Whether a request to stop has been remembered in this process."""
    return _requested


def request() -> None:
    """Remember a request to stop, as if a signal had been received."""
    global _requested
    _requested = True


def listen_from_start() -> None:
    """Install the handlers for the time before the command is known; see the table above."""
    _handle(_remember if inside_launcher() else _exit)


def interrupt_on_request() -> None:
    """Raise KeyboardInterrupt in the main thread on a request; for a single process."""
    _handle(_interrupt)


def remember_requests() -> None:
    """Only remember a request (see :func:`requested`); for a rank, which stops together with all others."""
    _handle(_remember)


def ignore_requests() -> None:
    """Ignore further requests until the process has exited; for a rank that is about to exit.

    When the first rank exits with the code of a stop, a launcher may signal the others (``srun --kill-on-bad-exit``),
    which would then exit with another code.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    # Not `print`: the handler may interrupt one, whose buffer is locked. `os._exit`, as imports may be half done.
    os.write(2, b"hyfi: stopped on request\n")
    os._exit(STOPPED)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _remember(number: int, frame: FrameType | None) -> None:
    request()
