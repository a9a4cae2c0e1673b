"""All ranks end, with one exit code and one word about why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyfi_core.errors import RequestError
from tests.patience import PATIENCE_S, SOON_S
from workflows.launch import mpiexec
from workflows.launch.launch import inside_launcher, own_rank, run_as_rank
from workflows.launch.processes import kill_session, session_members
from workflows.launch.status import RunStatus

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.mpi

# What ranks do is chosen by the first word; MPI is up in all of them, so that those which wait do so inside MPI.
RANKS = """
import os, signal, sys, time
from pathlib import Path
if sys.argv[2] in ("fail", "memory"):
    from hyfi_core.comm.mpi import MPI, world  # as in a real command: ends through MPI's abort
    world()
else:
    from mpi4py import MPI
from hyfi_core.errors import RequestError
from workflows.launch.launch import own_rank, run_as_rank
from workflows.out_of_memory import remember_advice

here, what = Path(sys.argv[1]), sys.argv[2]
world, rank = MPI.COMM_WORLD, MPI.COMM_WORLD.rank
assert rank == own_rank()
stopped = []
signal.signal(signal.SIGUSR1, lambda number, frame: stopped.append(number))

def body():
    (here / f"pid-{rank}").write_text(str(os.getpid()))
    world.Barrier()
    if what == "refuse":
        raise RequestError("the plan needs 4 ranks, given 2")
    if what == "fail" and rank == 1:
        raise ValueError("one bad part")
    if what == "memory" and rank == 1:
        remember_advice("plan.microbatches=2 takes less")
        bytearray(2**62)
    if what == "all-fail":
        raise ValueError(f"bad part {rank}")
    if what == "killed" and rank == 1:
        time.sleep(0.3)  # the launcher has seen all ranks begin
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "left" and rank == 1:
        time.sleep(0.3)
        os._exit(0)
    if what == "bus":
        os.kill(os.getpid(), signal.SIGBUS)
    if what == "loop":
        while not stopped:
            time.sleep(0.02)
        time.sleep(float(os.environ.get("SAVING_S", 0)))
        return 3
    if what == "dies-saving":
        while not stopped:
            time.sleep(0.02)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        world.Barrier()
    while what == "deaf":
        time.sleep(0.02)
    if what in ("fail", "killed", "memory", "left"):
        world.Barrier()
    if what == "threads":
        sys.stdout.write(os.environ["OMP_NUM_THREADS"] + "\\n")
    if what == "limits":
        from data.children import child_environment
        from hyfi_core.job_limits import available_memory, memory_limits
        from workflows.launch.owner import FolderOwner, describe_owner, owner_of
        owner = FolderOwner(here / f"run-{rank}", "")
        child = [limit.source for limit in memory_limits(child_environment()) if "SLURM" in limit.source]
        if rank == 0:
            print(available_memory().source, *child, describe_owner(owner_of(here / "run-0")), sep=" | ", flush=True)
    if what == "uneven":
        return rank
    return int(what) if what.isdigit() else 0

sys.exit(run_as_rank(body))
"""

LAUNCHER = """
import os, sys
from workflows.exit_codes import exit_code_of
from workflows import signals
from workflows.launch import launch
from workflows.launch.launch import launch_program
launch.POLL_SECONDS = float(os.environ.get("POLL_SECONDS", launch.POLL_SECONDS))
if "KERNEL_KILLS" in os.environ:  # before the ranks start, and after they have ended
    launch.kernel_kills = iter([4, 4 + int(os.environ["KERNEL_KILLS"])]).__next__
