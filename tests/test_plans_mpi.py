"""All dimensions over real MPI: four processes, and eight, train as one does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import MPIEXEC, PROGRAM_PATH
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install 'hyfi[local]'")]

PROGRAM = """
import torch, hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.runtime import subject
from tests.harness import captured_once
from tests.steps import Steps, adamw, assert_equal_steps, make_batches, one_process_steps
from tests.test_plans import make

comm, one = hyfi_core.init(), (1, 1)
torch.set_num_threads(1)
subject.capture = captured_once  # both plans train the same model
if comm.size == 8:  # Hy-Fi's canonical plan: five stages, the first over four ranks, two directions, two micro-batches
    first = ParallelPlan(((2, 2), one, one, one, one), ("enter", "down1", "down2", "up1"), 2, "gems_master")
    second = ParallelPlan(
        ((1, 2), one, one), ("enter", "down1"), 4, "chimera", replicas=2, mirror="point_to_point", recompute=(0,)
    )
else:
    first = ParallelPlan(((1, 2), one, one), ("enter", "down1"), 2, "gems_master")
    second = ParallelPlan((one, one), ("down1",), 4, "chimera", replicas=2, mirror="point_to_point", recompute=(0,))
assert comm.size == first.ranks == second.ranks
for plan in (first, second):
    model = make("hourglass")[0].double()
    reference = make("hourglass")[0].double()
    batches = make_batches((4, 3, 37, 45), 2, plan.replicas)
    engine = hyfi_core.parallelize(model, (4, 3, 37, 45), plan, comm, optimizer=adamw, verify=False)
    losses, gradients = [], None
    for index, step in enumerate(batches):
        losses.append(engine.accumulate(*step[comm.rank // plan.ranks_per_replica]))
        if index == 0:
            gradients = engine.gather_gradients()
        engine.update()
    state = engine.gather_state_dict()
    if comm.rank == 0:
        wanted = one_process_steps(reference, batches, plan.microbatches, adamw)
        found = Steps(losses, gradients, state, {})
        assert_equal_steps(found, Steps(wanted.losses, wanted.gradients, wanted.state, {}))
        print("equal", plan.schedule, flush=True)
"""


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.soak)])
def test_processes_train_as_one(ranks: int) -> None:
    environment = {**os.environ, "PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1"}
    command = [str(MPIEXEC), "-n", str(ranks), sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["equal gems_master", "equal chimera"]
