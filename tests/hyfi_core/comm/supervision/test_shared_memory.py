"""A full ``/dev/shm`` is named before MPICH dies of it; on a real file system of that size, of this test alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyfi_core.comm.supervision.shared_memory import ranks_here
from tests.conftest import PROGRAM_PATH
from tests.patience import PATIENCE_S
from tests.workflows.archive import make_config, make_store

HYFI = [sys.executable, "-m", "workflows.cli"]
MPIEXEC = str(Path(sys.executable).parent / "mpiexec")
EXCHANGES = """
import torch, hyfi_core
comm = hyfi_core.init()
sent = torch.arange(1_000_000.0)
comm.all_reduce(sent)
assert torch.equal(sent, 2 * torch.arange(1_000_000.0))
print("exchanged")
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that is not in ``/dev/shm``, as those of other tests are: another file system is mounted there."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def under_shared_memory(size: str, folder: Path, words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command that sees a ``/dev/shm`` of this size; skips where that is not allowed."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root mounts file systems")
    mount = f"mount -t tmpfs -o size={size} none /dev/shm || exit 77; head -c 300000 /dev/zero > /dev/shm/left; exec "
    environment = os.environ | {"PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1"} | more
    words = ["unshare", "-m", "bash", "-c", f'{mount}"$@"', "bash", *words]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"no file system may be mounted here: {done.stderr}")
    return done


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", [[], [MPIEXEC, "-n", "2"]])
def test_ranks_that_have_no_room_to_exchange_messages_are_refused(tmp_path: Path, launcher: list[str]) -> None:
    """What was seen was "rank 0 ended with signal 7"."""
    config = make_config(tmp_path, make_store(tmp_path), plan={"grids": [[1, 2]]}, run={"steps": 1})
    words = [*launcher, *HYFI, "train", str(config)]
    done = under_shared_memory("2m", tmp_path, words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("/dev/shm has 1.79 MB free of 2.1 MB (in it: left 0.303 MB), but the 2 ranks") == 1
    assert "need 2.11 MB there" in done.stderr and "--shm-size" in done.stderr and "signal" not in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.mpi
@pytest.mark.parametrize(("size", "cells"), [("2m", {"MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS": "8"}), ("2440k", {})])
def test_ranks_that_have_just_enough_room_exchange_messages(tmp_path: Path, size: str, cells: dict[str, str]) -> None:
    done = under_shared_memory(size, tmp_path, [MPIEXEC, "-n", "2", sys.executable, "-c", EXCHANGES], **cells)
    assert done.returncode == 0 and done.stdout.count("exchanged") == 2, done.stderr


def test_the_ranks_of_a_node_are_read_from_the_launcher() -> None:
    assert ranks_here({"MPI_LOCALNRANKS": "3", "PMI_SIZE": "8"}) == 3
    assert [ranks_here({"SLURM_STEP_TASKS_PER_NODE": text}) for text in ("4", "2(x3)", "16(x2),4")] == [4, 2, 4]
    assert ranks_here({"PMI_SIZE": "8"}) is None
