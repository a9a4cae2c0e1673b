"""One rank fails, leaves or loses count in many ways: all ranks end soon, and it is said once why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hyfi_core.comm.activity import ACTIVITY, Wait
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.supervision.board import RankState, RankStatus
from hyfi_core.comm.supervision.supervisor import RankSupervisor
from hyfi_core.comm.supervision.time_limit import time_limit_s
from hyfi_core.errors import RequestError
from tests.conftest import MPIEXEC, PROGRAM_PATH
from tests.hyfi_core.comm.supervision.failing_ranks import (
    FAILURES,
    NOT_TRIED,
    OPEN_MPI,
    OPEN_MPI_SETTINGS,
    START,
    case,
    check,
    run,
)
from tests.patience import PATIENCE_S, SOON_S

QUICK = {
    # not "killed" with MPICH: its mpiexec ends all ranks at once, on a busy machine before any of them can say why
    "MPICH": ("exception", "exit code 0", "one step more"),
    "Open MPI": ("killed",),
    "torchrun": ("thread",),
}


def cases(launcher: str) -> list[object]:
    """Return all cases; those that few others resemble are among the quick tests."""
    ways = [how for how in FAILURES if (launcher, how) not in NOT_TRIED]
    return [how if how in QUICK[launcher] else pytest.param(how, marks=pytest.mark.soak) for how in ways]


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install 'hyfi[local]'")
@pytest.mark.parametrize("how", cases("MPICH"))
def test_one_rank_of_mpi_fails_and_all_end(how: str, tmp_path: Path) -> None:
    check(how, *case("MPICH", how, tmp_path))


@pytest.fixture(scope="module")
def openmpi() -> None:
    """Skips where there is no Open MPI whose library mpi4py can load."""
    if OPEN_MPI is None:
        pytest.skip("no mpiexec.openmpi: apt install openmpi-bin")
    program = "from mpi4py import MPI; print(MPI.COMM_WORLD.size, MPI.Get_library_version())"
    done = subprocess.run(
        [OPEN_MPI, "-n", "2", sys.executable, "-c", program],
        env=os.environ | OPEN_MPI_SETTINGS,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    if "2 Open MPI" not in done.stdout:
        pytest.skip(f"mpi4py does not load Open MPI here: {done.stderr.strip()[-200:]}")


@pytest.mark.mpi
@pytest.mark.usefixtures("openmpi")
@pytest.mark.parametrize("how", cases("Open MPI"))
def test_one_rank_of_open_mpi_fails_and_all_end(how: str, tmp_path: Path) -> None:
    check(how, *case("Open MPI", how, tmp_path))


@pytest.mark.parametrize("how", cases("torchrun"))
def test_one_rank_of_torchrun_fails_and_all_end(how: str, tmp_path: Path) -> None:
    check(how, *case("torchrun", how, tmp_path))


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install 'hyfi[local]'")
def test_ranks_that_end_at_different_times_end_well(tmp_path: Path) -> None:
    body = "step()\ntime.sleep(3 * comm.rank)\nif comm.rank == 1: print('late')"
    code, said, _ = run([str(MPIEXEC), "-n", "2", sys.executable], body, tmp_path)
    assert (code, said) == (0, "")


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install 'hyfi[local]'")
def test_a_child_that_outlives_its_rank_does_not_hide_its_end(tmp_path: Path) -> None:
    """A forked child keeps the connection open by which the others see that a rank has gone.

    MPICH's mpiexec itself ends with the last process that holds its pipes, which is that child.
    """
    script = tmp_path / "program.py"
    child = "if os.fork() == 0: time.sleep(99); os._exit(0)"
    script.write_text(f"{START}if odd:\n    {child}\n    os.kill(os.getpid(), signal.SIGKILL)\nstep()")
    with subprocess.Popen(
        [str(MPIEXEC), "-n", "2", sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        began_s = float(process.stdout.readline().split()[1])
        said = ""
        while "all ranks stop" not in said:  # its end of line may be lost with the rank that said it
            piece = os.read(process.stderr.fileno(), 4096)
            assert piece, said
            said += piece.decode()
        seconds = time.time() - began_s
        process.kill()
    assert said.startswith("hyfi: rank 1 was killed") and seconds < SOON_S


class TwoQuietRanks:
    """A board on which one rank waits for messages of ``nbytes``, and the other one, too, or has ended."""

    failed = False

    def __init__(self, nbytes: int, other: RankState) -> None:
        self.nbytes, self.other = nbytes, other

    def post(self, state: str, where: str, nbytes: int) -> None:
        assert (state, nbytes) == ("waits", self.nbytes)

    def states(self) -> list[RankStatus]:
        return [RankStatus("waits", "step 1", 1, self.nbytes), RankStatus(self.other, "step 1", 1)]


@pytest.mark.parametrize(
    ("nbytes", "other", "patience_s"), [(0, "waits", 3.0), (1_000_000_000, "waits", 23.0), (0, "ended", 1.5)]
)
def test_a_long_transfer_is_no_deadlock(
    nbytes: int, other: RankState, patience_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks wait while a large message is on its way, and none computes."""
    board: Any = TwoQuietRanks(nbytes, other)
    supervisor = RankSupervisor(AloneCommunicator(), board, None, 0.0)
    ended: list[str] = []
    monkeypatch.setattr(supervisor, "_end_all", ended.append)
    monkeypatch.setattr(ACTIVITY, "wait", Wait(lambda: "an exchange", 0.0, nbytes=nbytes))
    supervisor._check(board, 10.0)
    supervisor._check(board, 10.0 + patience_s)
    assert ended == []
    supervisor._check(board, 10.1 + patience_s)
    assert len(ended) == 1 and ("ranks 0-1 wait" if other == "waits" else "rank 1 has ended") in ended[0]


def test_the_time_limit_is_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYFI_TIMEOUT_S", raising=False)
    assert time_limit_s() == 1800
    monkeypatch.setenv("HYFI_TIMEOUT_S", "0")
    assert time_limit_s() == 0
    for wrong in ("-1", "soon", "inf", "nan"):
        monkeypatch.setenv("HYFI_TIMEOUT_S", wrong)
        with pytest.raises(RequestError, match="HYFI_TIMEOUT_S is "):
            time_limit_s()
