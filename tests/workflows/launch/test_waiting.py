"""Ranks that never come: said soon and by name, ended by every signal, and not waited for without end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hyfi_core.comm.supervision.rendezvous import Expected, joined
from hyfi_core.errors import RendezvousError
from tests.conftest import PROGRAM_PATH
from tests.patience import PATIENCE_S
from tests.workflows.archive import make_config, make_store

HYFI = [sys.executable, "-m", "workflows.cli"]
_INIT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs, as these tests, without it
import hyfi_core
hyfi_core.init()
"""
INIT = [sys.executable, "-c", _INIT]
NEVER: Callable[[], None] = lambda: time.sleep(3600)  # noqa: E731
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29533"}
Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts a program whose environment has variables of a launcher; it says soon that it waits."""
    started: list[subprocess.Popen[str]] = []

    def start(words: list[str], **variables: str) -> subprocess.Popen[str]:
        environment = {"PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1", "HYFI_NOTICE_S": "0.3", **variables}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(words, cwd=tmp_path, env=os.environ | environment, text=True, **pipes))  # type: ignore[call-overload]
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def notice(process: subprocess.Popen[str], words: str) -> str:
    """Return the line in which a process says that it waits."""
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return line
    pytest.fail(f"it ended with {process.wait()}")


@pytest.mark.parametrize(
    ("rank", "number", "command"),
    [
        ("0", signal.SIGTERM, "train"),
        pytest.param("1", signal.SIGINT, "train", marks=pytest.mark.soak),
        ("1", signal.SIGUSR1, "ingest"),
        ("0", signal.SIGINT, "init"),
        pytest.param("1", signal.SIGTERM, "init", marks=pytest.mark.soak),
    ],
)
def test_variables_left_by_torchrun_are_named_and_signals_end_the_wait(
    tmp_path: Path, begin: Begin, rank: str, number: signal.Signals, command: str
) -> None:
    config = make_config(tmp_path, make_store(tmp_path))
    words = {
        "train": [*HYFI, "train", str(config)],
        "ingest": [*HYFI, "ingest", str(tmp_path / "slides"), "--out", str(tmp_path / "new"), "--mpp", "1.0"],
        "init": INIT,
    }
    (tmp_path / "slides").mkdir()
    process = begin(words[command], **{**TORCHRUN, "RANK": rank, "MASTER_PORT": free_port()})
    said = notice(process, "waiting for other ranks")
    assert f"RANK={rank}, WORLD_SIZE=2" in said and f"this is rank {rank} of 2" in said
    assert "env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u MASTER_ADDR -u MASTER_PORT" in said
    assert "torchrun --nproc-per-node 2" in said and "1800 s (HYFI_TIMEOUT_S)" in said
    process.send_signal(number)
    rest = process.communicate(timeout=PATIENCE_S)[1]  # a few seconds; it would wait for half an hour
    if command == "init":  # a program of one's own: the interpreter's handlers
        assert process.returncode == -number
    else:
        assert process.returncode == 3 and "stopped on request, while it waited" in rest
    assert not (tmp_path / "run").exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**TORCHRUN, "HYFI_TIMEOUT_S": "0.5"}, "waited 0.5 s for the other ranks (HYFI_TIMEOUT_S)"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "torch.distributed cannot start"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "torch.distributed cannot start"),
        ({**TORCHRUN, "RANK": "x"}, "RANK must be a number from 0 to WORLD_SIZE - 1"),
        ({**TORCHRUN, "RANK": "2"}, "RANK=2 and WORLD_SIZE=2 in the environment"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "but MPI sees 1 rank, not 2 (PMI_SIZE)"),
        (
            {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
            "srun started 2 tasks, but MPI sees 1",
        ),
        ({**TORCHRUN, "HYFI_TIMEOUT_S": "soon"}, "HYFI_TIMEOUT_S is 'soon'"),
    ],
)
def test_any_rank_says_why_it_cannot_start(tmp_path: Path, begin: Begin, variables: dict[str, str], words: str) -> None:
    """Rank 1 said nothing, because rank 0 speaks for all; but there is no rank 0."""
    config = make_config(tmp_path, make_store(tmp_path))
    given = {"HYFI_TIMEOUT_S": f"{PATIENCE_S}", "HYFI_NOTICE_S": f"{PATIENCE_S}", **variables}
    if "MASTER_PORT" in given:
        given["MASTER_PORT"] = free_port()
    process = begin([*HYFI, "train", str(config)], **given)
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 2, said
    assert words in said and "Traceback" not in said
    assert "HYFI_TIMEOUT_S is" in said or "env -u " in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT])
def test_a_process_manager_that_does_not_start_ranks_is_named(
    tmp_path: Path, begin: Begin, number: signal.Signals | None
) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && { echo HYDRA; exit 0; }\nexec sleep 3600\n')
    broken.chmod(0o755)
    program = (
        "import sys; from workflows.launch import launch, mpiexec; from pathlib import Path\n"
        f"mpiexec.find_mpiexec = lambda: mpiexec.MpiExec(Path({str(broken)!r}), 'MPICH (Hydra)')\n"
        "sys.exit(launch.launch(['train'], 2))"
    )
    limit = {} if number is not None else {"HYFI_TIMEOUT_S": "1"}
    process = begin([sys.executable, "-c", program], **limit)
    said = notice(process, "no rank has begun after")
    assert f"`{broken} -n 2 hostname`" in said
    if number is not None:
        process.send_signal(number)
    rest = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == (70 if number is None else 3), rest
    assert number is not None or "no rank has begun within 1 s (HYFI_TIMEOUT_S)" in rest


def test_a_result_and_an_error_are_handed_on() -> None:
    expected = Expected("mpi", {"PMI_RANK": "0", "PMI_SIZE": "2"})
    assert joined(lambda: 7, expected) == 7
    with pytest.raises(ZeroDivisionError):
        joined(lambda: 1 // 0, expected)


def test_under_a_launcher_a_request_waits_until_the_notice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks are about to come, and then stop together; a rank that left alone would keep the others."""
    monkeypatch.setenv("HYFI_NOTICE_S", "0.2")
    with pytest.raises(KeyboardInterrupt):
        joined(NEVER, Expected("mpi", {"PMI_RANK": "0", "PMI_SIZE": "2"}), lambda: True)
    assert "PMI_RANK=0 and PMI_SIZE=2 in the environment say that an MPI launcher" in capsys.readouterr().err
    left_over = Expected("torchrun", TORCHRUN)
    with pytest.raises(KeyboardInterrupt):
        joined(NEVER, left_over, lambda: True)
    assert capsys.readouterr().err == ""  # at once
    monkeypatch.setenv("HYFI_TIMEOUT_S", "0.1")
    with pytest.raises(RendezvousError, match=r"waited 0\.1 s .*mpiexec -n N"):
        joined(NEVER, Expected("mpi", {"PMI_SIZE": "2"}))


def test_names_of_each_launcher_are_found() -> None:
    slurm = Expected("slurm", {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "HOME": "/"})
    assert "SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=4" in slurm.describe() and "srun -n N" in slurm.advice()
    assert "-u SLURM_STEP_ID" in slurm.advice() and "HOME" not in slurm.advice()
    assert Expected("torchrun", {**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}).started
    assert not Expected("torchrun", TORCHRUN).started