signals.interrupt_on_request()
program = [sys.executable, *sys.argv[2:]]
sys.exit(exit_code_of(lambda: launch_program(program, int(sys.argv[1]))))
"""


class Job:
    """A launcher process with ranks under it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "ranks.py").write_text(RANKS)
        (folder / "launcher.py").write_text(LAUNCHER)
        self.process: subprocess.Popen[str] | None = None

    def start(self, what: str, ranks: int = 2, **environment: str) -> subprocess.Popen[str]:
        words = [self.folder / "launcher.py", str(ranks), self.folder / "ranks.py", self.folder, what]
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            # A killed launcher leaves its small folder of notes to the next one: not in the machine's /tmp.
            env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def run(self, what: str, ranks: int = 2, **environment: str) -> tuple[int, str, str]:
        process = self.start(what, ranks, **environment)
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err

    def run_soon(self, what: str) -> tuple[int, str, str]:
        """Run; all must end soon after the ranks are up."""
        process = self.start(what)
        self.pids()
        out, err = process.communicate(timeout=SOON_S)
        return process.returncode, out, err

    def pids(self, ranks: int = 2) -> list[int]:
        """The ranks' process ids, once all of them are up."""
        files = [self.folder / f"pid-{rank}" for rank in range(ranks)]
        deadline_s = time.monotonic() + PATIENCE_S
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline_s, "ranks did not come up"
            time.sleep(0.05)
        return [int(file.read_text()) for file in files]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    if job.process is not None and job.process.poll() is None:
        job.process.kill()
    assert left_running(tmp_path) == []


def left_running(folder: Path, seconds: float = SOON_S) -> list[str]:
    """Return command lines that name ``folder`` and still run after ``seconds``."""
    deadline_s = time.monotonic() + seconds
    while (found := list(_commands_with(str(folder)))) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return found


def _commands_with(word: str) -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if word in command:
                yield command


@pytest.mark.parametrize("code", [0, 1, 2, 3, 70])
def test_exit_codes_pass_through(job: Job, code: int) -> None:
    returned, out, err = job.run(str(code))
    assert (returned, out, err) == (code, "", "")


def test_the_worst_of_different_codes_is_told(job: Job) -> None:
    assert job.run("uneven")[0] == 1


def test_a_refusal_is_told_once(job: Job) -> None:
    assert job.run("refuse") == (2, "", "hyfi: the plan needs 4 ranks, given 2\n")


def test_a_failing_rank_ends_all_and_is_named(job: Job) -> None:
    code, out, err = job.run_soon("fail")
    assert (code, out) == (70, "")
    assert err.count("rank 1 failed") == err.count("ValueError: one bad part") == err.count("Traceback") == 1
    assert "BAD TERMINATION" not in err


def test_only_the_first_failure_is_told(job: Job) -> None:
    code, _, err = job.run("all-fail", ranks=4)
    assert code == 70
    assert err.count("Traceback") == err.count("ValueError: bad part") == 1


def test_a_rank_that_leaves_with_0_before_its_end_is_a_failure(job: Job) -> None:
    code, _, err = job.run_soon("left")
    assert code == 70 and "rank 1" in err


def test_running_out_of_memory_ends_with_advice_and_no_traceback(job: Job) -> None:
    code, _, err = job.run("memory")
    assert code == 70 and "rank 1 failed" in err and "Traceback" not in err
    assert err.count("out of memory; plan.microbatches=2 takes less") == 1


def test_a_rank_that_the_kernel_ended_for_memory_is_told_as_such(job: Job) -> None:
    code, _, err = job.run("killed", KERNEL_KILLS="1")
    assert code == 70 and "rank 1 ended with signal 9" in err
    assert "ran out of memory and its kernel killed a process; to need less memory, divide each image" in err


def test_a_rank_that_a_full_shared_memory_ended_is_told_with_what_to_do(job: Job) -> None:
    code, _, err = job.run("bus")
    assert code == 70 and "ended with signal 7; all ranks were stopped" in err
    assert "had no room, or the file was cut off" in err and "/dev/shm has " in err and "make it larger" in err


def test_a_killed_rank_ends_all_and_is_named(job: Job) -> None:
    code, out, err = job.run_soon("killed")
    assert (code, out) == (70, "")
    assert "rank 1 ended with signal 9" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_request_to_stop_reaches_every_rank(job: Job, number: signal.Signals) -> None:
    process = job.start("loop")
    job.pids()
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3
    assert "Traceback" not in err


