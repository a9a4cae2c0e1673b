"""The number of CPU cores of this process."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use (its affinity mask), at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
