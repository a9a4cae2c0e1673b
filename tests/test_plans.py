"""Stages, schedules, directions and replicas compose: every plan trains as one process does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyfi_core import ParallelPlan
from hyfi_core.models.amoebanet import amoebanet_d
from hyfi_core.models.resnet import resnet18
from tests.steps import Factory, adamw, assert_plan_equals_one_process, sgd

SCHEDULES = ("sequential", "gpipe", "1f1b", "gems_mast", "gems_master", "chimera")


class Hourglass(nn.Module):
    """A small U-Net with a linear head; its skips go over several stages."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.enter = self._block(3, width)
        self.down1 = self._block(width, 2 * width, 2)
        self.down2 = self._block(2 * width, 2 * width, 2)
        self.up1 = self._block(4 * width, width)
        self.up2 = self._block(2 * width, width)
        self.fc = nn.Linear(width, 2)

    @staticmethod
    def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.enter(x)
        b = self.down1(a)
        c = self.down2(b)
        c = nn.functional.interpolate(c, size=b.shape[-2:], mode="bilinear", align_corners=False)
        d = self.up1(torch.cat([c, b], 1))
        d = nn.functional.interpolate(d, size=a.shape[-2:], mode="nearest")
        return self.fc(self.up2(torch.cat([d, a], 1)).mean((2, 3)))


def make(name: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a model and three places to cut it."""
    torch.manual_seed(5)
    if name == "resnet":
        return resnet18(2, width=4), ("layer1", "layer2", "layer3")
    if name == "amoebanet":
        return amoebanet_d(2, layers=3, filters=16), ("cells.0", "cells.2", "cells.4")
    return Hourglass(), ("enter", "down1", "up1")


GRIDS = {
    "1+1": ((1, 1), (1, 1)),
    "4+1": ((2, 2), (1, 1)),
    "2+2+1": ((1, 2), (2, 1), (1, 1)),
    "4+2+1+1": ((2, 2), (1, 2), (1, 1), (1, 1)),
}


def plan_of(grids: str, cuts: tuple[str, ...], schedule: str, **others: object) -> ParallelPlan:
    chosen = GRIDS[grids]
    return ParallelPlan(chosen, cuts[: len(chosen) - 1], 4, schedule, **others)  # type: ignore[arg-type]


QUICK = [
    ("resnet", "1+1", "sequential", 2, sgd),
    ("resnet", "4+1", "gpipe", 1, adamw),
    ("resnet", "2+2+1", "1f1b", 2, sgd),
    ("resnet", "4+2+1+1", "chimera", 1, adamw),
    ("amoebanet", "2+2+1", "gems_master", 1, sgd),
    ("amoebanet", "4+1", "1f1b", 1, adamw),
    ("hourglass", "4+2+1+1", "gems_mast", 2, adamw),
    ("hourglass", "2+2+1", "chimera", 1, sgd),
    ("hourglass", "4+2+1+1", "1f1b", 1, sgd),
    ("hourglass", "1+1", "gems_master", 2, sgd),
]


@pytest.mark.parametrize(("name", "grids", "schedule", "replicas", "factory"), QUICK)
def test_plans_equal_one_process(name: str, grids: str, schedule: str, replicas: int, factory: Factory) -> None:
    model, cuts = make(name)
    plan = plan_of(grids, cuts, schedule, replicas=replicas)
    shape, steps = ((4, 3, 97, 113), 2) if name == "amoebanet" else ((4, 3, 37, 45), 5)  # it halves its maps five times
    assert_plan_equals_one_process(model, shape, plan, factory=factory, steps=steps)
