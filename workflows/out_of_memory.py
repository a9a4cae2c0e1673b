"""Out-of-memory errors end with advice instead of a traceback.

::

    before the run   the forecast   ──►  remember_advice(…), on every rank and beside the launcher's status files
    MemoryError, torch's allocator  ──►  message_of(error): the requested amount, and the advice
    a disk of plan.spill is full    ──►  message_of(error): the message of the store
    killed by the kernel            ──►  the launcher sees its count of such kills rise, and adds the advice
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

from hyfi_core.errors import RequestError
from workflows.launch.status import RunStatus

GENERAL_ADVICE = (
    "to need less memory, divide each image among more ranks (plan.grids, or --ranks), compute it in cells "
    "(plan.cells, or --cells R,C), use smaller images (data.size_px, data.mpp), or fewer roles.loaders and data.workers"
)
_ALLOCATOR = re.compile(r"can't allocate memory|not enough memory|out of memory|Cannot allocate memory|bad_alloc")
_WANTED = re.compile(r"[Aa]llocate ([\d.]+ \w+)")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_advice = ""


def remember_advice(text: str) -> None:
    """Store the advice for this process and the ranks of this launch."""
    global _advice
    _advice = text
    status = RunStatus.of_environment()
    if status is not None:
        status.note_advice(text)


def advice() -> str:
    """Return the advice."""
    return _advice or GENERAL_ADVICE


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or its cause, is an out-of-memory error of Python, NumPy or torch."""
    seen: BaseException | None = error
    while seen is not None:
        no_memory = isinstance(seen, OSError) and seen.errno == errno.ENOMEM
        by_torch = isinstance(seen, RuntimeError) and _ALLOCATOR.search(str(seen)) is not None
        if isinstance(seen, MemoryError) or no_memory or by_torch:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def message_of(error: BaseException) -> str | None:
    """Return the message for an out-of-memory error, or for a full disk of ``plan.spill``; None for other errors."""
    full_disk = _full_disk(error)
    if full_disk is not None:
        return full_disk
    if not is_out_of_memory(error):
        return None
    found = _WANTED.search(str(error))
    return f"out of memory{f' (when {_amount(found[1])} more were requested)' if found else ''}; {advice()}"


def _full_disk(error: BaseException) -> str | None:
    """Return what the store of ``plan.spill`` says of its full disk, as an error or as the cause of one."""
    seen: BaseException | None = error
    while seen is not None:
        cause = seen.__cause__
        if isinstance(seen, RequestError) and isinstance(cause, OSError) and cause.errno in _FULL:
            return str(error)
        seen = cause
    return None


def _amount(text: str) -> str:
    number, _, unit = text.partition(" ")
    return f"{int(number) / 1e9:.2g} GB" if unit == "bytes" and number.isdecimal() else text


def kernel_kills() -> int:
    """Return the number of processes killed by this machine's kernel for lack of memory; 0 if unknown."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
