"""The promise: partitioned training equals one process, to rounding, for every parameter, on any grid and any size."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

import hyfi_core
from hyfi_core.models import resnet
from hyfi_core.models.by_name import build_model
from tests.harness import assert_equal_to_one_process, run_copies
from workflows.commands.demo import RECIPE

LONG = [pytest.param(grid, marks=pytest.mark.soak) for grid in ((1, 3), (2, 2))]


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 1), (2, 3), *LONG])
def test_resnet_18_with_odd_sizes(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_equal_to_one_process(resnet.resnet18(2, width=8), (2, 3, 101, 77), grid)


@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (2, 3)])
def test_the_demos_network_with_odd_sizes(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = yaml.safe_load(RECIPE.read_text())["model"] | {"classes": 2}
    assert_equal_to_one_process(build_model(model), (2, 3, 121, 93), grid)


@pytest.mark.parametrize(
    ("options", "shape", "grid"),
    [
        ({"pool": "max"}, (2, 3, 77, 64), (2, 2)),
        ({"norm": "group"}, (2, 3, 66, 75), (1, 3)),
        ({"norm": "frozen"}, (1, 3, 80, 90), (2, 2)),
        ({}, (3, 3, 40, 50), (3, 3)),  # the last maps have fewer pixels than ranks: some own nothing
    ],
)
def test_a_resnet_in_other_modes(options: dict[str, Any], shape: Any, grid: tuple[int, int]) -> None:
    torch.manual_seed(1)
    assert_equal_to_one_process(resnet.resnet10(2, width=8, **options), shape, grid)


@pytest.mark.parametrize("blocks", [(1, 2, 1, 1), pytest.param((3, 4, 6, 3), marks=pytest.mark.soak)])
def test_bottlenecks_as_of_resnet_50(blocks: tuple[int, int, int, int]) -> None:
    torch.manual_seed(2)
    model = resnet.ResNet(resnet.Bottleneck, blocks, 3, "avg", "train", 8, 3)
    assert_equal_to_one_process(model, (1, 3, 65, 130), (2, 2), classes=3)


LARGER = [pytest.param(*network, marks=pytest.mark.soak) for network in ((1, 20), (2, 29))]


@pytest.mark.parametrize(("version", "depth"), [(1, 14), (2, 20), *LARGER])  # two blocks a stage, and three
def test_the_cifar_families(version: int, depth: int) -> None:
    torch.manual_seed(3)
    make = resnet.resnet_v1 if version == 1 else resnet.resnet_v2
    assert_equal_to_one_process(make(depth, classes=2), (2, 3, 37, 45), (2, 2))


def test_evaluation_mode_trains_on_running_statistics() -> None:
    torch.manual_seed(4)
    assert_equal_to_one_process(resnet.resnet10(2, width=8).eval(), (2, 3, 64, 50), (2, 2))


@pytest.mark.parametrize("grid", [(1, 1), (2, 2)])
def test_a_batch_of_four_with_class_weights_is_four_micro_batches_of_one(grid: tuple[int, int]) -> None:
    """The loss is the sum of w·l over the batch divided by the batch, however the batch is cut."""
    torch.manual_seed(5)
    model = resnet.resnet10(2, width=8, norm="frozen").double()
    images, labels = torch.randn(4, 3, 49, 53, dtype=torch.float64), torch.tensor([0, 1, 1, 0])
    weights = torch.tensor([0.6, 1.4], dtype=torch.float64)

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (weights[targets] * F.cross_entropy(logits, targets, reduction="none")).mean()

    outcomes = []
    for count in (1, 4):
        plan = hyfi_core.ParallelPlan(grids=(grid,), microbatches=count)

        def body(comm: Any, module: nn.Module, plan: Any = plan) -> Any:
            engine = hyfi_core.parallelize(module, (4, 3, 49, 53), plan, comm, loss=loss)
            return engine.accumulate(images, labels), engine.gather_gradients()

        outcomes.append(run_copies(model, plan.ranks, body)[0])
    (loss_a, whole), (loss_b, pieces) = outcomes
    assert abs(loss_a - loss_b) < 1e-12
    everything = torch.cat([g.flatten() for g in whole.values()]).norm()
    for name, gradient in whole.items():
        assert (pieces[name] - gradient).norm() <= 1e-10 * max(gradient.norm(), 1e-3 * everything), name


class Odd(nn.Module):
    """Windows of every kind: even and 1 x 7 kernels, dilation, groups, "same" padding, both pools and their corners."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 8, (1, 7), padding=(0, 3))
        self.tall = nn.Conv2d(8, 8, (7, 1), padding="same", groups=2)
        self.even = nn.Conv2d(8, 8, 4, padding="same", bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8)
        self.skip = nn.Conv2d(8, 8, 1, stride=2, bias=False)
        self.down = nn.Conv2d(8, 8, 5, stride=2, padding=2)
        self.top = nn.MaxPool2d(3, 2, 1, ceil_mode=True)
        self.mean = nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 16, 1), nn.Hardsigmoid())
        self.group = nn.GroupNorm(4, 16)
        self.instance = nn.InstanceNorm2d(16, affine=True)
        self.features = nn.Linear(16, 6)
        self.normed = nn.BatchNorm1d(6)
        self.fc = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.relu_(self.tall(self.wide(x)))
        x = F.gelu(self.norm(self.even(x)))
        x = self.down(self.deep(x)) + self.skip(x)
        x = torch.cat([self.top(x), self.mean(x)], 1)
        x = x * self.gate(x)
        a, b = self.instance(self.group(x)).chunk(2, 1)
        x = torch.cat([F.silu(a), b.softmax(1)], 1)
        return {"logits": self.fc(self.normed(self.features(x.mean((2, 3)) + x.amax((2, 3))))), "map": x}


