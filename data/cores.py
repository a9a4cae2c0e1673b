"""How many threads this process can keep busy."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the cores that this process may use, at least one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
