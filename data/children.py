"""Child processes that are not ranks: they end with their parent and inherit no launcher variables."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from hyfi_core.job_limits import SLURM_LIMITS

_PR_SET_PDEATHSIG = 1  # prctl(2)
# Variables from which a process learns its rank; child processes must not see them.
_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "MPI_", "HYDRA_", "HYDI_", "SLURM_", "TORCHELASTIC_")
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def import_safely() -> None:
    """Keep the current folder off the module search path of all processes that this one starts.

    Otherwise each of them would import and execute a ``secrets.py`` or ``data.py`` in the folder of a user's slides.
    """
    os.environ["PYTHONSAFEPATH"] = "1"


def open_closed_streams() -> None:
    """Open closed standard streams (input, output, error) on the null device, for this process and its children.

    Otherwise the next opened file would get a stream's descriptor, and libraries would print into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # POSIX: `open` returns the lowest free descriptor: 0, 1 and 2 in this order.
            number = os.open(os.devnull, os.O_RDWR)
            # By default, descriptors that Python opens are closed in child processes.
            os.set_inheritable(number, True)
            # "backslashreplace", as Python's own stderr: file names that are not UTF-8 must not make a print fail.
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace"))


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent ends for any reason. Linux only; ignored elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        # `CDLL(None)` is the process itself: libc is loaded already, and its file has another name on musl.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def child_environment() -> dict[str, str]:
    """Return the environment for a child process: this one's, with its module search path, without launcher variables.

    Variables that limit the memory or cores of a Slurm job stay.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in SLURM_LIMITS or not (name.startswith(_LAUNCHER_PREFIXES) or name in _RANK_VARIABLES)
    }
    # An empty entry means the current folder; children may run in another one, so write it out.
    return variables | {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
