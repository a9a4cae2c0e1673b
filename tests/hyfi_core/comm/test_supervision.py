"""One rank fails, leaves or loses count in many ways: all ranks end soon, and it is said once why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyfi_core.comm.supervision import time_limit_s
from hyfi_core.errors import RequestError
from tests.conftest import MPIEXEC, ROOT

START = """
import os, signal, sys, threading, time, torch, hyfi_core
comm = hyfi_core.init()
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.BatchNorm2d(4), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
)
plan = hyfi_core.ParallelPlan(grids=((1, comm.size),))
engine = hyfi_core.parallelize(
    model, (1, 3, 16, 24), plan, comm, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
)
images, label, odd = torch.randn(1, 3, 16, 24), torch.tensor([1]), comm.rank == 1
def step(label=label):
    return engine.train_step(images, label)
def later(act):
    def body():
        time.sleep(0.3)
        act()
    threading.Thread(target=body).start()
step()
if comm.rank == 0:
    print(f"began {time.time()}", flush=True)
"""

FAILURES = {
    "exception": ("if odd: raise ValueError('the fault')\nstep()", "ValueError: the fault"),
    "interrupted": ("if odd: raise KeyboardInterrupt\nstep()", "KeyboardInterrupt"),
    "wrong label": ("step(torch.tensor([9]) if odd else label)", "Target 9 is out of bounds"),
    "thread": ("def fault(): raise OSError('disk')\nif odd: later(fault); time.sleep(99)\nstep()", "OSError: disk"),
    "exit code 3": ("if odd: sys.exit(3)\nstep()", "rank 1 has ended while rank"),
    "exit code 0": ("if odd: sys.exit(0)\nstep()", "rank 1 has ended while rank"),
    "one step fewer": ("for _ in range(2 if odd else 3): step()", "rank 1 has ended while rank"),
    "one step more": ("for _ in range(3 if odd else 2): step()", "still wait"),
    "another call": ("comm.barrier() if odd else step()", "every rank must make the same calls"),
    "stuck": ("if odd: time.sleep(99)\nstep()", "has waited for others for more than 3 s (HYFI_TIMEOUT_S)"),
    "killed": ("if odd: os.kill(os.getpid(), signal.SIGKILL)\nstep()", ""),
    "os._exit": ("if odd: os._exit(5)\nstep()", ""),
}


def run(command: list[str], program: str, folder: Path, **environment: str) -> tuple[int, str, float]:
    """Run a program on ranks; return exit code, standard error, and how long it ran after its first step."""
    script = folder / "program.py"
    script.write_text(START + program)
    done = subprocess.run(
        [*command, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    ended_s = time.time()
    began = [line for line in done.stdout.splitlines() if line.startswith("began")]
    assert began, done.stderr
    return done.returncode, done.stderr, ended_s - float(began[0].split()[1])


def check(how: str, code: int, said: str, seconds: float) -> None:
    assert code != 0, said
    assert seconds < 10.0, (seconds, said)
    assert FAILURES[how][1] in said
    if FAILURES[how][1]:
        assert said.count("hyfi: ") == 1, said
        assert "rank 1" in said
    if "step" in how:
        assert "step 4, comparing this call, in " in said and "step 3" in said, said


def limit(how: str) -> dict[str, str]:
    return {"HYFI_TIMEOUT_S": "3"} if how == "stuck" else {}


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install 'hyfi[local]'")
@pytest.mark.parametrize("how", FAILURES)
def test_one_rank_of_mpi_fails_and_all_end(how: str, tmp_path: Path) -> None:
    ranks = 3 if how in ("exception", "one step fewer", "another call") else 2
    command = [str(MPIEXEC), "-n", str(ranks), sys.executable]
    check(how, *run(command, FAILURES[how][0], tmp_path, **limit(how)))


OPENMPI = shutil.which("mpiexec.openmpi")
OPENMPI_SETTINGS = {
    "MPI4PY_MPIABI": "openmpi",  # what mpi4py loads
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


@pytest.fixture(scope="module")
def openmpi() -> str:
    """Open MPI's launcher, where mpi4py can load the library that goes with it."""
    if OPENMPI is None:
        pytest.skip("no mpiexec.openmpi: apt install openmpi-bin")
    program = "from mpi4py import MPI; print(MPI.COMM_WORLD.size, MPI.Get_library_version())"
    done = subprocess.run(
        [OPENMPI, "-n", "2", sys.executable, "-c", program],
        env=os.environ | OPENMPI_SETTINGS,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "2 Open MPI" not in done.stdout:
        pytest.skip(f"mpi4py does not load Open MPI here: {done.stderr.strip()[-200:]}")
    return OPENMPI


@pytest.mark.mpi
@pytest.mark.parametrize(
    "how", [how if how == "exception" else pytest.param(how, marks=pytest.mark.soak) for how in FAILURES]
)
def test_one_rank_of_open_mpi_fails_and_all_end(openmpi: str, how: str, tmp_path: Path) -> None:
    ranks = 3 if how in ("exception", "one step fewer", "another call") else 2
    command = [openmpi, "-n", str(ranks), sys.executable]
    check(how, *run(command, FAILURES[how][0], tmp_path, **limit(how), **OPENMPI_SETTINGS))


@pytest.mark.parametrize("how", ["exception", "exit code 0", "one step more", "thread", "stuck"])
def test_one_rank_of_torchrun_fails_and_all_end(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    check(how, *run(command, FAILURES[how][0], tmp_path, **limit(how)))


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install 'hyfi[local]'")
def test_ranks_that_end_at_different_times_end_well(tmp_path: Path) -> None:
    body = "step()\ntime.sleep(6 * comm.rank)\nif comm.rank == 1: print('late')"
    code, said, _ = run([str(MPIEXEC), "-n", "2", sys.executable], body, tmp_path)
    assert (code, said) == (0, "")


def test_the_time_limit_is_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYFI_TIMEOUT_S", raising=False)
    assert time_limit_s() == 1800
    monkeypatch.setenv("HYFI_TIMEOUT_S", "0")
    assert time_limit_s() == 0
    for wrong in ("-1", "soon", "inf", "nan"):
        monkeypatch.setenv("HYFI_TIMEOUT_S", wrong)
        with pytest.raises(RequestError, match="HYFI_TIMEOUT_S is "):
            time_limit_s()
