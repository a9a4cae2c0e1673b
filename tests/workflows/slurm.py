"""A real Slurm of virtual nodes on this machine, on loopback, started and ended by process ids."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={job}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
TmpFS={folder}/tmp-%n
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=30
SlurmdTimeout=15
JobRequeue=1
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=4000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=node[1-{nodes}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES PreemptMode=OFF
PartitionName=idle Nodes=node[1-{nodes}] PriorityTier=1 GraceTime=60 State=UP
PartitionName=urgent Nodes=node[1-{nodes}] PriorityTier=9 State=UP
"""


class Slurm:
    """The daemons and their configuration.

    Args:
        folder: for configuration, state and logs.
        nodes: how many.

    Attributes:
        environment: by which commands find this Slurm.
        slurmd: daemon of each node, by the node's name.
    """

    def __init__(self, folder: Path, nodes: int = 2) -> None:
        self.folder, self._daemons = folder, list[subprocess.Popen[bytes]]()
        self._names = [f"node{number}" for number in range(1, nodes + 1)]
        self.slurmd: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def start(self) -> None:
        """Start munge, the controller and the nodes; return when jobs can run."""
        for name in ("state", *(f"{kind}-{node}" for kind in ("tmp", "spool") for node in self._names)):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        (port, first), host, nodes = (
            _free_ports(len(self._names)),
            socket.gethostname().partition(".")[0],
            len(self._names),
        )
        # MPICH finds the shared memory that killed ranks of a job with the same number left in /dev/shm.
        values = {"job": random.randrange(1000, 60_000_000), "port": port, "first": first}
        values |= {"last": first + nodes - 1, "nodes": nodes}
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(host=host, folder=self.folder, **values))
        munge = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        self._daemon(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={self.folder / 'munge.key'}",
            f"--socket={munge['socket']}",
            f"--pid-file={munge['pid']}",
            f"--log-file={munge['log']}",
            f"--seed-file={munge['seed']}",
        )
        _wait_for(munge["socket"].exists, "munged")
        self._daemon("slurmctld", "-D")
        for node in self._names:
            self.begin_node(node)
        _wait_for(lambda: set(self.run("sinfo", "-h", "-o", "%T").split()) == {"idle"}, "the nodes")

    def begin_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self.slurmd[node] = self._daemon("slurmd", "-D", "-N", node)

    def run(self, *words: str) -> str:
        """Return what one of Slurm's commands prints."""
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S).stdout

    def state(self, job: str) -> tuple[str, int]:
        """Return (state, how often it was started again) of a job."""
        shown = dict(
            word.split("=", 1) for word in self.run("scontrol", "-o", "show", "job", job).split() if "=" in word
        )
        return shown.get("JobState", ""), int(shown.get("Restarts", 0))

    def only_running_job(self) -> str:
        """Return the number of the one job that runs; jobs that have just ended may still be completing."""
        running: list[str] = []

        def is_alone() -> bool:
            running[:] = self.run("squeue", "-h", "-t", "RUNNING", "-o", "%A").split()
            return len(running) == 1

        _wait_for(is_alone, "one running job")
        return running[0]

    def stop(self) -> None:
        """End all jobs, then all daemons."""
        self.run("scancel", "--state=RUNNING", "--full", "--signal=KILL")
        self.run("scancel", "-u", "root")
        with suppress(AssertionError):
            _wait_for(lambda: not self.run("squeue", "-h").strip(), "jobs to end", 10)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, *words: str) -> subprocess.Popen[bytes]:
        said = (self.folder / f"{len(self._daemons)}-{words[0]}.out").open("wb")
        self._daemons.append(
            subprocess.Popen(words, env=self.environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        )
        said.close()
        return self._daemons[-1]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm with two idle nodes; skips where its programs are missing or may not be started."""
    with running_slurm(tmp_path_factory.mktemp("slurm"), 2) as cluster:
        yield cluster


@contextmanager
def running_slurm(folder: Path, nodes: int) -> Iterator[Slurm]:
    """A Slurm with idle nodes; skips as ``slurm``."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        pytest.skip(f"no Slurm here ({', '.join(missing)} missing): apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("slurmd starts jobs as root only")
    cluster = Slurm(folder, nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _free_ports(nodes: int) -> tuple[int, int]:
    """Return a free port, and the first of as many free ports that follow each other."""
    while True:
        with ExitStack() as held, suppress(OSError, OverflowError):
            alone, *row = [held.enter_context(socket.socket()) for _ in range(nodes + 1)]
            alone.bind(("127.0.0.1", 0))
            row[0].bind(("127.0.0.1", 0))
            first = int(row[0].getsockname()[1])
            for offset, other in enumerate(row[1:], 1):
                other.bind(("127.0.0.1", first + offset))
            return int(alone.getsockname()[1]), first


def _wait_for(ready: object, what: str, timeout_s: float = PATIENCE_S) -> None:
    assert callable(ready)
    deadline_s = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline_s, f"waited for {what}"
        time.sleep(0.1)
