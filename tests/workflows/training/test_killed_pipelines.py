"""A rank of a pipeline is killed in the middle of a step: all end, and the run goes on from its last checkpoint."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.patience import SOON_S
from tests.workflows.training.test_failures import TrainingRun, start, store  # noqa: F401 (fixtures)

pytestmark = pytest.mark.mpi
PLAN = [
    "data.batch_size=4",
    "plan.grids=[[1,2],[1,1]]",
    "plan.microbatches=4",
    "plan.schedule=chimera",
    "plan.mirror=point_to_point",
    "validation.every_steps=100",
    "run.checkpoint_every_steps=3",
]
STEPS = 12


def weights(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in (run / "checkpoints" / f"step-{STEPS:08d}").glob("model*.safetensors"):
        found.update(load_file(path))
    return found


def killed(job: TrainingRun, rng: random.Random) -> None:
    """Kill a random rank at a random moment behind the first step; all must be gone within seconds."""
    job.wait_for_step(rng.randint(1, STEPS - 4))
    time.sleep(rng.uniform(0.0, 0.3))
    pids = job.pids(rng.randrange(3))
    if job.process.poll() is not None or not pids:
        return
    killed_s = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    code, errors = job.end()
    assert time.monotonic() - killed_s < SOON_S
    assert code in (70, 0), errors
    assert code == 0 or errors.count("signal 9") == 1


def resumed(start: Any, tmp_path: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    undisturbed = start(*PLAN, "run.dir=" + str(tmp_path / "calm"), steps=STEPS)
    assert undisturbed.end(timeout_s=300)[0] == 0
    for turn in range(kills):
        job = start(*PLAN, f"run.dir={tmp_path / f'run{turn}'}", steps=STEPS)
        job.run = tmp_path / f"run{turn}"
        killed(job, rng)
        again = start(*PLAN, f"run.dir={tmp_path / f'run{turn}'}", "--resume", steps=STEPS)
        assert again.end(timeout_s=300)[0] == 0
        wanted, found = weights(tmp_path / "calm"), weights(tmp_path / f"run{turn}")
        assert wanted.keys() == found.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_kills(start: Any, tmp_path: Path) -> None:
    resumed(start, tmp_path, kills=20, seed=1)
