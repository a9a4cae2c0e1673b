"""A rank that is frozen, in training, in validation or as a loader, ends the run with its name; one TERM is enough."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.workflows.training.test_failures import (  # noqa: F401 (fixtures)
    A_LOADER,
    A_VALIDATOR,
    TWO,
    TrainingRun,
    start,
    store,
)

pytestmark = pytest.mark.mpi
SOON, SAVES = "run.stall_s=10", "run.checkpoint_every_steps=2"


def freeze(job: TrainingRun, rank: int) -> None:
    """Stop all processes of a rank, as a node that hangs does."""
    job.wait_for_step(3)
    deadline_s = time.monotonic() + PATIENCE_S
    while not (job.run / "checkpoints" / "latest").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    time.sleep(1.5)  # a heartbeat
    for pid in job.pids(rank):
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("roles", "rank"),
    [
        pytest.param(TWO, 0, marks=pytest.mark.soak),
        pytest.param([*TWO, "validation.every_steps=1"], 1, marks=pytest.mark.soak),
        (A_LOADER, 1),
    ],
    ids=["rank 0", "in validation", "loader"],
)
def test_a_frozen_rank_ends_the_run_and_is_named(start: Any, roles: list[str], rank: int) -> None:
    """It was never noticed; with validation after every step, most of the time is spent there."""
    job = start(*roles, SOON, SAVES)
    freeze(job, rank)
    code, errors = job.end()
    assert code == 70, errors
    assert f"rank {rank} on {os.uname().nodename} has shown no sign of life for" in errors
    assert ("last seen in loading images" if roles is A_LOADER else "last seen in step ") in errors
    assert "--resume continues after step" in errors
    assert errors.count("no sign of life") == 1
    logs = [path.read_text() for path in (job.run / "logs").iterdir()]
    assert sum("no sign of life" in text for text in logs) == 1


@pytest.mark.soak
def test_a_validator_that_is_frozen_does_not_hold_the_run_for_ever(start: Any) -> None:
    job = start(*A_VALIDATOR, SOON, "validation.every_steps=1")
    freeze(job, 1)
    code, errors = job.end()
    assert code == 70 and "rank 1 on" in errors


@pytest.mark.soak
def test_one_term_is_enough(start: Any) -> None:
    """With a frozen rank, the ranks never agreed to stop; a second request was needed."""
    job = start(*TWO, SAVES)  # stall_s: at least 300 s
    freeze(job, 1)
    time.sleep(0.5)
    job.process.send_signal(signal.SIGTERM)
    code, errors = job.end()
    assert code == 70, errors
    assert "rank 1 on" in errors and "are allowed after a request to stop" in errors


@pytest.mark.soak
def test_a_rank_that_hangs_in_a_call_ends_the_run(start: Any) -> None:
    job = start(*TWO, SOON, fault="1:5:update:hang")
    code, errors = job.end()
    assert code == 70, errors
    assert "rank 1 on" in errors and "has made no progress for" in errors
