"""Limits of memory and processors that a job sets for this process; standard library only.

    machine      /proc/meminfo, the cores of the affinity mask (which a cpuset sets)
    container    control groups of this process and those above it, version 1 and 2
    Slurm        SLURM_MEM_PER_NODE, SLURM_MEM_PER_CPU × SLURM_CPUS_ON_NODE
    shell        ulimit -v, ulimit -d: for each process; all others: for a job's processes on this machine together

A process that takes more memory is killed without a message, so every forecast is compared with the smallest limit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SLURM_LIMITS = ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")
"""Variables of Slurm that stay in the environment when a launcher's other variables are removed."""
_SELF = Path("/proc/self")
_MIB = 2**20


@dataclass(frozen=True)
class MemoryLimit:
    """A limit of memory.

    Attributes:
        free_bytes: memory that may still be taken.
        source: where the limit is set; ends the phrase "free on HOST".
        per_process: whether each process has this limit for itself.
    """

    free_bytes: int
    source: str
    per_process: bool = False


def memory_limits(environment: Mapping[str, str] = os.environ, proc: Path = _SELF) -> list[MemoryLimit]:
    """Return all limits of memory that hold for this process, the machine's own first.

    Args:
        environment: variables in which Slurm states what a job may use.
        proc: the folder of this process in proc(5).
    """
    return [_of_machine(proc), *_of_groups(proc), *_of_slurm(environment), *_of_shell(proc)]


def available_memory(process: bool = True) -> MemoryLimit:
    """Return the limit that leaves the least memory.

    Args:
        process: whether limits of each single process count, too; if not, the result is for all processes of a job.
    """
    limits = (limit for limit in memory_limits() if process or not limit.per_process)
    return min(limits, key=lambda limit: limit.free_bytes)


def usable_cores(proc: Path = _SELF) -> int:
    """Return the number of cores that this process may use, at least 1: its affinity mask, or a smaller quota."""
    counts = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for folder, version in _groups(proc, "cpu"):
        with suppress(OSError, ValueError):
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                # Rounded up, because a part of a core can be used, too.
                counts.append(math.ceil(int(quota) / int(period)))
    return max(1, min(counts))


def _of_machine(proc: Path) -> MemoryLimit:
    amounts = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError, ValueError):
        amounts.append(_kib(proc.parent / "meminfo", "MemAvailable:"))
    return MemoryLimit(min(amounts), "")


def _of_groups(proc: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's control groups; cached pages of files count as free: the kernel drops them."""
    for folder, version in _groups(proc, "memory"):
        limit, usage, cached = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        with suppress(OSError, ValueError):
            # The file of a group without a limit has "max", which is no number, so nothing is yielded.
            free = int((folder / limit).read_text()) - int((folder / usage).read_text())
            with suppress(OSError, ValueError):
                free += _number(folder / "memory.stat", cached)
            yield MemoryLimit(max(0, free), f"by the limit of control group {folder}")


def _groups(proc: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield (folder, version) of the control groups of this process and of those above it; see cgroups(7)."""
    paths: dict[int, str] = {}
    with suppress(OSError):
        for line in (proc / "cgroup").read_text().splitlines():
            # number:controllers:path; version 2 has one line, without controllers.
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                paths[1] = path
            elif not controllers:
                paths[2] = path
    for version, root, mounted in _mounts(proc, controller) if paths else ():
        if version not in paths:
            continue
        group = Path(paths[version])
        # A container may see only its own group, mounted as the root, and not the groups above it.
        folder = mounted / group.relative_to(root) if group.is_relative_to(root) else mounted
        yield folder, version
        yield from ((above, version) for above in folder.parents if above.is_relative_to(mounted))


def _mounts(proc: Path, controller: str) -> Iterator[tuple[int, Path, Path]]:
    """Yield (version, root within the hierarchy, mount point) of the mounts of a controller."""
    with suppress(OSError):
        for line in (proc / "mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            _, _, _, root, mount_point, *_ = before.split()
            kind, _, options = after.split(" ", 2)  # the second, the source, may be empty
            if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
                yield (2 if kind == "cgroup2" else 1), Path(root), Path(mount_point)


def _of_slurm(environment: Mapping[str, str]) -> Iterator[MemoryLimit]:
    """Yield the memory limits of a Slurm job on this node; none for a value of 0: all of the node's memory."""
    with suppress(KeyError, ValueError):
        if per_node := int(environment["SLURM_MEM_PER_NODE"]) * _MIB:
            yield MemoryLimit(per_node, "by SLURM_MEM_PER_NODE (sbatch --mem)")
    with suppress(KeyError, ValueError):
        cpus = int(environment["SLURM_CPUS_ON_NODE"])
        if per_cpu := int(environment["SLURM_MEM_PER_CPU"]) * _MIB:
            yield MemoryLimit(per_cpu * cpus, "by SLURM_MEM_PER_CPU (sbatch --mem-per-cpu)")


def _of_shell(proc: Path) -> Iterator[MemoryLimit]:
    """Yield how much memory the limits leave that ``ulimit`` has set for this process."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    for name, used, command in (("RLIMIT_AS", "VmSize:", "ulimit -v"), ("RLIMIT_DATA", "VmData:", "ulimit -d")):
        limit = resource.getrlimit(getattr(resource, name))[0]
        if limit != resource.RLIM_INFINITY:
            with suppress(OSError, ValueError):
                yield MemoryLimit(max(0, limit - _kib(proc / "status", used)), f"by {command}", per_process=True)


def _kib(file: Path, name: str) -> int:
    """Return an amount in bytes that a file of proc(5) states in KiB."""
    return 1024 * _number(file, name)


def _number(file: Path, name: str) -> int:
    """Return the number behind a name at the beginning of a line.

    Raises:
        ValueError: there is no such line.
    """
    for line in file.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    raise ValueError(f"{file} has no line {name}")
