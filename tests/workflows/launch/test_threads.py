"""Ranks that a launcher does not bind to cores divide them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from data.cores import usable_cores
from tests.conftest import MPIEXEC, PROGRAM_PATH
from tests.patience import PATIENCE_S

PROGRAM = """
import sys, torch, hyfi_core
from workflows.launch.threads import set_threads
world = hyfi_core.init()
for number in (None, 5):  # what the machine has or the environment says, then what the user says
    set_threads(world, number)
    sys.stdout.write(f"threads {torch.get_num_threads()}\\n")  # one write: both ranks share a pipe
"""


def threads_of(ranks: int, **environment: str) -> tuple[list[int], str]:
    """Return the threads of each rank, first without and then with a number of the user, and all that is printed."""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [str(MPIEXEC), "-n", str(ranks), sys.executable, "-c", PROGRAM],
        env=env | {"PYTHONPATH": PROGRAM_PATH} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return sorted(int(line.split()[1]) for line in lines if line.startswith("threads ")), done.stdout


@pytest.mark.mpi
def test_unbound_ranks_divide_the_cores_and_say_so_once() -> None:
    threads, text = threads_of(2)
    assert threads == sorted([max(1, usable_cores() // 2)] * 2 + [5, 5])
    assert text.count("2 ranks share") == 1


@pytest.mark.mpi
def test_a_number_of_the_user_counts() -> None:
    threads, text = threads_of(2, OMP_NUM_THREADS="2")
    assert threads == [2, 2, 5, 5] and "share" not in text
