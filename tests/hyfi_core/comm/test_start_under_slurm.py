"""MPI starts under a real Slurm, whatever the memory of its ranks holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.workflows.slurm import Slurm, slurm

__all__ = ["slurm"]
ROOT = Path(__file__).parents[3]
PROGRAM = """
import ctypes
import hyfi_core, hyfi_core.comm.wire, hyfi_core.comm.progress, hyfi_core.comm.activity  # all but MPI
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
blocks = [libc.malloc(size) for size in range(16, 40000, 16) for _ in range(3)]
for number, block in enumerate(blocks):
    ctypes.memset(block, 0x5A, 16 * (number // 3 + 1))
for block in blocks[::2]:
    libc.free(block)
comm = hyfi_core.init()
found = comm.gather_objects(comm.rank)
if comm.rank == 0:
    print(found)
comm.barrier()
"""


@pytest.mark.mpi
def test_ranks_find_each_other_when_memory_was_used_before(slurm: Slurm, tmp_path: Path) -> None:
    """A prediction, whose ranks have loaded a model when MPI starts, waited for ever in one of three starts."""
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["srun", "--mpi=pmi2", "-N2", "-n2", "--time=1", sys.executable, "program.py"]
    environment = slurm.environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=-1, stderr=-1, text=True)
    try:
        out, err = done.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        slurm.run("scancel", "--full", "--signal=KILL", "-u", "root")
        done.kill()
        pytest.fail("the ranks do not find each other")
    assert (done.returncode, out) == (0, "[0, 1]\n"), err
