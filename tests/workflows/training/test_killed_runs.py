"""A run that is killed again and again equals one that is not disturbed: weights, statistics, rates and losses."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.workflows.runs import assert_same_run
from tests.workflows.training.test_failures import TWO, TrainingRun, start, store  # noqa: F401 (fixtures)
from workflows.training.metrics_log import read_metrics

pytestmark = pytest.mark.mpi
EVERY = "run.checkpoint_every_steps=4"


def saved_step(run: Path) -> int:
    """Return the step of the latest checkpoint, 0 without one."""
    latest = run / "checkpoints" / "latest"
    return int(latest.resolve().name.removeprefix("step-")) if latest.exists() else 0


def wait_for_checkpoint(job: TrainingRun, step: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while saved_step(job.run) < step:
        assert time.monotonic() < deadline_s and job.process.poll() is None, job.process.communicate()[1]
        time.sleep(0.01)


def end_by(job: TrainingRun, number: signal.Signals) -> None:
    """Ask a run to stop, or kill one of its ranks; each has its promised exit code."""
    asked = number is signal.SIGTERM
    victims = [job.process.pid] if asked else job.pids(random.choice((0, 1)))
    for pid in victims:
        os.kill(pid, number)
    code, errors = job.end()
    assert code == (3 if asked else 70), errors


def rates(run: Path) -> dict[int, float]:
    return {r["step"]: r["lr"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"}


@pytest.mark.soak  # once, with a loader: test_loading.py
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("times", [3, 30])
def test_killed_and_resumed_runs_are_those_that_were_not_disturbed(start: Any, tmp_path: Path, times: int) -> None:
    """At random steps, in turns by SIGKILL of a rank and by SIGTERM of the command."""
    random.seed(times)
    steps = 20 * times
    for kill in range(times):
        job = start(*TWO, EVERY, *["--resume"] * (kill > 0), steps=steps)
        wait_for_checkpoint(job, saved_step(job.run) + random.choice((1, 4, 8)))
        time.sleep(random.uniform(0.0, 0.3))  # in any part of a step
        if job.process.poll() is None and saved_step(job.run) < steps - 12:
            end_by(job, (signal.SIGKILL, signal.SIGTERM)[kill % 2])
    assert start(*TWO, EVERY, "--resume", steps=steps).end(timeout_s=300)[0] == 0
    whole = tmp_path / "whole"
    assert start(*TWO, EVERY, f"run.dir={whole}", steps=steps).end(timeout_s=300)[0] == 0
    assert_same_run(tmp_path / "run", whole, steps)
    assert rates(tmp_path / "run") == rates(whole)
