"""Errors that a user can fix, and the exit code of all others.

The message of an error that a user can fix states the subject, what was given and what would work.
"""

from __future__ import annotations

FAULT = 70
"""Exit code of a process that fails, or that ends because another rank has failed (``EX_SOFTWARE`` of sysexits.h)."""


class RequestError(ValueError):
    """The request is invalid: nothing was started or written.

    Commands print its message without a traceback and exit with code 2.
    """


class RendezvousError(RequestError):
    """The ranks of a job did not come together; every rank may report it, because nothing has started."""


class LostPeerError(RuntimeError):
    """Another rank has closed its connection, because it failed or was killed; that rank reports why."""


class NoMapError(RequestError):
    """The model does not pool a feature map into its output, so that positions have no contributions."""


class GatherError(RequestError):
    """Every rank would gather a map larger than ``plan.gather_bytes``; the message says how much is needed."""


class MemoryLimitError(RequestError):
    """``plan.memory_bytes`` is too small; the message says how much is needed.

    Attributes:
        least_bytes: the smallest limit that would be enough; 0 if that was not computed.
    """

    def __init__(self, message: str, least_bytes: int = 0) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
