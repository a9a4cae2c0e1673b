"""Operators on each pixel's channels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from tests.harness import OffsetImages, assert_answers_equal_one_process, assert_equal_also_by_cells


class Slopes(nn.Module):
    """A PReLU with as many slopes as channels, within a run of convolutions, and one with one slope for all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, 2)
        self.each, self.all = nn.PReLU(6), nn.PReLU()
        self.each.weight.data.copy_(torch.rand(6))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.PReLU(6), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.all(self.second(self.each(self.first(x)))))


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("fused_halo", [1, 2])
def test_prelu_equals_one_process(grid: tuple[int, int], fused_halo: int) -> None:
    torch.manual_seed(0)
    net = OffsetImages(Slopes(), (2, 3, 19, 25))
    assert_equal_also_by_cells(net, (2, 3, 19, 25), grid, fused_halo=fused_halo)


def test_slopes_of_channels_need_nothing_gathered() -> None:
    lower(capture(Slopes(), (2, 3, 19, 25), torch.float32), Target((2, 2), 0, gather_bytes=0))


def test_a_slope_for_each_row_is_refused() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = nn.PReLU(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.slopes(x.permute(0, 2, 3, 1)).mean((1, 2))

    program = capture(Rows(), (1, 3, 16, 16), torch.float32)
    with pytest.raises(RequestError, match="one slope for each row or column"):
        lower(program, Target((1, 2), 0, gather_bytes=0))
    engine = hyfi_core.parallelize(Rows(), (1, 3, 16, 16), hyfi_core.ParallelPlan(((1, 1),)), AloneCommunicator())
    assert engine.predict(torch.ones(1, 3, 16, 16)).shape == (1, 3)


@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
def test_channels_between_rows_and_columns_are_reduced(grid: tuple[int, int]) -> None:
    """Without the dim of channels, columns are one dim further to the left, and rows are where they were."""
    between: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "max": lambda x: x.permute(0, 2, 1, 3).max(2).values,
        "prod": lambda x: x.permute(0, 2, 1, 3).prod(2),
        "kept": lambda x: x.permute(0, 2, 1, 3).prod(2, keepdim=True),
        "swapped": lambda x: x.permute(0, 3, 1, 2).prod(2),
    }
    assert_answers_equal_one_process(between, (2, 3, 9, 12), grid)
