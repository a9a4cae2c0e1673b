"""Each rank computes its part cell by cell, in training, too: the same numbers as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core import ParallelPlan
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.resnet import resnet10
from hyfi_core.plan.placement import Placement
from tests.harness import captured_once  # noqa: F401 (what follows captures each model once)
from tests.steps import assert_plan_equals_one_process, sgd


class Mixed(nn.Module):
    """Squeeze and excitation, dropout, dense connections, group and instance norm, a mean and a maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 5, stride=2, padding=2)
        self.norms = nn.ModuleList([nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True), nn.BatchNorm2d(16)])
        self.squeeze = nn.Linear(8, 8)
        self.second = nn.Conv2d(8, 8, 3, padding=2, dilation=2)
        self.head = nn.Linear(32, 2)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norms[0](self.first(x)))
        x = x * torch.sigmoid(self.squeeze(x.mean((2, 3))))[:, :, None, None]
        y = self.norms[1](self.second(self.drop(x)))
        z = nn.functional.max_pool2d(self.norms[2](torch.cat([x, y], 1)), 3, 2, 1)
        return self.head(torch.cat([z.mean((2, 3)), z.amax((2, 3))], 1))


class Bytes(nn.Module):
    """Scales bytes, as a model may do itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() / 255 - 0.5


def frozen(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


SHAPE = (2, 3, 67, 53)
ALONE = [
    ("resnet", (1, 2), {}),
    ("resnet", (4, 4), {}),
    ("resnet", (3, 1), {"microbatches": 2, "recompute": True}),
    ("resnet", (2, 2), {"fused_halo": 3}),
    ("frozen", (3, 2), {}),
    pytest.param("amoebanet", (2, 3), {}, marks=pytest.mark.soak),
]


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name == "amoebanet":
        return amoebanet_d(2, 3, 16)
    return frozen(resnet10(2, width=4)) if name == "frozen" else resnet10(2, width=4)


@pytest.mark.parametrize(("name", "cells", "others"), ALONE)
def test_one_rank_trains_cell_by_cell(name: str, cells: tuple[int, int], others: dict[str, Any]) -> None:
    plan = ParallelPlan(((1, 1),), cells=cells, **others)
    shape = (2, 3, 97, 113) if name == "amoebanet" else SHAPE
    assert_plan_equals_one_process(make(name), shape, plan, factory=sgd, steps=2, strict=False)


TOGETHER = [
    (((1, 2),), (), (2, 2), {"microbatches": 2}),
    (((1, 1),), (), (2, 1), {"replicas": 2}),
    (((2, 1), (1, 1)), ("layer2",), (1, 3), {"microbatches": 2, "schedule": "1f1b"}),
    (((1, 2), (1, 1)), ("layer2",), (2, 2), {"microbatches": 2, "schedule": "chimera"}),
    (
        ((1, 1), (1, 1)),
        ("layer3",),
        (2, 1),
        {"microbatches": 2, "schedule": "gems_master", "mirror": "point_to_point", "recompute": True},
    ),
]


@pytest.mark.parametrize(("grids", "cuts", "cells", "others"), TOGETHER)
def test_cells_compose_with_every_dimension(grids: Any, cuts: Any, cells: Any, others: dict[str, Any]) -> None:
    plan = ParallelPlan(grids, cuts, cells=cells, **others)
    assert_plan_equals_one_process(make("resnet"), (2, 3, 67, 53), plan, factory=sgd, steps=2, strict=False)


def test_random_numbers_and_statistics_are_those_of_any_plan() -> None:
    """Dropout draws by global position: a rank's cells draw what the ranks of a grid would."""
    images, labels = torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1])
    found = []
    for cells in (None, (3, 2)):
        torch.manual_seed(7)
        model = Mixed().double()
        torch.manual_seed(8)
        engine = hyfi_core.parallelize(model, SHAPE, ParallelPlan(((1, 1),), cells=cells), AloneCommunicator())
        loss = engine.accumulate(images, labels)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append((loss, gradients, dict(model.state_dict())))
    assert abs(found[0][0] - found[1][0]) < 1e-12
    everything = torch.cat([g.flatten() for g in found[0][1].values()]).norm()
    for name, gradient in found[0][1].items():
        assert (found[1][1][name] - gradient).norm() <= 1e-10 * max(gradient.norm(), 1e-3 * everything), name
    for name, value in found[0][2].items():
        torch.testing.assert_close(found[1][2][name], value, rtol=1e-10, atol=1e-10)


def test_images_are_read_cell_by_cell() -> None:
    asked: list[hyfi_core.Box] = []
    whole = torch.randint(0, 255, SHAPE, dtype=torch.uint8)

    def read(box: hyfi_core.Box) -> torch.Tensor:
        asked.append(box)
        return whole[:, :, box.y0 : box.y1, box.x0 : box.x1]

    model, plan = nn.Sequential(Bytes(), make("resnet")), ParallelPlan(((1, 1),), cells=(2, 2))
    engine = hyfi_core.parallelize(model, SHAPE, plan, AloneCommunicator(), image_dtype=torch.uint8)
    one = engine.accumulate(read, torch.tensor([0, 1]))
    assert [part.box for part in engine.input_parts] == asked and len(asked) == 4
    assert max(box.area for box in asked) < 0.4 * 67 * 53
    assert engine.input_box == hyfi_core.Box(0, 67, 0, 53)
    assert abs(one - engine.accumulate(whole, torch.tensor([0, 1]))) < 1e-6


def test_plans_with_cells_are_kept_and_told() -> None:
    plan = ParallelPlan(((1, 2),), cells=(2, 3))
    assert ParallelPlan.from_json(plan.to_json()) == plan
    assert plan.ranks == 2 and plan.by_cells().ranks == 12
    assert "2 x 3 cells" in plan.describe()
    assert Placement.of(plan).by_cells((2, 3)).group(0) == (0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11)
    for cells in ((0, 2), 3, "2,2", (2, 2, 2)):
        with pytest.raises(hyfi_core.errors.RequestError, match=r"plan\.cells"):
            ParallelPlan(((1, 1),), cells=cells)  # type: ignore[arg-type]
