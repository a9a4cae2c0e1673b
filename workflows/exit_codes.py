"""Exit codes of all commands, and the mapping of exceptions to them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

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


def _warn(text: str) -> None:
    from workflows.console import warn

    warn(text)
