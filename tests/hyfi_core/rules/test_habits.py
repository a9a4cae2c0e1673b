"""Differences, rotations, cumulative extremes, single rows, instance norms with running statistics."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.verify import verify_capture
from hyfi_core.lowering.lower import Target, lower
from tests.harness import Answers, assert_answers_equal_one_process, compare, identity, one_process, parallel

SHAPE = (2, 3, 19, 25)
FUNCTIONS = {
    "rows": lambda y: torch.diff(y, dim=2),
    "columns twice": lambda y: torch.diff(y, 2, dim=-1),
    "channels": lambda y: torch.diff(y, dim=1, prepend=y[:, :1]),
    "signs": lambda y: torch.diff(y > 0, dim=3) * y[..., 1:],
    "half turn": lambda y: torch.rot90(y, 2, (2, 3)) * y,
    "quarter turn": lambda y: torch.rot90(y, 1, (2, 3)) * 2.0,
    "other quarter": lambda y: torch.rot90(y, -1, (-2, -1)) * 2.0,
    "highest so far": lambda y: torch.cummax(y, 2)[0],
    "lowest so far": lambda y: torch.cummin(y, 3)[0],
    "of channels": lambda y: torch.cummax(y, 1)[0],
}


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)])
def test_they_equal_one_process(grid: tuple[int, int]) -> None:
    assert_answers_equal_one_process(FUNCTIONS, SHAPE, grid)


def test_a_row_is_gathered_and_not_the_map() -> None:
    rows = {"row": lambda y: y[:, :, -2], "column": lambda y: y[..., 3], "pixel": lambda y: y[:, :, 4, 5]}
    program = capture(Answers(rows).double(), SHAPE, torch.float64)
    lower(program, Target((2, 2), 0, gather_bytes=2 * 6 * 13 * 8))  # of a map of 10 x 13


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 6, 3, 2, 1), nn.Linear(18, 2)
        self.norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
        self.plain = nn.InstanceNorm2d(6, momentum=0.3, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain(F.relu(self.norm(self.conv(x))))
        return self.fc(torch.cat([x.square().mean((2, 3)), x[:, :, 0].amax(2), x[..., -1].amax(2)], 1))


@pytest.mark.parametrize(
    "plan",
    [
        hyfi_core.ParallelPlan(grids=((1, 2),)),
        hyfi_core.ParallelPlan(grids=((2, 2),), microbatches=2),
        hyfi_core.ParallelPlan(grids=((2, 1), (1, 1)), cuts=("norm",), microbatches=2),
        hyfi_core.ParallelPlan(grids=((1, 1),), cells=(2, 2), spill="memory"),
    ],
    ids=["columns", "both", "stages", "cells"],
)
def test_instance_norm_with_running_statistics_and_rows(plan: hyfi_core.ParallelPlan) -> None:
    torch.manual_seed(0)
    model, images, labels = Running().double(), torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1])
    found = parallel(model, images, labels, plan, F.cross_entropy, None)
    wanted = one_process(copy.deepcopy(model), images, labels, plan.microbatches, F.cross_entropy, identity)
    compare(found, wanted)


@pytest.mark.captures_each
def test_its_capture_is_what_the_module_computes() -> None:
    assert verify_capture(Running(), SHAPE, torch.float32) is None
