"""Errors that a user can fix; the message states the subject, what was given and what would work."""

from __future__ import annotations


class RequestError(ValueError):
    """The request is invalid: nothing was started or written.

    Commands print its message without a traceback and exit with code 2.
    """
