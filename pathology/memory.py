"""How many workers the memory allows."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path

from data.cores import usable_cores
from hyfi_core.errors import RequestError

WORKER_BYTES = 1_000_000_000
"""What one worker needs at most, whatever the slide; see `workflows.benchmarks.ingest_memory`."""
_SHARE = 0.8
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_LARGE_BYTES = 2**20
_KEPT_BYTES = 2**23


def parse_bytes(text: str) -> int:
    """Return the bytes that ``8GB``, ``8 GiB``, ``800M`` or a plain number mean.

    Raises:
        RequestError: It is something else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not found:
        raise RequestError(f"--memory {text}: an amount such as 8GB or 1500M is expected")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " kmgt".index(found[2] or " "))


def worker_count(asked: int, memory_bytes: int | None) -> int:
    """Return how many workers there are to be.

    Args:
        asked: As the user says; 0: as many as there are cores.
        memory_bytes: What all of them may use; None: most of what is free.

    Raises:
        RequestError: The memory is too small for one.
    """
    workers = asked or usable_cores()
    if memory_bytes is not None and memory_bytes < WORKER_BYTES:
        raise RequestError(
            f"--memory {memory_bytes / 1e9:.2g} GB: one worker needs up to {WORKER_BYTES / 1e9:g} GB; give more"
        )
    budget = memory_bytes if memory_bytes is not None else int(_SHARE * available_bytes())
    return max(1, min(workers, budget // WORKER_BYTES))


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
