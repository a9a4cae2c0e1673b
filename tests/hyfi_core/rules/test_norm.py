"""Types of sums over space: those that one process would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.base import Communicator
from tests.harness import assert_equal_to_one_process, run_copies


class Sums(nn.Module):
    """A sum asked for in another type than its map's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).float().sum((2, 3), dtype=torch.float64))


@pytest.mark.parametrize("grid", [(1, 1), (1, 2)])
def test_a_sum_in_another_type_equals_one_process(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_equal_to_one_process(Sums(), (2, 3, 12, 16), grid, tolerance=1e-6)  # its maps are float32


@pytest.mark.parametrize("grid", [(1, 1), (1, 2)])
def test_a_model_in_bfloat16_keeps_its_type(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).bfloat16()
    images, labels = torch.rand(2, 3, 12, 16).bfloat16(), torch.tensor([0, 1])
    wanted = F.cross_entropy(net(images), labels).item()

    def body(comm: Communicator, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, (2, 3, 12, 16), hyfi_core.ParallelPlan((grid,)), comm)
        return engine.accumulate(images, labels), engine.predict(images).dtype

    for loss, dtype in run_copies(net, grid[1], body):
        assert dtype == torch.bfloat16
        assert loss == pytest.approx(wanted, abs=0.02)
