"""Convolutions as a GPU computes them: on a canvas if strided and dilated, and in cells; they equal one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.ops.convolution import Convolution, is_sparse
from hyfi_core.rules.instructions import CollectiveCall
from hyfi_core.runtime import lower_model
from tests.harness import run_copies

SHAPE = (2, 4, 20, 24)


class Mixed(nn.Module):
    """A dense convolution, a grouped one, and a depthwise one with stride and dilation."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.grouped = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1, groups=2)
        self.depthwise, self.norm = nn.Conv2d(8, 8, 3, 2, 2, dilation=2, groups=8), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.grouped(F.relu(self.dense(x))))
        return self.fc(self.norm(self.depthwise(x)).mean((2, 3)))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower as for a GPU."""
    plane_of = lower_model._plane

    def with_gpu(*arguments: Any) -> Any:
        plane = plane_of(*arguments)
        object.__setattr__(plane, "device", "cuda")
        return plane

    monkeypatch.setattr(lower_model, "_plane", with_gpu)


def pads(convolution: Convolution, tensor: torch.Tensor, padding: tuple[int, int]) -> bool:
    """As on a GPU."""
    return any(padding) and is_sparse(convolution.window)


@pytest.mark.parametrize(
    "plan",
    [
        hyfi_core.ParallelPlan(grids=((2, 2),), fused_halo=1),
        hyfi_core.ParallelPlan(grids=((1, 2),), fused_halo=1),
        hyfi_core.ParallelPlan(grids=((2, 1),), fused_halo=1),
        hyfi_core.ParallelPlan(grids=((1, 1),), cells=(2, 2)),
        hyfi_core.ParallelPlan(grids=((1, 2),), cells=(2, 2), fused_halo=1),
    ],
    ids=["grid", "columns", "rows", "cells", "cells of a grid"],
)
def test_convolutions_on_a_canvas_equal_one_process(
    on_gpu: None, plan: hyfi_core.ParallelPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    padded: list[tuple[int, int]] = []

    def noted(convolution: Convolution, tensor: torch.Tensor, padding: tuple[int, int]) -> bool:
        if pads(convolution, tensor, padding):
            padded.append(padding)
            return True
        return False

    monkeypatch.setattr(Convolution, "_pads", noted)
    torch.manual_seed(0)
    model, images, labels = Mixed().double(), torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1])
    whole = copy.deepcopy(model)
    F.cross_entropy(whole(images), labels).backward()

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, SHAPE, plan, comm, verify=False)
        engine.accumulate(images, labels)
        return engine.gather_gradients()

    gradients = run_copies(model, plan.ranks, body)[0]
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-11)
    # Of an axis that is not cut: the canvas ends with the map there.
    assert set(padded) == {(1, 2): {(2, 0)}, (2, 1): {(0, 2)}}.get(plan.by_cells().grids[0], set())


@pytest.mark.parametrize(("cells", "apart"), [(None, [True, False]), ((2, 1), [False, False])])
def test_which_convolutions_are_on_a_canvas(on_gpu: None, cells: Any, apart: list[bool]) -> None:
    """The first one reads its box from the image."""
    plan = hyfi_core.ParallelPlan(grids=((2, 1),), cells=cells, fused_halo=1)

    def body(comm: Any, module: nn.Module) -> list[bool]:
        engine = hyfi_core.parallelize(module, SHAPE, plan, comm, verify=False)
        engine.accumulate(torch.zeros(SHAPE), torch.tensor([0, 1]))
        (stage,) = engine._lowered().hosted.values()
        calls = [call.operator for call in stage.ranked.instructions if isinstance(call, CollectiveCall)]
        return [operator.apart for operator in calls if isinstance(operator, Convolution)]

    assert run_copies(Mixed(), 2, body) == [apart, apart]