@pytest.mark.parametrize(
    ("shape", "grid"), [((2, 3, 41, 38), (2, 2)), ((3, 3, 29, 60), (1, 3)), ((2, 3, 23, 31), (3, 2))]
)
def test_operators_of_every_kind_and_an_answer_that_is_a_dict(shape: Any, grid: tuple[int, int]) -> None:
    torch.manual_seed(6)
    assert_equal_to_one_process(Odd(), shape, grid, output=lambda out: out["logits"])


class Shared(nn.Module):
    """One convolution used twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 3, 3, padding=1)
        self.second.weight = self.first.weight
        self.unused = nn.Conv2d(3, 3, 1)
        self.fc = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.fc(self.second(torch.tanh(self.first(x))).mean((2, 3))), 7


def test_tied_and_unused_parameters_and_an_answer_that_is_a_tuple() -> None:
    torch.manual_seed(7)
    result = assert_equal_to_one_process(Shared(), (2, 3, 19, 22), (2, 2), output=lambda out: out[0])
    assert "unused.weight" not in result.gradients


def test_twenty_steps_of_momentum_stay_together() -> None:
    torch.manual_seed(8)
    model = resnet.resnet10(2, width=8).double()
    images, labels = torch.randn(2, 3, 49, 42, dtype=torch.float64), torch.tensor([0, 1])
    plan = hyfi_core.ParallelPlan(grids=((2, 2),))

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(
            module,
            (2, 3, 49, 42),
            plan,
            comm,
            optimizer=lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
        )
        return [engine.train_step(images, labels) for _ in range(20)], engine.gather_state_dict()

    losses, state = run_copies(model, 4, body)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for wanted in losses:
        loss = F.cross_entropy(model(images), labels)
        assert abs(loss.item() - wanted) < 1e-8
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        assert (state[name].double() - value.double()).abs().max() < 1e-8, name


def test_float32_is_at_most_twice_as_far_from_float64_as_plain_float32() -> None:
    torch.manual_seed(9)
    model = resnet.resnet18(2, width=8)
    images, labels = torch.randn(2, 3, 97, 101), torch.tensor([0, 1])
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    F.cross_entropy(exact(images.double()), labels).backward()
    F.cross_entropy(plain(images), labels).backward()

    def body(comm: Any, module: nn.Module) -> Any:
        plan = hyfi_core.ParallelPlan(grids=((2, 2),))
        engine = hyfi_core.parallelize(module, (2, 3, 97, 101), plan, comm)
        engine.accumulate(images, labels)
        return engine.gather_gradients()

    ours = run_copies(model, 4, body)[0]

    def distance(gradients: dict[str, torch.Tensor]) -> float:
        gaps = [gradients[name].double() - p.grad for name, p in exact.named_parameters()]
        return float(torch.cat([gap.flatten() for gap in gaps]).norm())

    assert distance(ours) <= 2 * distance({name: p.grad for name, p in plain.named_parameters()})
