"""Types of sums over space: those that one process would give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.comm.base import Communicator
from tests.harness import assert_equal_also_by_cells, run_copies


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
    assert_equal_also_by_cells(Sums(), (2, 3, 12, 16), grid, tolerance=1e-6)  # its maps are float32


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


class Far(nn.Module):
    """Norms and spreads of every kind, of a map whose mean may be far above its deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.instance = nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)
        self.layer, self.scale = nn.LayerNorm([4, 9, 10]), nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        maps = [self.group(x), self.instance(x), self.layer(x), (x - x.mean((2, 3), keepdim=True))]
        spread = [x.var((2, 3)), x.std((1, 2, 3))[:, None], x.flatten(2).var(2), x.var((0, 2, 3))[None].expand(2, -1)]
        return torch.cat([(y.tanh() * y).mean((2, 3)) for y in maps] + spread, 1)


@pytest.mark.parametrize("grid", [(2, 2), (4, 3)])
def test_norms_over_very_many_ranks_equal_one_process(grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They sum two numbers instead of sending a row each."""
    monkeypatch.setattr("hyfi_core.rules.reduction.MOST_ROWS", 1)
    torch.manual_seed(0)
    assert_equal_also_by_cells(Far().double(), (2, 4, 9, 10), grid, tolerance=1e-9)


@pytest.mark.parametrize("offset", [1e3, 1e5])
@pytest.mark.parametrize("grid", [(2, 2), (4, 3)])
def test_spreads_far_from_zero_equal_one_process(grid: tuple[int, int], offset: float) -> None:
    torch.manual_seed(0)
    model = Far().double()
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    images, labels = torch.randn(2, 4, 9, 10).double() + offset, torch.tensor([0, 1])
    reference = copy.deepcopy(model)
    F.cross_entropy(reference(images), labels).backward()

    def body(comm: Communicator, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, (2, 4, 9, 10), hyfi_core.ParallelPlan((grid,)), comm)
        engine.accumulate(images, labels)
        assert engine.traffic()["reduce"]["messages"] > 0
        return engine.gather_gradients(), engine.predict(images)

    found, logits = run_copies(model, grid[0] * grid[1], body)[0]
    # One process is itself off by the rounding of its mean: offset / deviation times 1e-16, more in gradients.
    bound = 1e-10 if offset == 1e3 else 1e-9
    torch.testing.assert_close(logits, reference.eval()(images).detach(), rtol=bound, atol=bound)
    everything = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    for name, p in reference.named_parameters():
        assert (found[name] - p.grad).norm() <= bound * max(p.grad.norm(), 1e-3 * everything), name
