"""Weights' cotangents are computed while sums of a norm are under way, and are what they are without that."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import hyfi_core
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.models import resnet
from hyfi_core.ops.convolution import Convolution
from hyfi_core.runtime.backward import BackwardPass
from tests.harness import assert_equal_to_one_process, run_copies


class TiedNet(nn.Module):
    """One convolution used twice, a third whose weight is made of others; norms behind all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.made = weight_norm(nn.Conv2d(4, 4, 3, padding=1))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images
        for convolve, norm in zip((self.first, self.twice, self.twice, self.made), self.norms, strict=True):
            x = F.relu(norm(convolve(x)))
        return self.head(x.mean((2, 3)))


def trained(model: nn.Module, plan: hyfi_core.ParallelPlan, deferring: bool, strict: bool = False) -> Any:
    """Gradients after two micro-batches, and how many convolutions deferred their weight gradient on one rank."""
    shape = (2, 3, 40, 44)
    images = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    flushed: list[int] = []
    flush = BackwardPass._flush

    def counting(self: BackwardPass) -> None:
        flushed.append(len(self._deferred))
        flush(self)

    def body(comm: Any, module: nn.Module) -> dict[str, torch.Tensor]:
        engine = hyfi_core.parallelize(module, shape, plan, comm)
        engine.accumulate(images, torch.tensor([0, 1]))
        return engine.gather_gradients()

    with mock.patch.object(BackwardPass, "_flush", counting):
        if deferring:
            return run_copies(model, plan.ranks, body, strict=strict)[0], sum(flushed)
        with mock.patch.object(BackwardPass, "_may_defer", lambda *_: False):
            return run_copies(model, plan.ranks, body, strict=strict)[0], sum(flushed)


PLANS = {
    "1x2": hyfi_core.ParallelPlan(grids=((1, 2),), microbatches=2, fused_halo=1),
    "2x2": hyfi_core.ParallelPlan(grids=((2, 2),), microbatches=2, fused_halo=1),
    "replicas": hyfi_core.ParallelPlan(grids=((1, 2),), replicas=2, fused_halo=1),
    "pipeline": hyfi_core.ParallelPlan(grids=((1, 2), (2, 1)), microbatches=2, schedule="1f1b", fused_halo=1),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("model", [lambda: resnet.resnet10(2, width=4), TiedNet], ids=["resnet10", "tied"])
def test_gradients_are_the_same_bits_whenever_they_are_computed(plan: hyfi_core.ParallelPlan, model: Any) -> None:
    torch.manual_seed(0)
    module = model().double()
    (late, deferred), (early, none) = (trained(module, plan, deferring, strict=True) for deferring in (True, False))
    assert deferred > 0 == none
    assert late.keys() == early.keys()
    for name, gradient in early.items():
        assert torch.equal(late[name], gradient), name


def test_deferred_gradients_are_computed_while_sums_are_under_way() -> None:
    events: list[str] = []
    start, weight = CountedCommunicator.start_all_reduce, Convolution._weight_back

    def told_start(self: CountedCommunicator, *given: Any) -> Any:
        pending = start(self, *given)
        if self.rank == 0 and self.kind == "reduce":
            events.append("start")
            wait = pending.wait
            pending = mock.Mock(wraps=pending, needs_polls=False)
            pending.wait.side_effect = lambda: (events.append("wait"), wait())
        return pending

    def told_weight(self: Convolution, back: Any) -> Any:
        if self.halo.transfer.have.x0 == 0:
            events.append("weight")
        return weight(self, back)

    torch.manual_seed(0)
    with (
        mock.patch.object(CountedCommunicator, "start_all_reduce", told_start),
        mock.patch.object(Convolution, "_weight_back", told_weight),
    ):
        trained(resnet.resnet10(2, width=4).double(), hyfi_core.ParallelPlan(grids=((1, 2),)), deferring=True)
    between = [now for before, now in pairwise(events) if before == "start"]
    assert between.count("weight") >= 3


class ScaledByOwnWeight(nn.Module):
    """A convolution whose weight scales its input, too: a use without a message, between the norm and itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.head = nn.Linear(8, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(images)) * self.second.weight.mean()
        return self.head(self.second(F.relu(x)).mean((2, 3)))


def test_a_gradient_with_a_deferred_part_is_not_reduced_before_it() -> None:
    torch.manual_seed(0)
    # Buckets of one parameter: each is reduced as soon as its gradient is reported as complete.
    with mock.patch("hyfi_core.runtime.gradients.BUCKET_BYTES", 8):
        assert_equal_to_one_process(ScaledByOwnWeight(), (2, 3, 64, 64), (2, 1), fused_halo=1)
