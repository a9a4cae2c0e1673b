"""Runs a command and exits with its exit code; sets what a request to stop does while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import typer

from hyfi_core.runtime.launch import inside_launcher
from workflows import signals
from workflows.console import ignore_closed_stdout
from workflows.exit_codes import exit_code_of
from workflows.paths import require_writable


def exit_with(command: Callable[[], int], writes: Path | None = None, as_ranks: bool = False) -> NoReturn:
    """Run a command and exit with its exit code.

    Args:
        command: Does the work and returns the exit code.
        writes: The command's output path, checked before it runs.
        as_ranks: Whether a launcher may run this command as several ranks. Ranks only remember a request to stop, and
            act on it together.
    """

    def prepare() -> None:
        """Set what a request to stop and a closed standard output do; check the output path."""
        if as_ranks and inside_launcher():
            # One of several ranks: all must stop at the same step.
            signals.remember_requests()
        else:
            signals.interrupt_on_request()
        if writes is not None or as_ranks:
            # What it writes is worth more than what it prints: `| head` must not end it.
            ignore_closed_stdout()
        if writes is not None:
            require_writable(writes)

    raise typer.Exit(exit_code_of(command, prepare))
