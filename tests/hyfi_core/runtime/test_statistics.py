"""Running statistics that forwards have changed."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from tests.steps import assert_plan_equals_one_process


def test_running_statistics_are_stored_by_two_calls_for_all_norms() -> None:
    """A copy for each buffer was most of what the engine added to a step on a GPU: three for each norm."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    plain = deepcopy(model)
    images, labels = torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 2])
    plan = hyfi_core.ParallelPlan(grids=((1, 1),))
    engine = hyfi_core.parallelize(model, tuple(images.shape), plan, AloneCommunicator(), loss=F.cross_entropy)
    with torch.profiler.profile() as profile:
        engine.accumulate(images, labels)
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::_foreach_copy_") == 2
    plain(images)
    expected = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected[name], rtol=0, atol=1e-14)


class CallsItsNormTwice(nn.Module):
    """One norm after each of two convolutions, and one that is called once."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum))
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum)
        self.head = nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = self.norm(self.conv(torch.tanh(self.enter(images))))
        return self.head(self.norm(self.conv(torch.tanh(first))).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_two_directions_fold_each_call_of_a_norm(momentum: float | None) -> None:
    plan = hyfi_core.ParallelPlan(((1, 1), (1, 1)), cuts=("enter",), microbatches=2, schedule="gems_master")
    assert_plan_equals_one_process(CallsItsNormTwice(momentum), (2, 3, 12, 10), plan)


class CallsInstanceNorms(nn.Module):
    """Instance norms with running statistics: one is called once, the other one twice."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        once = nn.InstanceNorm2d(4, track_running_stats=True)
        self.enter = nn.Sequential(nn.Conv2d(3, 4, 3), once)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.InstanceNorm2d(4, momentum=momentum, track_running_stats=True)  # type: ignore[arg-type]
        self.head = nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = self.norm(self.conv(torch.tanh(self.enter(images))))
        return self.head(self.norm(self.conv(torch.tanh(first))).square().mean((2, 3)))  # type: ignore[no-any-return]


def test_two_directions_fold_each_call_of_an_instance_norm() -> None:
    plan = hyfi_core.ParallelPlan(((1, 1), (1, 1)), cuts=("enter",), microbatches=2, schedule="gems_master")
    assert_plan_equals_one_process(CallsInstanceNorms(0.3), (2, 3, 12, 10), plan)


def test_two_directions_refuse_an_instance_norm_without_momentum() -> None:
    plan = hyfi_core.ParallelPlan(((1, 1), (1, 1)), cuts=("enter",), microbatches=2, schedule="gems_master")
    with pytest.raises(RequestError, match="no defined order"):
        assert_plan_equals_one_process(CallsInstanceNorms(None), (2, 3, 12, 10), plan)
