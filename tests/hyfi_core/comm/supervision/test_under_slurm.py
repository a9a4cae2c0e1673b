"""One rank fails in many ways under a real ``srun`` on two nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.hyfi_core.comm.supervision.failing_ranks import FAILURES, check, limit, run
from tests.workflows.slurm import Slurm, slurm

__all__ = ["slurm"]
pytestmark = [pytest.mark.mpi, pytest.mark.soak, pytest.mark.timeout(300)]


@pytest.mark.parametrize("how", FAILURES)
def test_all_ranks_end_and_the_first_error_is_named(slurm: Slurm, tmp_path: Path, how: str) -> None:
    # One rank on each node: MPICH cannot share memory inside of two nodes that are one machine.
    words = ["srun", "--mpi=pmi2", "-N2", "-n2", sys.executable]
    found = {name: slurm.environment[name] for name in ("SLURM_CONF", "PATH")}
    check(how, *run(words, FAILURES[how][0], tmp_path, **found, **limit(how)))
