"""Memory of this process and this machine; standard library only."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from hyfi_core.job_limits import available_memory

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_LARGE_BYTES = 2**20
_KEPT_BYTES = 2**23
_HEAP_BLOCK_BYTES = 2**25
"""The largest block that glibc's heap can have (``DEFAULT_MMAP_THRESHOLD_MAX``)."""


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 if unknown (see proc(5))."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def peak_bytes() -> int:
    """Return the peak of resident memory since the process began, or since ``forget_peak``; Linux only.

    Raises:
        OSError: the peak is unknown on this system.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM: the peak is known on Linux only")


def forget_peak() -> None:
    """Reset the peak to the current resident memory; Linux only.

    Raises:
        OSError: this system cannot.
    """
    Path("/proc/self/clear_refs").write_text("5")


def return_what_is_freed(large_bytes: int = _LARGE_BYTES) -> None:
    """Configure glibc to return large freed blocks to the system, and threads to share heaps.

    By default glibc keeps blocks of up to 32 MB, and a heap for each thread, which takes 10 to 20 % more memory here.
    Up to 8 MB of small blocks are kept: allocating them again for every tile costs a third of the system time.

    Args:
        large_bytes: Size from which a block is returned when it is freed. The system fills such blocks with zeros when
            they are allocated again, which costs up to 40 % of the time of small networks.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        # By default glibc raises this threshold when large blocks are freed; once set, it stays (mallopt(3)).
        library.mallopt(_M_MMAP_THRESHOLD, large_bytes)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_M_ARENA_MAX, 2)


def keep_what_is_freed() -> None:
    """Configure glibc to keep all freed blocks of up to 32 MB, as it does by default after a few steps.

    Otherwise short measurements include the time in which the system maps the same pages again and again.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _HEAP_BLOCK_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 2**30)


def return_freed_now() -> None:
    """Return to the system the freed memory that glibc and MKL keep.

    MKL keeps about 4 MB for each thread that has multiplied matrices, until the thread ends.
    """
    # MKL first, so that glibc can then return the buffers that MKL frees.
    free_buffers = _mkl_free_buffers()
    if free_buffers is not None:
        free_buffers()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _mkl_free_buffers() -> Callable[[], Any] | None:
    """Return MKL's function that frees the buffers of all threads; None if torch is not loaded, or has no MKL."""
    torch = sys.modules.get("torch")
    if torch is None or torch.__file__ is None:
        return None
    return _function_of(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so", "mkl_serv_free_buffers")


@cache
def _function_of(library: Path, name: str) -> Callable[[], Any] | None:
    """Return a function of a shared library; None if there is no such library or function."""
    with suppress(OSError, AttributeError):
        function: Callable[[], Any] = getattr(ctypes.CDLL(str(library)), name)
        return function
    return None


def available_bytes() -> int:
    """Return the memory that this process may still take: of the machine, or less by a limit of the job."""
    return available_memory().free_bytes
