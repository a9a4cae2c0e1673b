"""Which launcher started a process that has the variables of two: the nearest one among its ancestors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROGRAM_PATH
from tests.patience import PATIENCE_S

BOTH = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "4", "PMI_RANK": "1", "PMI_SIZE": "2"}
RANK = "from workflows.launch.launch import inside_launcher, own_rank; print(inside_launcher(), own_rank())"


@pytest.mark.parametrize(
    ("ancestors", "expected"),
    [
        (["mpiexec", "torchrun"], "torchrun 3"),  # as in `srun torchrun …`
        (["torchrun", "mpiexec"], "mpi 1"),  # in a shell that torchrun has started
        (["hydra_pmi_proxy", "torchrun", "bash"], "torchrun 3"),
        (["mpiexec.hydra", "torchrun", "sorted.sh"], "torchrun 3"),  # no word with "orted" in it is a launcher
        (["torchrun", "slurmstepd: [7.0]", "torchrun_runs.sh"], "mpi 1"),
        (["nothing"], "mpi 1"),  # all may be left over: MPI says whether its launcher answers
    ],
    ids="-".join,
)
def test_the_nearest_launcher_counts(tmp_path: Path, ancestors: list[str], expected: str) -> None:
    command = [sys.executable, "-c", RANK]
    for name in reversed(ancestors):
        agent = tmp_path / name
        agent.write_text("import subprocess, sys\nsys.exit(subprocess.run(sys.argv[1:]).returncode)\n")
        command = [sys.executable, str(agent), *command]
    environment = os.environ | BOTH | {"PYTHONPATH": PROGRAM_PATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == expected, done.stderr
