"""Ranks as processes: the same engine over MPI equals one process, and a failing rank ends all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import MPIEXEC, PROGRAM_PATH
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install 'hyfi[local]'")]

PROGRAM = """
import copy, torch, torch.nn.functional as F, hyfi_core
from hyfi_core.comm import mpi
from hyfi_core.comm.base import Message
from hyfi_core.models.resnet import resnet6
from tests.hyfi_core.ops.test_reduce import Maxima, check, check_counts
torch.manual_seed(0)
comm = hyfi_core.init()
assert comm.size == 2
model = resnet6(2, width=4).double()
reference = copy.deepcopy(model)
images, labels = torch.randn(1, 3, 63, 70, dtype=torch.float64), torch.tensor([1])
engine = hyfi_core.parallelize(model, (1, 3, 63, 70), hyfi_core.ParallelPlan(grids=((1, 2),)), comm, verify=False)
loss = engine.accumulate(images, labels)
gradients = engine.gather_gradients()
if comm.rank == 0:
    F.cross_entropy(reference(images), labels).backward()
    total = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    for name, p in reference.named_parameters():
        assert (gradients[name] - p.grad).norm() <= 1e-10 * max(p.grad.norm(), 1e-3 * total), name
    print("equal", comm.gather_objects(comm.rank), comm.broadcast_object({"a": [1, None]}))
else:
    comm.gather_objects(comm.rank), comm.broadcast_object(None)
    assert comm.poll_object(5) is None
many, narrow = torch.full((3,), 1.0 + comm.rank), torch.full((2,), 0.5 + comm.rank, dtype=torch.bfloat16)
started = [comm.start_all_reduce(many), comm.start_all_reduce(narrow, "max")]
while not all(pending.test() for pending in started):
    pass
assert many.tolist() == [3.0] * 3 and narrow.tolist() == [1.5] * 2
odd = comm.split(comm.rank)
assert odd.size == 1
crossed = comm.subgroup([1, 0])
assert crossed.rank == 1 - comm.rank and crossed.broadcast_object(comm.rank) == 1
single = comm.subgroup([1] if comm.rank == 1 else [])
assert (single is None) == (comm.rank == 0)

check(comm, Maxima(), (1, 2))
check_counts(comm, (2, 1), 1)
print("maxima")

mpi._MOST_BYTES = 64
peer = 1 - comm.rank
sizes = (0, 16, 17, 1000)  # nothing, a piece, a piece and a bit, many
boxes = [torch.empty(size) for size in sizes]
sends = [Message(peer, torch.arange(size) + 1000.0 * comm.rank) for size in sizes]
last = comm.largest_tag  # is a tag, and not the one with which values are gathered
assert last >= 2**15 - 2
late = comm.exchange([], [Message(peer, boxes[-1], last)])
assert comm.gather_objects(comm.rank, 1) in (None, [0, 1])
comm.exchange([Message(peer, sends[-1].tensor, last)], []).wait()
late.wait()
assert torch.equal(boxes[-1], torch.arange(1000) + 1000.0 * peer)
comm.exchange(sends, [Message(peer, box) for box in boxes]).wait()
assert all(torch.equal(box, torch.arange(box.numel()) + 1000.0 * peer) for box in boxes)
total = torch.arange(1000, dtype=torch.float64)
comm.all_reduce(total)
assert torch.equal(total, 2 * torch.arange(1000, dtype=torch.float64))
told = torch.arange(1000) * (comm.rank == 0)
comm.broadcast(told)
assert torch.equal(told, torch.arange(1000))
assert comm.broadcast_object(["long"] * 50) == ["long"] * 50
print("whole")
"""

START = "import hyfi_core\ncomm = hyfi_core.init()\n"
ABORTS = """
import time, hyfi_core
comm = hyfi_core.init()
if comm.rank == 1:
    comm.abort(70)
comm.barrier()
"""


DIES = """
import os, re, signal, time, hyfi_core
from pathlib import Path
comm = hyfi_core.init()
names = re.findall(r"/dev/shm/(mpich_shm_\\w+)", Path("/proc/self/maps").read_text())
total = comm.gather_objects(names)
if comm.rank == 0:
    assert all(total), total
    print("names", *{name for names in total for name in names}, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
comm.barrier()
"""


SHARES = """
from hyfi_core.comm import progress
found = comm.gather_objects("shared" if progress._patience == progress.SHARED_CORE else "own")
if found:
    print("cores", *found)
"""


def mpiexec(
    program: str, timeout: float = PATIENCE_S, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    assert MPIEXEC is not None
    return subprocess.run(
        [MPIEXEC, "-n", "2", sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        preexec_fn=before,
    )


def test_two_processes_equal_one() -> None:
    """One start for all: a step, maxima of NaN, and messages too long for one of MPI's, which go in pieces."""
    done = mpiexec(PROGRAM + SHARES)
    assert done.returncode == 0, done.stderr
    assert "equal [0, 1] {'a': [1, None]}" in done.stdout
    assert done.stdout.count("maxima") == 2
    assert done.stdout.count("whole") == 2
    assert "cores own own" in done.stdout or len(os.sched_getaffinity(0)) == 1


def test_ranks_that_are_more_than_their_cores_know_it() -> None:
    one = sorted(os.sched_getaffinity(0))[:1]
    done = mpiexec(START + SHARES, before=partial(os.sched_setaffinity, 0, one))
    assert done.stdout.split() == ["cores", "shared", "shared"]


def test_killed_ranks_leave_no_shared_memory() -> None:
    """Each killed or failed run left two megabytes of MPICH's."""
    assert MPIEXEC is not None
    if "HYDRA" not in subprocess.run([MPIEXEC, "--version"], capture_output=True, text=True).stdout:
        pytest.skip("the shared memory of MPICH")
    done = mpiexec(DIES)
    assert done.returncode != 0
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("names"))
    assert line.split()[1:] and not [name for name in line.split()[1:] if Path("/dev/shm", name).exists()]


def test_one_rank_that_aborts_ends_the_other_which_waits() -> None:
    done = mpiexec(ABORTS)  # without the abort it would wait for ever
    assert done.returncode not in (0, 3)
