"""A NaN in a maximum is a NaN on every rank, as in one process, whatever carries the messages."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.waits import waited
from hyfi_core.ops.reduce import MaxOverSpace
from tests.conftest import PROGRAM_PATH
from tests.harness import run_copies
from tests.hyfi_core.comm.supervision.failing_ranks import launchers
from tests.patience import PATIENCE_S

SHAPE = (2, 3, 13, 11)
PLACES = [(0, 0, 0, 0), (0, 1, 12, 10), (1, 2, 6, 5), (1, 2, 7, 5)]
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "amax": lambda x: x.amax((2, 3)),
    "amin": lambda x: x.amin((2, 3)),
    "amax of a flattened map": lambda x: x.flatten(2).amax(2),
    "adaptive": lambda x: F.adaptive_max_pool2d(x, 1).flatten(1),
    "adaptive to 3 x 3": lambda x: F.adaptive_max_pool2d(x, 3).flatten(1),
    "pool": lambda x: F.max_pool2d(x, 3, 2, 1).sum((2, 3)),
    "pool and maximum": lambda x: F.max_pool2d(x, 2).amax((2, 3)),
    "maximum norm": lambda x: torch.linalg.vector_norm(x, math.inf, (2, 3)),
    "logsumexp": lambda x: torch.logsumexp(x, (2, 3)),
    "softmax": lambda x: (x.flatten(2).softmax(2) * x.flatten(2)).sum(2),
}


class Maxima(nn.Module):
    """Maxima of every kind, each of values that nothing else is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(len(FORMS), 3, 1, 1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([form(x * scale) for form, scale in zip(FORMS.values(), self.scale.unbind(), strict=True)], 1)


def loss(answer: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(answer, 0.5).square().sum() + answer.nansum()


def check(comm: Communicator, model: Maxima, grid: tuple[int, int]) -> None:
    """Compare answer, loss and gradients with one process, on every rank."""
    images = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for place in PLACES:
        images[place] = math.nan
    reference, plan = copy.deepcopy(model), hyfi_core.ParallelPlan(grids=(grid,))
    engine = hyfi_core.parallelize(model, SHAPE, plan, comm, loss=loss, verify=False)
    found = engine.accumulate(images, torch.tensor([0, 1]))
    answer = reference(images)
    wanted = loss(answer, torch.tensor([0, 1]))
    wanted.backward()
    assert answer.isnan().any() and not answer.isnan().all()
    torch.testing.assert_close(found, wanted.item(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(engine.predict(images), answer.detach(), rtol=1e-12, atol=1e-12, equal_nan=True)
    for name, share, wanted_share in zip(FORMS, model.scale.grad, reference.scale.grad, strict=True):  # type: ignore
        assert torch.allclose(share, wanted_share, 1e-12, 1e-12, equal_nan=True), name


class CallCounts(nn.Module):
    """What a forward counts and compares: boolean and integer maps, and types that one process would give."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        above, whole = x > 0, (4 * x).to(torch.int32)
        return [
            above.sum((2, 3)),
            above.sum((2, 3), dtype=torch.int32),
            above.to(torch.uint8).sum((2, 3)),
            above.cumsum(1).sum((2, 3)),
            (x < -9).amax((2, 3)),
            above.any(3).any(2),
            above.flatten(2).all(2),
            whole.amax((2, 3)),
            (-1 - whole.abs()).amax((2, 3)),
            (whole.long() % 3).sum((2, 3)),
            torch.cat([above, x < -1], 1),
            F.pad(above, (1, 1, 1, 1)),
            x.argmax(1) == 1,
        ]


def check_counts(comm: Communicator, grid: tuple[int, int], rows: int = 3) -> None:
    """Compare values and types with one process, on every rank; some ranks own no rows."""
    images = torch.randn(2, 3, rows, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Identity(), CallCounts()).double()
    plan, wanted = hyfi_core.ParallelPlan(grids=(grid,)), CallCounts()(images)
    found = hyfi_core.parallelize(model, (2, 3, rows, 5), plan, comm, verify=False).predict(images)
    for n, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.dtype == other.dtype and torch.equal(one, other), n


def test_boolean_and_integer_maps_keep_their_types_where_a_rank_owns_nothing() -> None:
    run_copies(CallCounts(), 8, lambda comm, _: check_counts(comm, (4, 2)))


PROGRAM = """
import hyfi_core
from tests.hyfi_core.ops.test_reduce import Maxima, check, check_counts
comm = hyfi_core.init()
check(comm, Maxima(), (comm.size // 2, 2))
check_counts(comm, (comm.size, 1), comm.size - 1)
print("equal", flush=True)
"""


def test_nan_in_maxima_on_threads() -> None:
    run_copies(Maxima(), 4, lambda comm, model: check(comm, model, (2, 2)))


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize(("launcher", "ranks"), [("MPICH", 4), ("Open MPI", 2), ("Open MPI", 4)])
def test_nan_and_types_on_processes(launcher: str, ranks: int, tmp_path: Path) -> None:
    """The libraries' own maxima ignore NaN, and they know neither booleans nor ranks that own nothing.

    Two ranks of MPICH and of torchrun are tested in ``comm/test_mpi.py`` and ``comm/test_torchdist.py``.
    """
    if launcher not in launchers():
        pytest.skip(f"no {launcher} here")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    words, settings = launchers()[launcher]
    environment = os.environ | {"PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1"} | settings
    command = [*words, str(ranks), sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == ranks


def test_the_gradient_of_a_maximum_sums_two_numbers_for_each_over_ranks() -> None:
    """A cotangent and a number of ties, of two images with three channels."""
    comm, sums = AloneCommunicator(), list[torch.Size]()
    start = comm.start_all_reduce
    comm.start_all_reduce = lambda tensor, *how: sums.append(tensor.shape) or start(tensor, *how)  # type: ignore
    maximum, maps = MaxOverSpace((2, 3), keepdim=False), torch.randn(2, 3, 4, 5)
    (top,), saved = waited(maximum.forward(comm, (maps,)))
    waited(maximum.backward(comm, saved, (torch.ones_like(top),)))
    assert sums == [(2, 3, 1, 1), (2, 2, 3, 1, 1)]
