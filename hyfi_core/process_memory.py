"""The memory of this process and this machine; loads nothing but the standard library."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_LARGE_BYTES = 2**20
_KEPT_BYTES = 2**23


def resident_bytes() -> int:
    """Return what this process holds now; 0 where the system does not tell (proc(5))."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def return_what_is_freed() -> None:
    """Have the C library give large blocks back to the system when they are freed, and share its heaps.

    By default glibc keeps blocks of up to 32 MB, and a heap for each thread: a tenth to a fifth more memory here. Of
    small blocks 8 MB are kept: to get them anew for every tile costs a third of the system's time.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_M_ARENA_MAX, 2)


def available_bytes() -> int:
    """Return the memory that is free on this machine, or in this container where that is less."""
    amounts = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        amounts += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):
        amounts.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return max(0, min(amounts))
