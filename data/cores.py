"""The number of CPU cores of this process, and whether they are enough for its threads."""

from __future__ import annotations

from hyfi_core import job_limits


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use, at least 1; see ``job_limits.usable_cores``."""
    return job_limits.usable_cores()


def describe_excess_threads(threads: int, cores: int) -> str | None:
    """Return a warning if a process has more threads than cores, with what to do; None if it has not."""
    if threads <= cores:
        return None
    return (
        f"{threads} threads on {cores} core{'s' if cores > 1 else ''}: they take turns; let the launcher give each "
        f"rank {threads} cores (Open MPI: mpiexec --bind-to none or --map-by slot:PE={threads}; srun: "
        f"--cpus-per-task={threads}), or set OMP_NUM_THREADS={cores}"
    )
