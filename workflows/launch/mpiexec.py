"""The process manager of an MPI (mpiexec): finding it, its command line, and filtering of its output."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from hyfi_core.errors import RequestError
from workflows.console import discard

NO_MPI = (
    "cannot start several ranks: mpiexec not found. Install it in this Python environment with "
    "`pip install 'hyfi[local]'` (MPICH), or load your cluster's MPI (`module load mpich` or `openmpi`) and start "
    "the command yourself: `srun hyfi …` or `mpiexec -n N hyfi …`"
)
ON_THIS_NODE = {"HYDRA_RMK": "user"}
"""Keeps MPICH's mpiexec from reading a job's list of nodes: it would start ranks there, or fail without the file."""


@dataclass(frozen=True)
class MpiExec:
    """A process manager: its path, and the MPI it belongs to."""

    path: Path
    flavour: str

    def command(self, ranks: int) -> list[str]:
        """Return the command line that starts ``ranks`` processes on this node, without their program."""
        arguments = [str(self.path), "-n", str(ranks)]
        if self.flavour == "Open MPI":
            # By default Open MPI refuses to run more ranks than cores, or as root; loaders need no core of their own.
            # It also binds one or two ranks to a core each, with all of their threads.
            arguments += ["--oversubscribe", "--bind-to", "none"]
            if os.geteuid() == 0:
                arguments.append("--allow-run-as-root")
        return arguments


def find_mpiexec() -> MpiExec:
    """Return the mpiexec in this Python's folder, else the first on the PATH.

    Raises:
        RequestError: There is none.
    """
    # That of the environment first: it belongs to the MPI that mpi4py of this environment loads.
    own = Path(sys.executable).parent / "mpiexec"
    path = str(own) if os.access(own, os.X_OK) else shutil.which("mpiexec")
    if path is None:
        raise RequestError(NO_MPI)
    return MpiExec(Path(path), _flavour(path))


def _flavour(path: str) -> str:
    """Return the name of the MPI that a process manager belongs to."""
    try:
        completed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RequestError(f"{path} --version failed ({error}). {NO_MPI}") from None
    text = completed.stdout + completed.stderr
    names = {"Open MPI": "Open MPI", "OpenRTE": "Open MPI", "Intel": "Intel MPI", "HYDRA": "MPICH (Hydra)"}
    return next((name for mark, name in names.items() if mark in text), "unknown")


def refuse_several_nodes(command: str, ranks: int) -> None:
    """Refuse to start ranks inside a job of several nodes, because they would all be on this node.

    Raises:
        RequestError: The job has several nodes; the message has the command that starts ranks on all of them.
    """
    system, nodes = _nodes_of_job()
    if nodes < 2:
        return
    start = f"mpiexec -n {ranks} hyfi {command} …"
    if system == "Slurm":
        pmi = "pmix" if find_mpiexec().flavour == "Open MPI" else "pmi2"
        start = f"srun --mpi={pmi} -n {ranks} hyfi {command} …`, or write a job script with `hyfi launch slurm …"
    raise RequestError(
        f"this {system} job has {nodes} nodes, but all {ranks} ranks would run on this one. Start them with `{start}`"
    )


def _nodes_of_job() -> tuple[str, int]:
    """Return the batch system, and the number of the job's nodes; 1 if there is no job, or it is not known."""
    if "SLURM_JOB_NUM_NODES" in os.environ:
        return "Slurm", int(os.environ["SLURM_JOB_NUM_NODES"])
    hosts = os.environ.get("LSB_MCPU_HOSTS", "").split()[::2]  # "a 16 b 16"
    if hosts:
        return "LSF", len(set(hosts))
    # Containers often have the variable, but not the file.
    with suppress(OSError):
        hosts = Path(os.environ.get("PBS_NODEFILE", "")).read_text(encoding="utf-8").split()
    return "PBS", len(set(hosts))


@dataclass(frozen=True)
class DeadProcess:
    """A process that the process manager reported as ended with an error.

    Attributes:
        pid: Its id.
        number: Its exit code, or the signal that ended it if below 64.
    """

    pid: int
    number: int

    @property
    def how(self) -> str:
        """How it ended."""
        if self.number == 9:
            return "signal 9 (killed, for instance by the kernel because memory ran out)"
        # Hydra prints one number for both. Ranks that fail exit with 70, so a number below 64 is a signal.
        return f"{'signal' if self.number < 64 else 'exit code'} {self.number}"


# Output of Hydra when a rank ends with a non-zero code; the launcher prints its own message instead.
_BANNER = re.compile(
    r"^(={20,}|=   .*|YOUR APPLICATION TERMINATED WITH.*|This typically refers to a problem with your application\.|"
    r"Please see the FAQ page for debugging suggestions)$"
)
_MANAGER = re.compile(r"^(\[(proxy|mpiexec).*\] .*|Abort\(\d+\) on node .*|Press Ctrl-C again to force abort)$")
_PID = re.compile(r"^=   PID (\d+) RUNNING AT")
_EXIT = re.compile(r"^=   EXIT CODE: (\d+)")


def _forward(text: str, target: TextIO) -> None:
    """Write a rank's output; if its reader has gone, discard what follows."""
    try:
        target.write(text)
        target.flush()
    except OSError:
        # Its reader has gone, or its disk is full: the output of ranks is still read, or they would block in `print`.
        discard(target)


class Output:
    """Forwards the output of ranks line by line, and keeps that of mpiexec itself."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None and process.stderr is not None
        self._manager_lines: list[str] = []
        self._pid: int | None = None
        self._exit: int | None = None
        streams: list[tuple[IO[bytes], TextIO]] = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
        # A thread for each stream: a rank whose full pipe nobody reads would block in `print`.
        self._pumps = [threading.Thread(target=self._pump, args=pair, daemon=True) for pair in streams]
        for pump in self._pumps:
            pump.start()

    @property
    def dead_process(self) -> DeadProcess | None:
        """The process that ended with an error, if the process manager named one."""
        if self._pid is None or self._exit is None:
            return None
        return DeadProcess(self._pid, self._exit)

    def of_manager(self) -> str:
        """Return the process manager's own output, for failures without any other message."""
        return "\n".join(line for line in self._manager_lines if not line.startswith("=" * 20)).strip()

    def finish(self) -> None:
        """Return when all output has been forwarded, or after a few seconds."""
        for pump in self._pumps:
            pump.join(timeout=5)  # a program that a rank has left behind may keep the pipe open

    def _pump(self, source: IO[bytes], target: TextIO) -> None:
        """Copy the output of all ranks line by line, without the process manager's own."""
        holds_empty_line = False  # held back: the banner starts with one
        for raw in source:
            # Bytes of any encoding pass; the output of a rank must not end the launcher.
            line = raw.decode("utf-8", errors="replace").rstrip("\n")
            if self._is_of_manager(line):
                holds_empty_line = False
                continue
            _forward(("\n" if holds_empty_line else "") + (f"{line}\n" if line else ""), target)
            holds_empty_line = line == ""
        _forward("\n" if holds_empty_line else "", target)

    def _is_of_manager(self, line: str) -> bool:
        """Whether a line is of the process manager, not of a rank; notes what it says of a death."""
        if _BANNER.match(line) is None and _MANAGER.match(line) is None:
            return False
        self._manager_lines.append(line)
        if (pid := _PID.match(line)) is not None:
            self._pid = int(pid[1])
        if (code := _EXIT.match(line)) is not None:
            self._exit = int(code[1])
        return True
