"""Messages for out-of-memory errors and full disks: advice instead of a traceback.

::

    before the run, by the forecast     ──►  remember_advice(…), on every rank and for the launcher
    MemoryError, torch's allocator      ──►  message_of(error): the requested amount, and the advice
    a disk is full                      ──►  message_of(error): the file, and the room of its disk
    the disk of plan.spill is full      ──►  message_of(error): the message of the spill store
    a run whose disk or store is gone   ──►  message_of(error): see `workflows.interruption`
    a file that cannot be used          ──►  message_of(error): the file, and why
    killed by the kernel's OOM killer   ──►  the launcher sees `kernel_kills` rise, and prints the advice
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from hyfi_core.errors import RequestError
from workflows.interruption import RunInterruptedError, describe_file_error, describe_full_disk, file_of, is_full_disk
from workflows.launch.status import RunStatus

GENERAL_ADVICE = (
    "to need less memory, divide each image among more ranks (plan.grids, or --ranks), compute it in cells "
    "(plan.cells, or --cells R,C), use smaller images (data.size_px, data.mpp), or fewer roles.loaders and data.workers"
)
_ALLOCATOR = re.compile(r"can't allocate memory|not enough memory|out of memory|Cannot allocate memory|bad_alloc")
_REQUESTED = re.compile(r"[Aa]llocate ([\d.]+ \w+)")
_advice = ""


def remember_advice(text: str) -> None:
    """Set the advice for this process, and for the launcher that started it."""
    global _advice
    _advice = text
    status = RunStatus.from_environment()
    if status is not None:
        status.write_advice(text)


def advice() -> str:
    """Return how to need less memory: what `remember_advice` was given, else general advice."""
    return _advice or GENERAL_ADVICE


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or its cause, is an out-of-memory error of Python, NumPy or torch."""
    cause: BaseException | None = error
    while cause is not None:
        no_memory = isinstance(cause, OSError) and cause.errno == errno.ENOMEM
        # torch's allocator for CPUs raises a plain RuntimeError; only its text tells.
        by_torch = isinstance(cause, RuntimeError) and _ALLOCATOR.search(str(cause)) is not None
        if isinstance(cause, MemoryError) or no_memory or by_torch:
            return True
        # A library may catch the error and raise another one.
        cause = cause.__cause__ or cause.__context__
    return False


def message_of(error: BaseException) -> str | None:
    """Return the message for errors of memory, disks, files and interrupted runs; None for other errors."""
    if isinstance(error, RunInterruptedError):
        return str(error)
    if isinstance(error, OSError) and is_full_disk(error):
        return describe_full_disk(error, file_of(error))
    full_disk = _full_disk(error)  # of ``plan.spill``
    # Before memory: the error of a full disk may have one of memory in its context.
    if full_disk is not None:
        return full_disk
    if not is_out_of_memory(error):
        return describe_file_error(error)
    match = _REQUESTED.search(str(error))
    return f"out of memory{f' (when {_amount(match[1])} more were requested)' if match else ''}; {advice()}"


def _full_disk(error: BaseException) -> str | None:
    """Return the message of an error that a full disk of ``plan.spill`` caused; None for other errors."""
    current: BaseException | None = error
    while current is not None:
        cause = current.__cause__
        if isinstance(current, RequestError) and is_full_disk(cause):
            return str(error)
        # Only `__cause__`: what was raised `from` the full disk, not what merely happened after it.
        current = cause
    return None


def _amount(text: str) -> str:
    number, _, unit = text.partition(" ")
    return f"{int(number) / 1e9:.2g} GB" if unit == "bytes" and number.isdecimal() else text


def kernel_kills() -> int:
    """Return how many processes this machine's kernel has killed for lack of memory since it booted; 0 if unknown."""
    try:
        # The kernel counts kills of cgroups here, too, and the count needs no rights, unlike its log.
        match = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0
