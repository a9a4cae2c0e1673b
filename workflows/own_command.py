"""Commands of this package that another command starts, as a user would."""

from __future__ import annotations

import functools
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from data.children import die_with_parent
from workflows.console import say, warn
from workflows.exit_codes import FAULT, STOPPED

_WATCHED_EVERY_S = 1.0
_SECONDS_TO_STOP_WATCHED = 600.0
"""How long a command may take to end after its ``watch`` has stopped it: a step, and a checkpoint that nobody needs."""


def run_command(
    arguments: Sequence[object], seconds_to_stop: float | None = None, watch: Callable[[], bool] | None = None
) -> int:
    """Run ``hyfi arguments…`` in a process of its own and return its exit code; `FAULT` if it was killed.

    A command that ``watch`` has stopped and that does not end by itself is killed; its code is `STOPPED`.

    Args:
        arguments: The command and its arguments, without ``hyfi``.
        seconds_to_stop: How long the command may take to end after Ctrl-C; None: as long as it needs.
        watch: Is called every second; the command is stopped when it returns True.

    Raises:
        KeyboardInterrupt: Stopped on request; the command has ended.
    """
    text = [str(argument) for argument in arguments]
    # Shortened: the paths of a large cohort would fill the terminal.
    shown = shlex.join(text) if len(text) < 12 else f"{shlex.join(text[:3])} … {shlex.join(text[-2:])}"
    say(f"$ hyfi {shown}")
    # In a new session, so that Ctrl-C reaches only this process, which then stops the command once.
    process = subprocess.Popen(
        [sys.executable, "-m", "workflows.cli", *text],
        start_new_session=True,
        preexec_fn=functools.partial(die_with_parent, signal.SIGTERM),
    )
    try:
        code = process.wait() if watch is None else _watched(process, watch)
    except KeyboardInterrupt:
        _stop(process, seconds_to_stop)
        raise
    # Popen's code of a process that a signal ended is negative.
    return code if code >= 0 else FAULT


def _watched(process: subprocess.Popen[bytes], watch: Callable[[], bool]) -> int:
    """Wait for the end of a command, which is stopped when ``watch`` returns True."""
    while True:
        try:
            return process.wait(timeout=_WATCHED_EVERY_S)
        except subprocess.TimeoutExpired:
            if watch():
                process.send_signal(signal.SIGTERM)
                break
    try:
        return process.wait(timeout=_SECONDS_TO_STOP_WATCHED)
    except subprocess.TimeoutExpired:
        warn(
            f"hyfi: the command did not end within {_SECONDS_TO_STOP_WATCHED:.0f} s after a request to stop, and was "
            "killed"
        )
        process.kill()
        process.wait()
        return STOPPED


def _stop(process: subprocess.Popen[bytes], seconds: float | None) -> None:
    """Ask a command to stop, and wait for its end; a second request, or too long a wait, kills it."""
    # Once it has ended, its id may be another process's.
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=seconds)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
