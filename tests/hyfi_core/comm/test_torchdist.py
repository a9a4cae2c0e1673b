"""Ranks that ``torchrun`` started: the same engine over gloo equals one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import PROGRAM_PATH
from tests.patience import PATIENCE_S

PROGRAM = """
import copy, torch, torch.nn.functional as F, hyfi_core
from hyfi_core.comm.base import Message
from tests.hyfi_core.ops.test_reduce import Maxima, check, check_counts
comm = hyfi_core.init()
assert comm.size == 2
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.BatchNorm2d(4), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
).double()
torch.manual_seed(0)
torch.nn.init.normal_(model[0].weight)
images, labels = torch.randn(1, 3, 21, 18, dtype=torch.float64), torch.tensor([1])
reference = copy.deepcopy(model)
engine = hyfi_core.parallelize(model, (1, 3, 21, 18), hyfi_core.ParallelPlan(grids=((2, 1),)), comm)
engine.accumulate(images, labels)
gradients = engine.gather_gradients()
comm.send_object({"from": comm.rank}, 1 - comm.rank, 4)
while (found := comm.poll_object(4)) is None:
    pass
assert found == (1 - comm.rank, {"from": 1 - comm.rank})
box = torch.empty(3)
pending = comm.exchange([Message(1 - comm.rank, torch.full((3,), float(comm.rank)))], [Message(1 - comm.rank, box)])
while not pending.test():
    pass
assert box[0] == 1 - comm.rank
many, narrow = torch.full((3,), 1.0 + comm.rank), torch.full((2,), 0.5 + comm.rank, dtype=torch.bfloat16)
started = [comm.start_all_reduce(many), comm.start_all_reduce(narrow, "max")]
while not all(pending.test() for pending in started):
    pass
assert many.tolist() == [3.0] * 3 and narrow.tolist() == [1.5] * 2
mirrored = comm.split(0, key=-comm.rank)
assert mirrored.rank == 1 - comm.rank and mirrored.broadcast_object(comm.rank) == 1
crossed = comm.subgroup([1, 0])
assert crossed.rank == 1 - comm.rank and crossed.broadcast_object(comm.rank) == 1
single = comm.subgroup([1] if comm.rank == 1 else [])
assert (single is None) == (comm.rank == 0)
check(comm, Maxima(), (1, 2))
check_counts(comm, (2, 1), 1)
print("maxima", flush=True)
if comm.rank == 0:
    F.cross_entropy(reference(images), labels).backward()
    for name, p in reference.named_parameters():
        assert (gradients[name] - p.grad).norm() <= 1e-10, name
    print("equal", comm.gather_objects(comm.rank))
else:
    comm.gather_objects(comm.rank)
"""


LOST = """
import os, sys, torch, torch.distributed as dist
from hyfi_core.comm.base import Message
from hyfi_core.comm.torchdist import TorchCommunicator
from hyfi_core.errors import LostPeerError
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
comm = TorchCommunicator(dist.group.WORLD, [0, 1])
comm.all_reduce(torch.zeros(1))
for _ in range(2 - 2 * rank):  # the second exchange is started on a connection that has ended
    try:
        comm.exchange([], [Message(1, torch.empty(3))]).wait()
    except LostPeerError as error:
        print("lost:", type(error.__cause__).__name__, flush=True)
os._exit(0)
"""


def run_two(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_rank_that_is_gone_is_an_error_of_its_own(tmp_path: Path) -> None:
    command, environment = [sys.executable, "-c", LOST], os.environ | {"PYTHONPATH": PROGRAM_PATH}
    words = [[*command, str(rank), str(tmp_path / "store")] for rank in (1, 0)]
    gone = subprocess.Popen(words[0], env=environment)
    left = subprocess.run(words[1], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert gone.wait() == 0
    assert left.stdout.splitlines() == ["lost: RuntimeError"] * 2, left.stderr


def test_two_processes_equal_one(tmp_path: Path) -> None:
    done = run_two(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "equal [0, 1]" in done.stdout
    assert done.stdout.count("maxima") == 2
