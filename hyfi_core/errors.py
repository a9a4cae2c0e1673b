"""Errors that a user can mend; each states the subject, what was given and what would work."""

from __future__ import annotations


class RequestError(ValueError):
    """The request itself is wrong: nothing was started and nothing was written.

    Commands answer it with its message alone, without a traceback, and exit code 2.
    """
