"""One rank fails, all end; a request to stop is a saved checkpoint. With real MPI and real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, SOON_S
from tests.workflows.archive import make_config, make_store
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.mpi
ROOT = Path(__file__).parents[3]
MARK = "HYFI_TEST_MARK"
TWO_AND_A_LOADER = ["plan.grids=[[1,2]]", "roles.loaders=1"]
TWO = ["plan.grids=[[1,2]]"]
TWO_STAGES = ["plan.grids=[[1,1],[1,1]]", "plan.cuts=[norm1]"]
A_LOADER, A_VALIDATOR = ["roles.loaders=1"], ["roles.validators=1"]


@dataclass
class TrainingRun:
    """A `hyfi train` under way, all of whose processes carry a mark in their environment."""

    process: subprocess.Popen[str]
    mark: str
    run: Path

    def pids(self, rank: int | None = None) -> list[int]:
        """Return the live processes of the job, or of one rank of it."""
        wanted = [f"{MARK}={self.mark}".encode()] + ([f"PMI_RANK={rank}".encode()] if rank is not None else [])
        return [pid for pid in _pids() if set(wanted) <= _environment(pid)]

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while max((r["step"] for r in read_metrics(self.run / "metrics.jsonl")), default=0) < step:
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.02)

    def end(self, timeout_s: float = PATIENCE_S) -> tuple[int, str]:
        """Return (exit code, standard error); all processes must be gone then."""
        try:
            errors = self.process.communicate(timeout=timeout_s)[1]
        finally:
            left = [pid for pid in self.pids() if pid != self.process.pid]
            self.process.kill()
        assert left == []
        return self.process.returncode, errors


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path)


@pytest.fixture
def start(tmp_path: Path, store: Path) -> Iterator[object]:
    jobs: list[TrainingRun] = []

    def begin(*overrides: str, fault: str = "", steps: int = 2000) -> TrainingRun:
        config = make_config(tmp_path, store, run={"steps": steps}, validation={"every_steps": 50})
        mark = uuid.uuid4().hex
        process = subprocess.Popen(
            [sys.executable, "-m", "workflows.cli", "train", str(config), *overrides],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), MARK: mark, "HYFI_TEST_FAULT": fault, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        jobs.append(TrainingRun(process, mark, tmp_path / "run"))
        return jobs[-1]

    yield begin
    for job in jobs:
        for pid in job.pids():
            os.kill(pid, signal.SIGKILL)


def ended_together(job: TrainingRun) -> tuple[int, str]:
    """Return how a job ended that must end within seconds of its last recorded step."""
    job.wait_for_step(1)
    metrics = job.run / "metrics.jsonl"
    code, errors = job.end()
    assert time.time() - metrics.stat().st_mtime < SOON_S
    assert code not in (0, 1, 2, 3)
    return code, errors


def test_a_trainer_that_raises(start) -> None:
    job = start(*TWO, fault="1:3:update:raise")
    code, errors = ended_together(job)
    assert code == 70
    assert errors.count("RuntimeError: the fault that this test asked for") == 1
    assert errors.count("rank 1 failed") == 1
    logs = {path.name: path.read_text() for path in (job.run / "logs").iterdir()}
    assert sorted(logs) == ["rank-0.log", "rank-1.log"]
    assert "rank 1 INFO starts: trainer 1 on cpu" in logs["rank-1.log"]
    assert "rank 1 ERROR RuntimeError: the fault that this test asked for" in logs["rank-1.log"]


def test_a_validator_that_raises(start) -> None:
    job = start(*A_VALIDATOR, "validation.every_steps=3", fault="1:1:predict:raise")
    code, errors = ended_together(job)
    assert code == 70
    assert errors.count("RuntimeError: the fault that this test asked for") == 1
    assert errors.count("rank 1 failed") == 1


@pytest.mark.soak  # test_interruption.py, test_checkpoint_writer.py: the same without processes
def test_a_rank_that_cannot_write_its_part(start) -> None:
    """One line, and nothing of the other rank's part stays: a full disk needs the room."""
    job = start(*TWO_STAGES, fault="1:55:update:full")
    code, errors = ended_together(job)
    assert code == 70 and "Traceback" not in errors
    assert errors.count("rank 1 failed") == errors.count("the run cannot continue") == 1
    assert re.search(r"model-00002-of-00002\.safetensors cannot be written .*--resume continues after step 50", errors)
    assert not list((job.run / "checkpoints").glob(".*"))
    again = start(*TWO_STAGES, "run.steps=105", "--resume")
    assert again.end()[0] == 0
    assert (job.run / "checkpoints" / "latest").resolve().name == "step-00000105"


def test_a_loader_that_meets_a_damaged_chunk(start, store: Path) -> None:
    shard = next(path for path in (store / "slide-03.zarr" / "0").rglob("*") if path.is_file() and path.name == "0")
    content = bytearray(shard.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    shard.write_bytes(content)
    code, errors = start(*A_LOADER).end()
    assert code == 70
    assert errors.count("rank 1 failed") == 1
    assert "slide-03.zarr" in errors


@pytest.mark.parametrize(("roles", "rank"), [(TWO, 1), pytest.param(TWO_AND_A_LOADER, 2, marks=pytest.mark.soak)])
def test_a_rank_that_is_killed(start, roles: list[str], rank: int) -> None:
    """Rank 1 trains, rank 2 loads; `test_loading` kills a loader, too."""
    job = start(*roles)
    job.wait_for_step(2)
    killed_s = time.monotonic()
    (pid,) = job.pids(rank)
    os.kill(pid, signal.SIGKILL)
    code, errors = job.end()
    assert time.monotonic() - killed_s < SOON_S
    assert code == 70
    assert "signal 9" in errors
    log = (job.run / "logs" / f"rank-{rank}.log").read_text()  # it could not write this itself
    assert re.search(rf"rank {rank} ERROR hyfi: .*rank {rank}.* ended with signal 9", log)


@pytest.mark.parametrize(("roles", "validator"), [([], 1), pytest.param(TWO_AND_A_LOADER, 3, marks=pytest.mark.soak)])
def test_sigterm_saves_and_ends(start, roles: list[str], validator: int) -> None:
    job = start(*roles, *A_VALIDATOR, "validation.every_steps=5", fault=f"{validator}:0:predict:slow")
    job.wait_for_step(6)
    stopped_s = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    code, errors = job.end()
    assert time.monotonic() - stopped_s < SOON_S
    assert code == 3, errors
    step = max(r["step"] for r in read_metrics(job.run / "metrics.jsonl") if r["kind"] == "train")
    assert (job.run / "checkpoints" / "latest").resolve().name == f"step-{step:08d}"


@pytest.mark.soak  # test_loading.py: the same request without processes
def test_a_signal_that_reaches_a_loader_alone(start) -> None:
    job = start(*A_LOADER)
    job.wait_for_step(2)
    (pid,) = job.pids(1)
    os.kill(pid, signal.SIGUSR1)
    code, errors = job.end()
    assert code == 3, errors
    assert (job.run / "checkpoints" / "latest").exists()
