"""Exit codes of all commands, and the mapping of exceptions to them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from hyfi_core.errors import FAULT, RequestError

__all__ = ["DONE", "FAULT", "SOME_FAILED", "STOPPED", "WRONG_REQUEST", "exit_code_of"]

DONE, SOME_FAILED, WRONG_REQUEST, STOPPED = 0, 1, 2, 3


def exit_code_of(body: Callable[[], int], prepare: Callable[[], None] | None = None) -> int:
    """Run ``body``; return its exit code, or that of the exception that ended it, reported on standard error.

    Args:
        body: Does the work and returns the exit code.
        prepare: Called before ``body``; its errors are reported in the same way.
    """
    try:
        _require_working_folder()
        if prepare is not None:
            prepare()
        return body()
    except RequestError as error:
        _warn(f"hyfi: {error}")
        return WRONG_REQUEST
    except KeyboardInterrupt:
        _warn("hyfi: stopped on request")
        return STOPPED
    except BrokenPipeError:
        # The reader of standard output has closed it (as in `hyfi … | head`): write nothing more.
        sys.stdout = None
        return FAULT
    except Exception as error:
        from workflows.out_of_memory import message_of

        memory = message_of(error)
        _warn(f"hyfi: {memory}" if memory else traceback.format_exc().rstrip())
        return FAULT


def _require_working_folder() -> None:
    """Check that the working folder exists: without it, no library finds its files, and relative paths mean nothing.

    Raises:
        RequestError: It was removed, and perhaps made again: a shell that was in it is still in the removed one.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        removed = "the working folder was removed; change to another one, or to the new one of its name"
        raise RequestError(f'{removed}: cd "$PWD"') from None


def _warn(text: str) -> None:
    from workflows.console import warn

    warn(text)