def test_a_request_that_comes_as_soon_as_ranks_have_begun_is_theirs(job: Job) -> None:
    """The launcher killed them if it had not seen them yet: it looks twenty times a second, here every two seconds."""
    process = job.start("loop", POLL_SECONDS="2", SAVING_S="3")
    job.pids()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (3, "")


def test_a_rank_that_dies_after_a_request_to_stop_has_not_saved(job: Job) -> None:
    """Code 3 promises a checkpoint: scripts that requeue a job rely on it."""
    process = job.start("dies-saving")
    job.pids()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 70 and "rank 1 ended with signal 9" in err


def test_a_second_request_stops_at_once_and_says_that_nothing_was_saved(job: Job) -> None:
    process = job.start("deaf")
    job.pids()
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)  # two at the same time would count as one
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 70
    assert err == "hyfi: stopped at once, by a second request; what was not saved is lost\n"


def test_ranks_end_with_a_killed_launcher(job: Job) -> None:
    process = job.start("loop")
    job.pids()
    process.kill()
    process.wait()
    assert left_running(job.folder) == []


def test_cores_are_shared_out_unless_the_user_says_how(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert job.run("threads")[1].split() == [str(share)] * 2
    assert job.run("threads", OMP_NUM_THREADS="5")[1].split() == ["5"] * 2


def test_the_limits_of_a_slurm_job_and_its_number_reach_ranks_and_children(job: Job) -> None:
    """With Slurm's other variables they were removed: forecasts saw all of the machine's memory."""
    code, out, err = job.run("limits", SLURM_MEM_PER_NODE="700", SLURM_JOB_ID="17", SLURM_NODELIST="nowhere")
    assert code == 0, err
    ranks, child, owner = out.strip().split(" | ")
    assert ranks == child == "by SLURM_MEM_PER_NODE (sbatch --mem)" and owner.endswith(", Slurm job 17")


def test_no_mpi_is_a_request_that_can_be_mended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match=r"pip install 'hyfi\[local\]'"):
        mpiexec.find_mpiexec()


def test_flavours_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho 'mpiexec (OpenRTE) 4.1.4'\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = mpiexec.find_mpiexec()
    assert found.flavour == "Open MPI"
    assert found.command(3)[:6] == [str(other), "-n", "3", "--oversubscribe", "--bind-to", "none"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (False, 0)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, (True, 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (True, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (True, 3)),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, (True, 5)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (False, 0)),  # a batch script, not a step
    ],
)
def test_place_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[bool, int]
) -> None:
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI_", "SLURM_", "MPI_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (bool(inside_launcher()), own_rank()) == expected


def test_alone_a_rank_returns_its_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("HYFI_STATUS", raising=False)

    def refuse() -> int:
        raise RequestError("no such slide")

    def stop() -> int:
        raise KeyboardInterrupt

    assert [run_as_rank(lambda: 1), run_as_rank(refuse), run_as_rank(stop)] == [1, 2, 3]
    assert capsys.readouterr().err == "hyfi: no such slide\n"


def test_one_failure_is_claimed(tmp_path: Path) -> None:
    status = RunStatus(tmp_path)
    assert not status.failed
    assert [status.claim_failure(3, "first"), status.claim_failure(1, "second")] == [True, False]
    assert status.failure() == {"rank": 3, "error": "first"}
    status.end(0, 3)
    status.begin(12)
    assert (status.codes(), status.pids()) == ({0: 3}, {12: os.getpid()})


def test_a_session_is_killed_whole() -> None:
    process = subprocess.Popen(["sh", "-c", "sleep 100 & sleep 100 & wait"], start_new_session=True)
    while len(session_members(process.pid)) < 3:
        time.sleep(0.02)
    kill_session(process.pid)
    assert session_members(process.pid) == []
    assert process.wait() == -signal.SIGKILL
