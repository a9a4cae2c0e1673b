"""Differences, rotations, extremes, dead channels, single rows, instance norms with running statistics."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.verify import verify_capture
from hyfi_core.errors import RequestError
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
    "no difference": lambda y: torch.diff(y, 0, dim=2, prepend=y[:, :, :1]),
    "rows behind nothing": lambda y: torch.cat([y.new_zeros(0), y], 2) * 2.0,
    # The gradient of a deviation of 0 is 0, as that of PyTorch's, not infinite.
    "deviation of a dead channel": lambda y: torch.cat([y * 0.0, y], 1).std((2, 3)),
    "deviation and mean of a dead channel": lambda y: torch.cat(torch.std_mean(y * 0.0, (2, 3)), 1),
    "least byte": lambda y: (y * 20.0 + 10.0).clamp(0.0, 200.0).to(torch.uint8).amin((2, 3)) * y.mean(),
    "all true": lambda y: (y > -0.4).amin((2, 3)) * y.mean(),
    "products of integers": lambda y: (
        torch.einsum("bchw,bdhw->bcd", (y * 9.0).long() + 2**20, (y * 9.0).long() + 2**20) * y.mean()
    ),
    "largest bytes": lambda y: F.max_pool2d((y * 20.0 + 90.0).clamp(0.0, 250.0).to(torch.uint8), 3, 2, 1) * y.mean(),
    # No dims are all dims.
    "total": lambda y: y.sum((), keepdim=True),
    "highest": lambda y: y.amax((), keepdim=True),
    "wide norm": lambda y: torch.linalg.vector_norm(y.float(), dim=(2, 3), dtype=torch.float64),
}


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)])
def test_they_equal_one_process(grid: tuple[int, int]) -> None:
    assert_answers_equal_one_process(FUNCTIONS, SHAPE, grid)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_bytes_are_resized_by_pytorch_or_not_at_all(mode: str) -> None:
    """Its kernels of bytes have weights of their own: other sums would be off by one."""

    def resized(y: torch.Tensor) -> torch.Tensor:
        return F.interpolate((y * 20.0 + 90.0).clamp(0.0, 250.0).to(torch.uint8), (7, 31), mode=mode) * y.mean()

    assert_answers_equal_one_process({mode: resized}, SHAPE, (2, 2), gathers=True)
    with pytest.raises(RequestError, match=r"resizes a map of torch\.uint8"):
        lower(capture(Answers({mode: resized}), SHAPE, torch.float32), Target((2, 2), 0, gather_bytes=0))


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


class RunningOfLines(nn.Module):
    """Instance norms with running statistics: of the positions of a map, of features, and by a call of the function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 6, 3, 2, 1), nn.Linear(18, 2)
        self.norms = nn.ModuleList(nn.InstanceNorm1d(6, track_running_stats=True) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        lines = x.flatten(2), F.adaptive_avg_pool2d(x, 3).flatten(2)
        normalised = [norm(line) for norm, line in zip(self.norms[:2], lines, strict=True)]
        statistics = self.norms[2].running_mean, self.norms[2].running_var
        normalised.append(F.instance_norm(lines[1] * 2, *statistics, use_input_stats=self.training, momentum=0.3))
        return self.fc(torch.cat([line.square().mean(2) for line in normalised], 1))


def test_running_statistics_of_lines_change_once_in_a_step() -> None:
    torch.manual_seed(0)
    model, images, labels = RunningOfLines().double(), torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1])
    cells = hyfi_core.ParallelPlan(grids=((1, 1),), cells=(1, 2))
    found = parallel(model, images, labels, cells, F.cross_entropy, None)
    compare(found, one_process(copy.deepcopy(model), images, labels, 1, F.cross_entropy, identity))
    two_directions = hyfi_core.ParallelPlan(
        grids=((1, 1), (1, 1)), cuts=("conv",), microbatches=2, schedule="gems_mast"
    )
    with pytest.raises(RequestError, match="no defined order"):
        parallel(model, images, labels, two_directions, F.cross_entropy, None)


@pytest.mark.captures_each
def test_its_capture_is_what_the_module_computes() -> None:
    assert verify_capture(Running(), SHAPE, torch.float32) is None
