"""Resizing, padding and pools by position: PyTorch's own index arithmetic, and each setting equal to one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.errors import RequestError
from hyfi_core.rules.moves.axis import Axis, scattered
from hyfi_core.rules.moves.resize import _adaptive, _blend
from tests.harness import assert_equal_also_by_cells, run_copies

SIZES = [(1, 1), (1, 5), (5, 1), (7, 7), (7, 16), (16, 7), (33, 20), (20, 33), (640, 1280), (1000, 1001)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("align", [False, True])
def test_positions_of_bilinear_resizing_are_those_of_pytorch(dtype: torch.dtype, align: bool) -> None:
    for size, outputs in SIZES:
        values = torch.rand(size, dtype=dtype)
        wanted = F.interpolate(values.view(1, 1, size, 1), (outputs, 1), mode="bilinear", align_corners=align).flatten()
        low, high, share = _blend(size, outputs, align, None, dtype == torch.float64)
        found = values[low] * (1 - share) + values[high] * share
        assert (found - wanted).abs().max() < (1e-12 if dtype == torch.float64 else 1e-4), (size, outputs)


@pytest.mark.parametrize("factor", [0.3, 0.77, 1.0, 1.01, 1.7, 3.0])
def test_a_factor_is_not_the_ratio_of_sizes(factor: float) -> None:
    values = torch.rand(37, dtype=torch.float64)
    wanted = F.interpolate(values.view(1, 1, 37, 1), scale_factor=(factor, 1.0), mode="bilinear").flatten()
    low, high, share = _blend(37, wanted.numel(), False, factor, True)
    assert (values[low] * (1 - share) + values[high] * share - wanted).abs().max() < 1e-12


def brute_cost(axis: Axis, out: int, cut: int, inputs: int) -> int:
    """Return how many inputs cross ``cut`` when outputs are cut at ``out``."""
    before = {i for o in range(out) for i in range(*axis.interval(o, o + 1)) if cut <= i < inputs}
    behind = {i for o in range(out, axis.outputs) for i in range(*axis.interval(o, o + 1)) if 0 <= i < cut}
    return len(before) + len(behind)


@pytest.mark.parametrize(
    ("axis", "inputs"),
    [
        (scattered(23, 2, 1, 2), 12),
        (scattered(40, 4, 0, 3), 10),
        (scattered(12, 1, 3, 6), 12),
        (_adaptive(13, 5), 13),
        (_adaptive(13, 29), 13),
        (Axis.of_table([2, 1, 0, 1, 2, 3, 4, 5, 4, 3]), 6),
        (Axis.shifted(9, 3), 12),
    ],
)
def test_outputs_are_cut_where_fewest_inputs_move(axis: Axis, inputs: int) -> None:
    for cut in range(inputs + 1):
        (_, chosen, _) = axis.through((0, cut, inputs))
        costs = [brute_cost(axis, out, cut, inputs) for out in range(axis.outputs + 1)]
        assert costs[chosen] == min(costs), (cut, chosen, costs)


class ResizeStage(nn.Module):
    def __init__(self, *body: nn.Module, pool: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Sequential(*body)
        self.pool = pool if pool is not None else nn.AdaptiveAvgPool2d(1)
        self.fc = nn.LazyLinear(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.pool(self.body(self.first(x))).flatten(1))


def stage(*body: nn.Module, pool: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = ResizeStage(*copy.deepcopy(body), pool=pool)
    model(torch.zeros(2, 3, 21, 26))
    return model


class Resize(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def extra_repr(self) -> str:
        return str(self.settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, **self.settings)


@pytest.mark.parametrize("grid", [(2, 2), (5, 4)])
@pytest.mark.parametrize(
    "body",
    [
        (nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.Tanh(), nn.ConvTranspose2d(4, 4, 3, 3, 0, 1, 2, dilation=2)),
        (nn.ConvTranspose2d(4, 4, 1, 4, output_padding=3), nn.Tanh()),  # outputs that no input reaches
        (Resize(scale_factor=1.7), nn.Tanh(), Resize(size=(5, 40), mode="nearest-exact")),
        (Resize(scale_factor=(0.4, 2.2), mode="bilinear"), nn.Tanh()),
        (Resize(size=(3, 41), mode="bilinear", align_corners=True), nn.Tanh()),
        (nn.ReflectionPad2d((9, 4, 7, 0)), nn.Tanh(), nn.ReplicationPad2d((0, 3, 12, 1))),
        (nn.ConstantPad2d((5, -3, -2, 9), -0.7), nn.Tanh(), nn.MaxPool2d(3, 2)),
        (nn.ZeroPad2d((0, 0, 0, 1)), nn.PixelUnshuffle(2), nn.Tanh(), nn.PixelShuffle(4)),
        (nn.AdaptiveAvgPool2d((11, 5)), nn.Tanh()),
    ],
)
def test_every_setting_equals_one_process(body: tuple[nn.Module, ...], grid: tuple[int, int]) -> None:
    assert_equal_also_by_cells(stage(*body), (2, 3, 21, 26), grid)


@pytest.mark.parametrize("pool", [nn.AdaptiveMaxPool2d(1), nn.AdaptiveAvgPool2d((3, 2)), nn.AdaptiveAvgPool2d(7)])
def test_pools_of_heads(pool: nn.Module) -> None:
    assert_equal_also_by_cells(stage(nn.Tanh(), pool=pool), (2, 3, 21, 26), (3, 2))


def test_of_equal_maxima_the_first_of_the_whole_map_gets_the_gradient() -> None:
    """Ties over ranks: rows come before columns, so rank 1 (right, upper) goes before rank 2 (left, lower)."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(1, 2))
    with torch.no_grad():
        model[0].weight.fill_(0.0)  # every pixel ties; the weight's gradient tells which pixel was taken
    images = torch.arange(1.0, 36.0, dtype=torch.float64).view(1, 1, 5, 7)
    labels = torch.tensor([1])
    plan = hyfi_core.ParallelPlan(grids=((2, 2),))

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, (1, 1, 5, 7), plan, comm)
        engine.accumulate(images, labels)
        return engine.gather_gradients()

    model = model.double()
    found = run_copies(model, 4, body)[0]
    F.cross_entropy(model(images), labels).backward()
    assert torch.allclose(found["0.weight"], model[0].weight.grad, atol=1e-14)
    assert found["0.weight"].abs().max() > 0


