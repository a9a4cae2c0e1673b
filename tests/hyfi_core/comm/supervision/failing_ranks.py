"""One rank fails, leaves or loses count in many ways, under each launcher that is here.

``python -m tests.hyfi_core.comm.supervision.failing_ranks`` prints way × launcher → seconds, exit code, what was said.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import MPIEXEC, PROGRAM_PATH
from tests.patience import PATIENCE_S, SOON_S

START = """
import os, signal, sys, threading, time, torch, hyfi_core
comm = hyfi_core.init()
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.BatchNorm2d(4), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
)
plan = hyfi_core.ParallelPlan(grids=((1, comm.size),))
engine = hyfi_core.parallelize(
    model, (1, 3, 16, 24), plan, comm, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), verify=False
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
    "wrong label": ("step(torch.tensor([9]) if odd else label)", "ranks disagree: labels is (1,)"),
    "thread": ("def fault(): raise OSError('disk')\nif odd: later(fault); time.sleep(99)\nstep()", "OSError: disk"),
    "exit code 3": ("if odd: sys.exit(3)\nstep()", "rank 1 has ended while rank"),
    "exit code 0": ("if odd: sys.exit(0)\nstep()", "rank 1 has ended while rank"),
    "one step fewer": ("for _ in range(2 if odd else 3): step()", "rank 1 has ended while rank"),
    "one step more": ("for _ in range(3 if odd else 2): step()", "still wait"),
    "another call": ("comm.barrier() if odd else step()", "every rank must make the same calls"),
    "stuck": ("if odd: time.sleep(99)\nstep()", "has waited for other ranks for more than 10 s (HYFI_TIMEOUT_S)"),
    "killed": ("if odd: os.kill(os.getpid(), signal.SIGKILL)\nstep()", "rank 1 was killed or crashed"),
    "os._exit": ("if odd: os._exit(5)\nstep()", "rank 1 was killed or crashed"),
    "terminated": ("if odd: os.kill(os.getpid(), signal.SIGTERM)\nstep()", "rank 1 was killed or crashed"),
    "segfault": ("import ctypes\nif odd: ctypes.string_at(0)\nstep()", "rank 1 was killed or crashed"),
    "out of memory": ("if odd: torch.empty(1 << 60)\nstep()", "allocate memory"),
}


NOT_TRIED = [("torchrun", "another call")]  # gloo itself crashes by a message of another length

OPEN_MPI = shutil.which("mpiexec.openmpi")
OPEN_MPI_SETTINGS = {
    "MPI4PY_MPIABI": "openmpi",  # what mpi4py loads
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def ranks_of(how: str) -> str:
    """Return how many ranks a case is tried with."""
    return "3" if how in ("exception", "one step fewer", "another call") else "2"


def run(command: list[str], program: str, folder: Path, **environment: str) -> tuple[int, str, float]:
    """Run a program on ranks; return exit code, standard error, and how long it ran after its first step."""
    script = folder / "program.py"
    script.write_text(START + program)
    done = subprocess.run(
        [*command, str(script)],
        env=os.environ | {"PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    ended_s = time.time()
    began = [line for line in done.stdout.splitlines() if line.startswith("began")]
    assert began, done.stderr
    return done.returncode, done.stderr, ended_s - float(began[0].split()[1])


def check(how: str, code: int, said: str, seconds: float) -> None:
    assert code != 0, said
    assert seconds < SOON_S, (seconds, said)
    if "killed or crashed" in FAILURES[how][1] and _is_reported_by_torchrun(said):
        return
    assert FAILURES[how][1] in said
    if FAILURES[how][1]:
        assert said.count("hyfi: ") == 1, said
        assert "rank 1" in said
    if "step" in how:
        assert "step 4, comparing this call, in " in said and "step 3" in said, said


def _is_reported_by_torchrun(said: str) -> bool:
    """Whether torchrun saw the end of rank 1 first, ended the others before they could report, and names the rank."""
    return "hyfi: " not in said and "Root Cause (first observed failure)" in said and "rank      : 1 " in said


def limit(how: str) -> dict[str, str]:
    """Return the settings that a case needs."""
    return {"HYFI_TIMEOUT_S": "10"} if how == "stuck" else {}


def launchers() -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return name → (words before the number of ranks, settings) of the launchers that are here."""
    found = {"torchrun": ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"], {})}
    if MPIEXEC is not None:
        found["MPICH"] = ([MPIEXEC, "-n"], {})
    if OPEN_MPI is not None:
        found["Open MPI"] = ([OPEN_MPI, "-n"], OPEN_MPI_SETTINGS)
    return found


def case(launcher: str, how: str, folder: Path) -> tuple[int, str, float]:
    """Run one case and return what :func:`run` does."""
    words, settings = launchers()[launcher]
    python = [] if launcher == "torchrun" else [sys.executable]
    return run([*words, ranks_of(how), *python], FAILURES[how][0], folder, **limit(how), **settings)


def main() -> None:
    """Print the table; names of launchers or cases may be given."""
    names, ways = ([name for name in known if name in sys.argv] or list(known) for known in (launchers(), FAILURES))
    print(f"{'way':15} {'launcher':9} {'s':>5} {'code':>4}  right  said")
    for how in ways:
        for name in names:
            if (name, how) in NOT_TRIED:
                continue
            with tempfile.TemporaryDirectory() as folder:
                code, said, seconds = case(name, how, Path(folder))
            try:
                check(how, code, said, seconds)
                right = "yes"
            except AssertionError:
                right = "NO"
            words = [line for line in said.splitlines() if "hyfi: " in line or FAILURES[how][1] in line]
            print(f"{how:15} {name:9} {seconds:5.1f} {code:4}  {right:5}  {' | '.join(words)}", flush=True)
            if right == "NO":
                print(said, flush=True)


if __name__ == "__main__":
    main()
