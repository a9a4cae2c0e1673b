"""Runs under launchers that are not ours: Open MPI's mpiexec, torchrun, and the script around it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data.cores import usable_cores
from tests.patience import BEFORE_KILLED_S, PATIENCE_S, SOON_S
from tests.workflows.archive import make_config, make_store
from workflows.launch.mpiexec import MpiExec
from workflows.training.metrics_log import read_metrics

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]
HYFI = ("-m", "workflows")
TORCHRUN = Path(sys.executable).parent / "torchrun"
OPEN_MPI = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40")
Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts a launcher in ``tmp_path``, whose ``run.yaml`` needs two ranks."""
    make_config(
        tmp_path,
        make_store(tmp_path),
        run={"steps": 5000},
        validation={"every_steps": 5000},
        plan={"grids": [[1, 2]]},
    )
    started: list[subprocess.Popen[str]] = []

    def start(*words: str | Path, **more: str) -> subprocess.Popen[str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": path}
        started.append(
            subprocess.Popen(
                [str(word) for word in words],
                cwd=tmp_path,
                env=os.environ | environment | {"HYFI_TEST_MARK": str(tmp_path)} | more,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
    assert ranks_of(tmp_path) == []


def ranks_of(folder: Path, variable: str = "") -> list[int]:
    """Return the processes of a test that have a variable (``LOCAL_RANK=1``) in their environment."""
    wanted, found = {f"HYFI_TEST_MARK={folder}".encode(), *([variable.encode()] if variable else [])}, []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def open_mpi() -> tuple[list[str], dict[str, str]]:
    """Return Open MPI's words for two ranks and what lets mpi4py load its library; skips where it is missing."""
    mpiexec = shutil.which("mpiexec.openmpi")
    if mpiexec is None or not OPEN_MPI.exists():
        pytest.skip("no Open MPI here: apt-get install openmpi-bin")
    words = [mpiexec, "--oversubscribe", "-n", "2", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    settings = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return words, {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": str(OPEN_MPI)} | settings


@pytest.mark.parametrize("ranks", [1, 2])
def test_open_mpi_gives_each_rank_all_cores(ranks: int) -> None:
    """It bound one or two ranks to a core each, and all threads of a rank took turns on it."""
    words, library = open_mpi()
    command = MpiExec(Path(words[0]), "Open MPI").command(ranks)
    shown = "import os; print(f' {len(os.sched_getaffinity(0))} ', flush=True)"  # lines of ranks may be joined
    done = subprocess.run(
        [*command, sys.executable, "-c", shown],
        env=os.environ | library,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert [int(count) for count in done.stdout.split()] == [usable_cores()] * ranks


@pytest.mark.parametrize("library", ["MPICH", "Open MPI"])
def test_the_mpiexec_of_another_mpi_is_named_once_with_the_one_to_use(
    begin: Begin, tmp_path: Path, library: str
) -> None:
    """Each rank took itself for the only one, or the library aborted with a text of its own."""
    words, settings = open_mpi()
    hydra = Path(sys.executable).parent / "mpiexec"
    if library == "MPICH":
        job = begin(*words, sys.executable, *HYFI, "train", "run.yaml", OMPI_ALLOW_RUN_AS_ROOT="1")
    else:
        job = begin(hydra, "-n", "2", sys.executable, *HYFI, "train", "run.yaml", **settings)
    said = job.communicate(timeout=PATIENCE_S)[1]
    use = f"use `{hydra} -n 2 …`" if library == "MPICH" else "use `mpiexec.openmpi -n 2 …`"
    assert said.count(f"its MPI library is {library}") == 1, said
    assert use in said and "MPI_Init" not in said and "start 2" not in said
    assert job.returncode not in (0, 1, 3)
    assert not (tmp_path / "run").exists()


def train_under_open_mpi(begin: Begin, folder: Path) -> subprocess.Popen[str]:
    """Start a run on two ranks of Open MPI; return it after its second step."""
    words, library = open_mpi()
    job = begin(*words, sys.executable, *HYFI, "train", "run.yaml", **library)
    wait_for_step(job, folder, 2)
    return job


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while max((r["step"] for r in read_metrics(folder / "run" / "metrics.jsonl")), default=0) < step:
        assert time.monotonic() < deadline_s and process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


def end(process: subprocess.Popen[str], folder: Path, within_s: float = SOON_S) -> str:
    """Wait for the launcher and every rank to end; return its standard error."""
    began_s = time.monotonic()
    err = process.communicate(timeout=PATIENCE_S)[1]
    while ranks_of(folder) and time.monotonic() - began_s < within_s:
        time.sleep(0.05)
    assert ranks_of(folder) == []
    assert time.monotonic() - began_s < within_s
    return err


def test_a_killed_rank_under_torchrun(begin: Begin, tmp_path: Path) -> None:
    """Torchrun asked the others to stop, and killed them half a minute later."""
    job = begin(TORCHRUN, "--standalone", "--nproc-per-node=2", *HYFI, "train", "run.yaml")
    wait_for_step(job, tmp_path, 2)
    os.kill(ranks_of(tmp_path, "LOCAL_RANK=1")[0], signal.SIGKILL)
    said = end(job, tmp_path, BEFORE_KILLED_S)
    assert re.search(r"^\d{4}-\d\d-\d\d \S+ \S+ rank 0 ERROR hyfi: rank 1 was killed or crashed", said, re.MULTILINE)
    assert "rank 1 was killed or crashed" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()


@pytest.mark.soak  # comm/supervision/test_supervisor.py kills a rank of a smaller program of Open MPI
def test_a_killed_rank_under_open_mpi(begin: Begin, tmp_path: Path) -> None:
    job = train_under_open_mpi(begin, tmp_path)
    os.kill(ranks_of(tmp_path, "OMPI_COMM_WORLD_RANK=1")[0], signal.SIGKILL)
    assert "rank 1 was killed or crashed" in end(job, tmp_path)


def test_a_request_to_stop_under_open_mpi(begin: Begin, tmp_path: Path) -> None:
    job = train_under_open_mpi(begin, tmp_path)
    job.send_signal(signal.SIGUSR1)
    end(job, tmp_path)
    assert job.returncode == 3
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
    assert not list(tmp_path.glob(".*.code"))


SCRIPTS = [("torchrun", "SIGTERM"), ("torchrun", "SIGUSR1"), ("MPICH", "SIGTERM"), ("Open MPI", "SIGTERM")]


@pytest.mark.parametrize(
    ("by", "number"),
    [pytest.param(*script, marks=[] if script == SCRIPTS[0] else pytest.mark.soak) for script in SCRIPTS],
)
def test_the_script_around_a_launcher_stops_with_a_checkpoint(
    begin: Begin, tmp_path: Path, by: str, number: str
) -> None:
    """Torchrun itself and Open MPI's mpiexec ended with 1 by SIGTERM, and torchrun by SIGUSR1 left its ranks behind."""
    more = open_mpi()[1] | {"PATH": f"/usr/bin:{os.environ['PATH']}"} if by == "Open MPI" else {}
    written = begin(sys.executable, *HYFI, "launch", "torchrun" if by == "torchrun" else "mpiexec", "run.yaml")
    assert written.wait(timeout=PATIENCE_S) == 0
    job = begin("bash", "run.sh", **more)
    wait_for_step(job, tmp_path, 2)
    job.send_signal(signal.Signals[number])
    end(job, tmp_path)
    assert job.returncode == 3
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
    assert not list(tmp_path.glob(".*.code"))
