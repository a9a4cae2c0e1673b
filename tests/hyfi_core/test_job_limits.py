"""Limits of memory and processors: control groups of both versions, Slurm, the shell."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hyfi_core.job_limits import MemoryLimit, available_memory, memory_limits, usable_cores

GB = 10**9


def make_proc(folder: Path, groups: str, mounts: str) -> Path:
    """Write what proc(5) has of a process, with its machine's 64 GB."""
    proc = folder / "proc" / "self"
    proc.mkdir(parents=True)
    (proc.parent / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {64 * GB // 1024} kB\n")
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text(mounts)
    (proc / "status").write_text("Name:\tpython\nVmSize:\t 1000 kB\nVmData:\t 500 kB\n")
    return proc


def write_group(folder: Path, **files: str | int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def of_groups(proc: Path) -> list[MemoryLimit]:
    return [limit for limit in memory_limits({}, proc) if "control group" in limit.source]


def test_groups_of_version_2_count_with_those_above(tmp_path: Path) -> None:
    mount = tmp_path / "cg"
    proc = make_proc(tmp_path, "0::/slurm/job_7/step_0\n", f"31 23 0:28 / {mount} rw - cgroup2 cgroup2 rw\n")
    write_group(mount / "slurm/job_7/step_0", memory__max="max", memory__current=GB)
    write_group(mount / "slurm/job_7", memory__max=8 * GB, memory__current=3 * GB)
    (mount / "slurm/job_7/memory.stat").write_text(f"anon 5\ninactive_file {GB}\n")
    write_group(mount / "slurm", memory__max=40 * GB, memory__current=GB, cpu__max="250000 100000")
    (mount / "slurm/job_7/cpu.max").write_text("max 100000\n")
    assert of_groups(proc) == [
        MemoryLimit(6 * GB, f"by the limit of control group {mount / 'slurm/job_7'}"),
        MemoryLimit(39 * GB, f"by the limit of control group {mount / 'slurm'}"),
    ]
    assert usable_cores(proc) == min(3, len(os.sched_getaffinity(0)))


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    """Version 1, with the path of the host in /proc/self/cgroup and only the own group mounted."""
    mount = tmp_path / "memory"
    groups = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=systemd:/\n"
    mounts = (
        "34 31 0:31 / /scratch rw - tmpfs  rw\n"  # a file system without a source
        f"35 31 0:32 /docker/abc {mount} rw shared:9 - cgroup cgroup rw,memory\n"
        f"36 31 0:33 /docker/abc {tmp_path / 'cpu'} rw - cgroup cgroup rw,cpu,cpuacct\n"
    )
    proc = make_proc(tmp_path, groups, mounts)
    write_group(mount, memory__limit_in_bytes=4 * GB, memory__usage_in_bytes=5 * GB)
    write_group(tmp_path / "cpu", cpu__cfs_quota_us=100000, cpu__cfs_period_us=100000)
    assert [limit.free_bytes for limit in of_groups(proc)] == [0]
    assert usable_cores(proc) == 1
    write_group(tmp_path / "cpu", cpu__cfs_quota_us=-1)
    assert usable_cores(proc) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({"SLURM_MEM_PER_NODE": "4096"}, 4096 * 2**20),
        ({"SLURM_MEM_PER_CPU": "1000", "SLURM_CPUS_ON_NODE": "3"}, 3000 * 2**20),
        ({"SLURM_MEM_PER_NODE": "0", "SLURM_MEM_PER_CPU": "many"}, None),
        ({"SLURM_MEM_PER_CPU": "1000"}, None),
    ],
)
def test_limits_of_slurm(environment: dict[str, str], wanted: int | None, tmp_path: Path) -> None:
    found = [limit for limit in memory_limits(environment, make_proc(tmp_path, "", "")) if "SLURM" in limit.source]
    assert [limit.free_bytes for limit in found] == ([] if wanted is None else [wanted])


def test_limits_of_the_shell_are_those_of_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: (2 * GB, 4 * GB), resource.RLIMIT_DATA: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    _machine, *found = memory_limits({}, make_proc(tmp_path, "", ""))
    assert found == [MemoryLimit(2 * GB - 1000 * 1024, "by ulimit -v", per_process=True)]


def test_a_real_limit_of_the_shell_is_seen() -> None:
    """Without one of its own, what a process may take is what its job may take."""
    program = "from hyfi_core.job_limits import available_memory as a; print(a().source, '|', a(process=False).source)"
    command = f'ulimit -v 500000; exec {sys.executable} -c "{program}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    own, together = done.stdout.strip().split("|")
    assert own.strip() == "by ulimit -v" and "ulimit" not in together
    assert available_memory().free_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
