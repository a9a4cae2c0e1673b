"""Buffers that one cell updates for all: only where nothing else depends on it, and with the same values."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.program import refs_in
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.lowering.without_updates import updates_are_apart, without_updates
from hyfi_core.models.resnet import resnet10
from tests.harness import run_copies

SHAPE = (2, 3, 24, 20)


class Small(nn.Module):
    """A convolution and its norm."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu().mean((2, 3))


class Twice(Small):
    """The same norm, twice: the second call updates what the first has updated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(self.norm(self.conv(x))[:, :3])).mean((2, 3))


class Counts(Small):
    """Its maps depend on a counter that it changes."""

    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return (self.norm(self.conv(x)) / self.steps).relu().mean((2, 3))


class ReadsMean(Small):
    """Its maps depend on the running mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.norm.running_mean is not None
        return (self.norm(self.conv(x)) + self.norm.running_mean[:, None, None]).relu().mean((2, 3))


class StoresMean(Small):
    """Stores the mean of a map, which takes a message between cells."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        map_ = self.conv(x)
        self.mean += map_.detach().mean((0, 2, 3))
        return self.norm(map_).mean((2, 3))


class OnlyStatistics(Small):
    """Normalises a map only for its statistics."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        map_ = self.conv(x)
        self.norm(map_)
        return map_.mean((2, 3))


class SumOfMeans(nn.Module):
    """Stores the sum of running means of two modules, the first of which is sent where they are in two stages."""

    means: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Conv2d(c, 4, 3, padding=1), nn.BatchNorm2d(4)) for c in (3, 4))
        self.register_buffer("means", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        first = self.first[1].running_mean * 1.0
        x = self.second(x)
        self.means.copy_(first + self.second[1].running_mean)
        return x.mean((2, 3))


@pytest.mark.parametrize(
    ("model", "apart"),
    [
        (Small(), True),
        (Small(momentum=None), True),
        (Twice(), True),
        (resnet10(2), True),
        (Counts(), False),
        (ReadsMean(), False),
        (StoresMean(), False),
        (OnlyStatistics(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_updates_are_apart_where_only_buffers_depend_on_them(model: nn.Module, apart: bool) -> None:
    program = capture(model.train(), SHAPE, torch.float32)
    results = tuple(refs_in(program.outputs))
    assert updates_are_apart(program, results) is apart
    if apart:
        lean = without_updates(program, results)
        assert not lean.mutations and len(lean.operators) < len(program.operators)
        computed = {name for op in lean.operators for name in op.outputs if name is not None}
        given = {lean.image, *lean.parameters, *lean.buffers, *lean.constants}
        assert {name for op in lean.operators for name in op.inputs} <= computed | given


@pytest.mark.parametrize(
    "model", [Small(momentum=None), Twice(), Counts(), ReadsMean(), StoresMean(), OnlyStatistics()], ids=type
)
def test_buffers_and_gradients_of_cells_are_those_of_one_process(model: nn.Module) -> None:
    model = model.double().train()
    plain = copy.deepcopy(model)
    images, labels = torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 3])
    plan = hyfi_core.ParallelPlan(grids=((1, 1),), cells=(2, 2), microbatches=2)
    engine = hyfi_core.parallelize(model, SHAPE, plan, AloneCommunicator(), loss=F.cross_entropy)
    for _ in range(2):
        engine.accumulate(images, labels)
        for microbatch in zip(images.split(1), labels.split(1), strict=True):
            (F.cross_entropy(plain(microbatch[0]), microbatch[1]) / 2).backward()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, rtol=1e-12, atol=1e-12, msg=name)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, parameter.grad, rtol=1e-10, atol=1e-12)


def test_a_stage_is_sent_values_of_updated_buffers() -> None:
    """Of the second stage's two ranks, the latter receives them of a cell of the first stage that is not its first."""
    model = SumOfMeans().double().train()
    images, labels = torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 3])
    plan = hyfi_core.ParallelPlan(grids=((1, 1), (1, 2)), cuts=("first",), cells=(2, 2), microbatches=2)

    def body(comm: Communicator, module: nn.Module) -> torch.Tensor:
        hyfi_core.parallelize(module, SHAPE, plan, comm, loss=F.cross_entropy).accumulate(images, labels)
        return module.get_buffer("means")

    _, *second = run_copies(model, plan.ranks, body)
    for microbatch in images.split(1):
        model(microbatch)
    for means in second:
        torch.testing.assert_close(means, model.means, rtol=1e-12, atol=1e-12)
