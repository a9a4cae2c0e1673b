"""A forward that is computed again has the statistics of its norms from the first run, and measures no map twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

import hyfi_core
from hyfi_core.cells import paging
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.plan.parallel_plan import ParallelPlan
from tests.harness import run_copies
from tests.steps import assert_plan_equals_one_process

NORMS = 4
ONE = ((1, 1),)
SHAPE = (2, 3, 22, 19)
PLANS = {
    "one rank": ParallelPlan(ONE, interleave=3, recompute=True),
    "two micro-batches": ParallelPlan(ONE, microbatches=2, schedule="gpipe", recompute=True),
    "grid": ParallelPlan(((2, 1),), interleave=3, recompute=True),
    "replicas": ParallelPlan(ONE, interleave=2, recompute=True, replicas=2),
    "cells": ParallelPlan(ONE, interleave=3, recompute=True, cells=(2, 2)),
    "cells of ranks": ParallelPlan(((1, 2),), interleave=3, recompute=True, cells=(2, 1)),
    "cells that spill": ParallelPlan(ONE, recompute=True, cells=(2, 1), spill="memory"),
}
SYNCHRONISED = ParallelPlan(ONE, interleave=2, recompute=True, replicas=2, sync_batch_norm=True)


class Counted(TorchDispatchMode):
    """Counts the operators that compute moments of a map."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").partition(".")[0]
        in_training = name in ("native_batch_norm", "cudnn_batch_norm") and args[5]
        self.calls["moments"] += name == "batch_norm_update_stats" or in_training
        return func(*args, **(kwargs or {}))


def network() -> nn.Module:
    """Norms of every kind, with moving and cumulative averages, and without weights or running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8, affine=False, momentum=None), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6, track_running_stats=False), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6, momentum=0.3, eps=1e-3)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)),
    )


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_recomputed_norms_equal_one_process(plan: ParallelPlan) -> None:
    strict = plan.cells is None or plan.ranks == 1  # cells of several ranks need messages with tags
    assert_plan_equals_one_process(network(), SHAPE, plan, strict=strict)


@pytest.mark.parametrize("plan", [*PLANS.values(), SYNCHRONISED], ids=[*PLANS, "synchronised"])
def test_moments_are_computed_once_for_each_norm_and_cell(plan: ParallelPlan) -> None:
    images, labels = torch.randn(SHAPE), torch.tensor([0, 1])

    def body(comm: Any, module: nn.Module) -> int:
        engine = hyfi_core.parallelize(module, SHAPE, plan, comm, verify=False)
        with Counted() as counted:
            engine.accumulate(images, labels)
        return counted.calls["moments"]

    cells = 1 if plan.cells is None else plan.cells[0] * plan.cells[1]
    assert run_copies(network(), plan.ranks, body) == [NORMS * cells * plan.microbatches] * plan.ranks


def test_known_statistics_are_not_spilled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "page_limit", lambda *given: 100_000)  # statistics of these norms are pages, too
    many = [
        nn.Conv2d(3, 4200, 1),
        nn.BatchNorm2d(4200),
        nn.Conv2d(4200, 8, 3),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 4200, 1),
    ]
    model = nn.Sequential(*many, nn.BatchNorm2d(4200), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4200, 2))
    plan = ParallelPlan(ONE, recompute=True, cells=(2, 1), spill="memory")
    assert_plan_equals_one_process(model, (1, 3, 9, 7), plan, steps=2)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_recomputed_pieces_of_one_rank_have_the_bits_of_those_that_are_not(autocast: torch.dtype | None) -> None:
    images, labels = torch.randn(SHAPE), torch.tensor([0, 1])
    found = []
    for recompute in (True, False):
        plan = ParallelPlan(ONE, microbatches=2, schedule="gpipe", recompute=recompute)
        model = network()
        more: Any = {"verify": False, "autocast": autocast}
        engine = hyfi_core.parallelize(model, SHAPE, plan, AloneCommunicator(), **more)
        loss = [engine.accumulate(images, labels) for _ in range(2)]
        found.append((loss, engine.gather_gradients(), dict(model.named_buffers())))
    (loss, gradients, buffers), (plain_loss, plain_gradients, plain_buffers) = found
    assert loss == plain_loss
    for some, others in ((gradients, plain_gradients), (buffers, plain_buffers)):
        assert some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in others)


class ReadsItsAverage(nn.Module):
    """Shifts its map by the running mean that its norm has just changed."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.leave = nn.Sequential(nn.Conv2d(4, 2, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(self.enter(x))
        assert self.norm.running_mean is not None
        return self.leave(torch.tanh(y + self.norm.running_mean.view(1, -1, 1, 1)))


@pytest.mark.parametrize("grid", [(1, 1), (2, 1)])
def test_a_running_mean_that_the_forward_reads_is_that_of_its_own_run(grid: tuple[int, int]) -> None:
    plan = ParallelPlan((grid,), microbatches=2, schedule="gpipe", recompute=True)
    torch.manual_seed(0)
    assert_plan_equals_one_process(ReadsItsAverage(), SHAPE, plan)


class ReadsItsAverageBefore(nn.Module):
    """Scales its map by the running mean that its norm has before, and by a weight that power iteration normalises."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = spectral_norm(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4)
        self.leave = nn.Sequential(nn.Conv2d(4, 2, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: torch.Tensor) -> Any:
        assert self.norm.running_mean is not None
        before = self.norm.running_mean.clone().view(1, -1, 1, 1)
        return self.leave(torch.tanh(self.norm(self.enter(x))) * (1 + before))


@pytest.mark.parametrize("grid", [(1, 1), (2, 1)])
@pytest.mark.parametrize("more", [{}, {"cells": (2, 1)}], ids=["ranks", "cells"])
def test_buffers_that_a_forward_reads_are_those_of_its_first_run(grid: tuple[int, int], more: dict[str, Any]) -> None:
    """Forwards of other micro-batches have changed them before it is computed again."""
    plan = ParallelPlan((grid,), microbatches=2, schedule="gpipe", recompute=True, **more)
    torch.manual_seed(0)
    assert_plan_equals_one_process(ReadsItsAverageBefore(), SHAPE, plan, strict=not more or grid == (1, 1))
