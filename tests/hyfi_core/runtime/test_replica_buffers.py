"""Buffers that forwards change, with replicas: those of replica 0 count, as in DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.errors import RequestError
from hyfi_core.runtime.engine import Engine
from tests.harness import run_copies

SHAPE = (2, 3, 12, 14)
STEPS = 3


class Centred(nn.Module):
    """Batch norms of both kinds, and centres of features that training reads: one saved, one not."""

    def __init__(self, centred: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(6, 6, 3, 1, 1), nn.BatchNorm2d(6, momentum=None), nn.ReLU())
        self.head = nn.Linear(6, 3)
        self.centred = centred
        self.register_buffer("centre", torch.zeros(6))
        self.register_buffer("unsaved", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.body(self.stem(x)).mean((2, 3))
        if self.training and self.centred:
            self.centre.mul_(0.9).add_(0.1 * features.detach().mean(0))
            self.unsaved.mul_(0.8).add_(0.2 * features.detach().mean(0))
        return self.head(features - self.centre - self.unsaved)


def data(replica: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * replica + step)
    return torch.randn(SHAPE, dtype=torch.float64, generator=generator), torch.tensor([step % 3, replica % 3])


def as_ddp(model: nn.Module, microbatches: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Train two replicas in one process, each step from replica 0's buffers; return predictions and all buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    predictions = []
    for step in range(STEPS):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        kept: dict[str, torch.Tensor] = {}
        for replica in range(2):
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            images, labels = data(replica, step)
            for part, of in zip(images.chunk(microbatches), labels.chunk(microbatches), strict=True):
                (F.cross_entropy(model(part), of) / (2 * microbatches)).backward()
            kept = kept or {name: buffer.clone() for name, buffer in model.named_buffers()}
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            predictions.append(model(data(7, step)[0]))
        model.train()
    return predictions, dict(model.named_buffers())


def engine_of(comm: Any, module: nn.Module, plan: hyfi_core.ParallelPlan) -> Engine:
    return hyfi_core.parallelize(
        module, SHAPE, plan, comm, optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
    )


PLANS = {
    "alone": hyfi_core.ParallelPlan(((1, 1),), replicas=2),
    "parts": hyfi_core.ParallelPlan(((1, 2),), replicas=2),
    "cells": hyfi_core.ParallelPlan(((1, 1),), replicas=2, cells=(2, 2)),
    "stages": hyfi_core.ParallelPlan(((1, 1), (1, 1)), ("stem",), 2, replicas=2),
    "directions": hyfi_core.ParallelPlan(((1, 1), (1, 1)), ("stem",), 2, "chimera", replicas=2),
    "mirror": hyfi_core.ParallelPlan(((1, 1), (1, 1)), ("stem",), 2, "chimera", mirror="point_to_point", replicas=2),
}


@pytest.mark.parametrize("name", PLANS)
def test_replicas_start_each_step_and_predict_with_the_buffers_of_replica_0(name: str) -> None:
    plan = PLANS[name]
    torch.manual_seed(0)
    model = Centred(centred=plan.directions == 1).double()  # with two directions only norms may change buffers

    def body(comm: Any, module: nn.Module) -> Any:
        engine, replica = engine_of(comm, module, plan), comm.rank // plan.ranks_per_replica
        predictions = []
        for step in range(STEPS):
            engine.train_step(*data(replica, step))
            predictions.append(engine.predict(data(7, step)[0]))
        mine = {n: b.clone() for n, b in module.named_buffers()}
        return predictions, engine.gather_state_dict(), mine

    results = run_copies(model, plan.ranks, body)
    wanted, buffers = as_ddp(copy.deepcopy(model), plan.microbatches)
    for predictions, _, _ in results:
        for found, one in zip(predictions, wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-10, atol=1e-11)
    saved = results[0][1]
    for key, value in buffers.items():
        if key in saved:
            torch.testing.assert_close(saved[key], value, rtol=1e-10, atol=1e-11)
    assert torch.equal(results[0][2]["unsaved"], results[plan.ranks_per_replica][2]["unsaved"])


def test_predicting_between_steps_changes_nothing() -> None:
    torch.manual_seed(0)
    model, plan = Centred().double(), PLANS["parts"]

    def trained(comm: Any, module: nn.Module, predicts: bool) -> Any:
        engine, replica = engine_of(comm, module, plan), comm.rank // plan.ranks_per_replica
        for step in range(STEPS):
            engine.train_step(*data(replica, step))
            if predicts and replica == step % 2:  # one replica alone may predict
                engine.predict(data(7, step)[0])
        return engine.gather_state_dict()

    with_, *_ = run_copies(model, plan.ranks, lambda comm, module: trained(comm, module, True))
    without, *_ = run_copies(model, plan.ranks, lambda comm, module: trained(comm, module, False))
    assert all(torch.equal(with_[name], value) for name, value in without.items())


def test_buffers_that_one_replica_changes_alone_are_refused() -> None:
    model, plan = Centred().double(), PLANS["alone"]

    def body(comm: Any, module: nn.Module) -> str:
        engine = engine_of(comm, module, plan)
        engine.train_step(*data(comm.rank, 0))
        if comm.rank == 1:
            module.stem[1].running_mean.add_(1.0)  # type: ignore[index, operator, union-attr]
        with pytest.raises(RequestError) as told:
            engine.train_step(*data(comm.rank, 1))
        return str(told.value)

    (said,) = set(run_copies(model, plan.ranks, body))
    assert "'stem.1.running_mean'" in said and "rank 1" in said
