"""The number of CPU cores of this process, and whether they are enough for its threads."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from hyfi_core import job_limits

if TYPE_CHECKING:
    from hyfi_core.comm.base import Communicator


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1; see ``job_limits.usable_cores``."""
    return job_limits.usable_cores()


def ranks_with_these_cores(comm: Communicator) -> int:
    """Return the number of ranks, this one included, that may use the same cores of the same host (collective)."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mine = [socket.gethostname(), cores]
    # Rank 0 gathers the hosts and cores of all ranks and broadcasts the list, in which each rank counts its own.
    return int(comm.broadcast_object(comm.gather_objects(mine)).count(mine))


def describe_excess_threads(threads: int, cores: int) -> str | None:
    """Return a warning if a process has more threads than cores, with what to do; None if it has not."""
    if threads <= cores:
        return None
    return (
        f"{threads} threads on {cores} core{'s' if cores > 1 else ''}: they take turns; let the launcher give each "
        f"rank {threads} cores (Open MPI: mpiexec --bind-to none or --map-by slot:PE={threads}; srun: "
        f"--cpus-per-task={threads}), or set OMP_NUM_THREADS={cores}"
    )
