"""A step does not make the host wait for the device; only reading the loss does. On a GPU made of CPU tensors."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.runtime.engine import Engine
from hyfi_core.runtime.losses.loss_function import Loss
from tests.fake_gpu import FakeGpu, SynchronisationError
from tests.harness import captured_once

SHAPE = (2, 3, 20, 24)


class Network(nn.Module):
    """What a classifier has: convolutions, batch and group norm, pools, dropout, a squeeze, a resize, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.pool, self.drop = nn.MaxPool2d(3, 2, 1), nn.Dropout(0.25)
        self.second, self.group = nn.Conv2d(8, 8, 3, 1, 1), nn.GroupNorm(2, 8)
        self.squeeze, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.pool(F.relu(self.norm(self.stem(x)))))
        y = F.silu(self.group(self.second(x)))
        y = y * torch.sigmoid(self.squeeze(F.adaptive_avg_pool2d(y, 1)))
        y = F.interpolate(y, scale_factor=2, mode="bilinear") + F.avg_pool2d(y, 3, 1, 1).mean((2, 3), keepdim=True)
        return self.head(y.mean((2, 3)))


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Computed over the whole batch."""
    return F.cross_entropy(logits, labels, reduction="sum")


def steps(
    model: nn.Module, images: torch.Tensor, labels: torch.Tensor, plan: hyfi_core.ParallelPlan, loss: Loss
) -> Engine:
    torch.manual_seed(0)
    engine = hyfi_core.parallelize(
        model,
        SHAPE,
        plan,
        AloneCommunicator(),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
    engine.train_step(images, labels)  # compiled, and the optimizer has its state
    return engine


PLANS = {
    "one piece": hyfi_core.ParallelPlan(grids=((1, 1),)),
    "micro-batches": hyfi_core.ParallelPlan(grids=((1, 1),), microbatches=2),
    "recomputed": hyfi_core.ParallelPlan(grids=((1, 1),), microbatches=2, schedule="gpipe", recompute=True),
    "cells": hyfi_core.ParallelPlan(grids=((1, 1),), cells=(2, 2)),
}
GPIPE = hyfi_core.ParallelPlan(grids=((1, 1),), microbatches=2, schedule="gpipe")


@pytest.mark.parametrize(
    ("plan", "of_step"),
    [*((plan, F.cross_entropy) for plan in PLANS.values()), (PLANS["micro-batches"], summed), (GPIPE, summed)],
    ids=[*PLANS, "forwards that run twice", "all outputs at once"],
)
def test_a_step_waits_for_the_device_only_when_its_loss_is_read(plan: hyfi_core.ParallelPlan, of_step: Loss) -> None:
    torch.manual_seed(1)
    model = Network().double()
    images, labels = torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 2])
    # Captured here and not on the stand-in: export knows only real devices.
    captured_once(model, (SHAPE[0] // plan.microbatches, *SHAPE[1:]), torch.float64)
    reference = copy.deepcopy(model)
    expected = steps(reference, images, labels, plan, of_step)
    with FakeGpu() as gpu:
        engine = steps(model.to("cuda"), images.to("cuda"), labels.to("cuda"), plan, of_step)
        with gpu.no_synchronisation():
            loss = engine.accumulate_unread(images, labels)  # from the host's memory
            engine.update_unread(max_norm=0.1)
            with pytest.raises(SynchronisationError, match="_local_scalar_dense"):
                float(loss)
        before = len(gpu.waits)
        found = engine.train_step(images, labels)
        assert gpu.waits[before:] == ["_local_scalar_dense"]
        state = {name: value.cpu() for name, value in model.state_dict().items()}
    expected.accumulate_unread(images, labels)
    expected.update(max_norm=0.1)
    assert found == pytest.approx(expected.train_step(images, labels), abs=1e-12)
    for name, value in reference.state_dict().items():
        assert torch.allclose(state[name], value, rtol=0, atol=1e-12), name