class Sampled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, torch.zeros(2, 5, 5, 2, dtype=x.dtype), align_corners=False)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (Sampled(), r"grid_sampler.default in module 'body.0' has no rule.*what works: F.interpolate"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(body: nn.Module, words: str) -> None:
    model = stage(body)
    plan = hyfi_core.ParallelPlan(grids=((1, 2),), gather_bytes=0)
    with pytest.raises(RequestError, match=words):
        run_copies(model, 2, lambda comm, module: hyfi_core.parallelize(module, (2, 3, 21, 26), plan, comm))


@pytest.mark.parametrize("grid", [(1, 1), (1, 2)])
def test_grouped_and_dilated_weights_have_gradients_in_16_bits(grid: tuple[int, int]) -> None:
    """For channels-last maps, which the engine makes of its own accord, PyTorch left the gradient as memory was."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, (3, 4), groups=2, dilation=2, bias=False)
    )
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(4 * 15 * 37, 4))
    shape, labels = (2, 3, 11, 31), torch.tensor([0, 3])
    images, wide = torch.randn(shape), copy.deepcopy(model).double()
    F.cross_entropy(wide(images.double()), labels).backward()
    plan = hyfi_core.ParallelPlan(grids=(grid,))

    def body(comm: Any, module: nn.Module) -> Any:
        engine = hyfi_core.parallelize(module, shape, plan, comm, loss=F.cross_entropy, autocast=torch.bfloat16)
        engine.accumulate(images, labels)
        return engine.gather_gradients()

    found = run_copies(model, plan.ranks, body)[0]
    for name, parameter in wide.named_parameters():
        assert parameter.grad is not None
        assert (found[name] - parameter.grad).norm() <= 0.05 * parameter.grad.norm(), name
