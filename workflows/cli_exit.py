"""Runs a command and exits with its exit code; sets what a request to stop does while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import typer

from hyfi_core.runtime.launch import inside_launcher
from workflows import signals
from workflows.console import outlive_readers
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
        if as_ranks and inside_launcher():
            # A rank of several: it stops with the others.
            signals.remember_requests()
        else:
            signals.interrupt_on_request()
        if writes is not None or as_ranks:
            outlive_readers()
        if writes is not None:
            require_writable(writes)

    raise typer.Exit(exit_code_of(command, prepare))
