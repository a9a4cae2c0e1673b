"""How long ranks wait for each other, from the environment; without torch, for launchers."""

from __future__ import annotations

import os

from hyfi_core.errors import RequestError

LIMIT_VARIABLE = "HYFI_TIMEOUT_S"
LIMIT_S = 1800.0


def time_limit_s() -> float:
    """Return how long a rank may wait for others, from ``HYFI_TIMEOUT_S``; 0 means forever.

    Raises:
        RequestError: the variable is not a number ≥ 0.
    """
    return seconds_of(LIMIT_VARIABLE, LIMIT_S)


def seconds_of(variable: str, default: float) -> float:
    """Return a number of seconds from the environment.

    Raises:
        RequestError: it is not a number ≥ 0.
    """
    text = os.environ.get(variable, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise RequestError(f"{variable} is {text!r}; use a number of seconds, or 0 for no limit")
    return seconds
