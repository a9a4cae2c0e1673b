"""An identifier of a process, from which other processes on the same machine can tell whether it has ended."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from functools import cache
from pathlib import Path


def this_process() -> str:
    """Return an identifier of this process: machine, pid, start time."""
    return f"{_machine()} {os.getpid()} {_started(os.getpid())}"


@cache
def _machine() -> str:
    """Return an identifier of this machine, boot and container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        # Two containers on one machine may have equal host names and process ids, but their namespaces differ.
        parts.append(re.sub(r"\D", "", str(Path("/proc/self/ns/pid").readlink())))
    return "/".join(parts).replace(" ", "_")


def _started(pid: int) -> str:
    """Return the kernel's start time of a process, or ``-``; it tells processes with the same pid apart."""
    try:
        # Field 22, counted from the name (field 2) in brackets, which may itself have blanks and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return "-"


def has_ended(token: str) -> bool:
    """Whether the process with this identifier was on this machine and has ended; False if that is unknown."""
    parts = token.split()
    if len(parts) != 4 or parts[0] != _machine() or not parts[1].isdigit():
        return False
    pid = int(parts[1])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    # With another start time, it is a new process with the same id. A zombie has ended, but its parent has not waited.
    return parts[2] != _started(pid) or _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False
