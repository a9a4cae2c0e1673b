"""Child processes that are no ranks: they die with their parent and find no launcher in their environment."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)
# By these a process finds its place among the ranks; a child has none.
_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "MPI_", "HYDRA_", "HYDI_", "SLURM_", "TORCHELASTIC_")
_PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent ends, however that ends. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def environment_of_a_child() -> dict[str, str]:
    """Return the environment of a process that is no rank, with this process's search path for modules."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(_LAUNCHERS) and n not in _PLACES}
    return kept | {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
