"""Fused halos: one wider exchange for a run of windows gives what one before each window gives, in fewer messages.

Images carry an offset parameter, so that the gradient of every pixel is compared, too: at the border and at the seams.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.cost.fused_depth import fused_runs
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.models import amoebanet, resnet
from hyfi_core.models.amoebanet import AmoebaCell
from hyfi_core.rules.instructions import CollectiveCall
from tests.harness import OffsetImages, Result, assert_equal_to_one_process, compare, identity, one_process, parallel

Shape = tuple[int, int, int, int]


def of_every_pixel(answer: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss to which every pixel of a map adds in its own way."""
    ramp = torch.linspace(-1.0, 1.0, answer[0].numel(), dtype=answer.dtype).view(answer[0].shape)
    return (answer * ramp + answer.square() / 2).mean()


def assert_equal_maps(model: nn.Module, shape: Shape, grid: tuple[int, int], fused_halo: Any) -> Result:
    """Compare the map that the model returns, its loss, and all gradients, those of the images included."""
    torch.manual_seed(0)
    return assert_equal_to_one_process(
        OffsetImages(model, shape), shape, grid, loss=of_every_pixel, fused_halo=fused_halo
    )


def norm_relu(channels: int) -> list[nn.Module]:
    norm = nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, 0.5, 1.5)  # so that zero outside the map is not what a norm would have made of it
    return [norm, nn.ReLU()]


def run_of(length: int) -> nn.Sequential:
    """A run of this many windows, strides and every kind of pool among them; a point before, so that it can begin."""
    windows: list[list[nn.Module]] = [
        [nn.Conv2d(4, 4, 3, padding=1), *norm_relu(4)],
        [nn.Conv2d(4, 4, 5, stride=2, padding=2), *norm_relu(4)],
        [nn.MaxPool2d(3, 1, 1)],
        [nn.Conv2d(4, 4, (1, 7), padding=(0, 3), bias=False), *norm_relu(4)],
        [nn.AvgPool2d(3, 1, 1, count_include_pad=False)],
        [nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4), nn.GroupNorm(2, 4), nn.SiLU()],
    ]
    layers = [layer for window in windows[:length] for layer in window]
    return nn.Sequential(Inner(), nn.Conv2d(3, 4, 1), *norm_relu(4), *layers)


class Inner(nn.Module):
    """Cuts the first row and column off: a run ends here, so what follows must exchange and cannot read the image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, 1:, 1:]


@pytest.mark.parametrize("grid", [pytest.param((1, 2), marks=pytest.mark.soak), (2, 2), (2, 3)])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_runs_of_one_to_six_windows(length: int, grid: tuple[int, int]) -> None:
    """Odd sizes, uneven parts; with six windows the margins reach beyond the next part."""
    assert_equal_maps(run_of(length), (2, 3, 19, 23), grid, length)


def test_a_run_has_one_exchange() -> None:
    model = nn.Sequential(run_of(6), nn.AdaptiveAvgPool2d(1))
    program = capture(model, (1, 3, 61, 61), torch.float32)
    assert [exchanges(program, (2, 2), fused_halo) for fused_halo in (1, 3, 6)] == [6, 2, 1]


@pytest.mark.parametrize("fused_halo", [2, 3, 6])
def test_parts_that_are_smaller_than_the_halo_or_empty(fused_halo: int) -> None:
    assert_equal_maps(run_of(6), (2, 3, 6, 9), (2, 3), fused_halo)


def test_windows_that_lie_in_the_padding_alone() -> None:
    """A rank whose only column of the output is computed from padding failed: it had nothing to convolve."""
    torch.manual_seed(0)
    beside = nn.Conv2d(4, 4, (4, 1), stride=(1, 2), padding=(2, 1), dilation=(2, 2))
    model = nn.Sequential(nn.Conv2d(3, 4, 5, 2, 1), beside, *norm_relu(4), nn.Conv2d(4, 4, 3, padding=1))
    assert_equal_maps(model, (2, 3, 26, 8), (2, 2), 6)


def test_without_statistics_of_their_own_and_in_evaluation_mode() -> None:
    layers = [nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, track_running_stats=False)]
    layers += [nn.InstanceNorm2d(4, affine=True), nn.Dropout(0.0), nn.Conv2d(4, 4, 3, padding=1)]
    assert_equal_maps(nn.Sequential(Inner(), *layers), (2, 3, 13, 17), (2, 2), 2)
    assert_equal_maps(run_of(4).eval(), (1, 3, 13, 17), (2, 2), 4)


class JoinedBranches(nn.Module):
    """JoinedBranches of unequal length, joined by sum, concatenation and a gate over the whole map."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Sequential(Inner(), nn.Conv2d(3, 6, 1), *norm_relu(6))
        self.long = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), *norm_relu(6), nn.Conv2d(6, 6, 3, padding=1))
        self.short = nn.MaxPool2d(3, 1, 1)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 6, 1), nn.Sigmoid())
        self.end = nn.Sequential(nn.Conv2d(12, 4, 3, 2, 1), *norm_relu(4), nn.Conv2d(4, 4, 3, padding="same"))
        self.last = nn.Conv2d(4, 4, 4, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        both = self.long(x) + self.short(x)
        y = self.end(torch.cat([both * self.gate(both), x], 1))
        first, second = y.chunk(2, 1)
        turned = torch.cat([second, F.gelu(first)], 1).permute(0, 2, 3, 1)
        return self.last(F.layer_norm(turned, (4,)).permute(0, 3, 1, 2))


@pytest.mark.parametrize(("fused_halo", "grid"), [(2, (2, 2)), (3, (1, 3)), (5, (2, 2)), ("auto", (3, 2))])
def test_branches_joined_in_every_way(fused_halo: Any, grid: tuple[int, int]) -> None:
    assert_equal_maps(JoinedBranches(), (2, 3, 25, 22), grid, fused_halo)


class NormalCell(nn.Module):
    """One normal cell of AmoebaNet-D on two maps of which each rank has its part and nothing more."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = Inner()
        self.newer, self.older = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
        self.cell = AmoebaCell(8, 8, 8, reduction=False, older_is_larger=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        return self.cell(self.newer(x), self.older(x)).mean((2, 3))


def exchanges(program: Program, grid: tuple[int, int], fused_halo: Any) -> int:
    """Return how many exchanges the forward pass has in which some rank sends something."""
    talking: set[int] = set()
    for rank in range(grid[0] * grid[1]):
        target = Target(grid, rank)
        ranked = lower(program, target, runs=fused_runs(program, target, fused_halo=fused_halo))
        calls = [step for step in ranked.instructions if isinstance(step, CollectiveCall) and step.traffic == "halo"]
        talking.update(at for at, step in enumerate(calls) if sends(step))
    return len(talking)


def sends(step: CollectiveCall) -> bool:
    collective: Any = step.operator  # a redistribution, or a convolution that has one
    return bool(getattr(collective, "halo", collective).transfer.sends)


def test_a_normal_cell_exchanges_at_most_twice_instead_of_seven_times() -> None:
    shape = (1, 3, 33, 33)
    program = capture(NormalCell(), shape, torch.float32)
    assert exchanges(program, (2, 2), 1) == 7
    assert exchanges(program, (2, 2), 2) <= 2
    plain, fused = (assert_equal_maps(NormalCell(), shape, (2, 2), n) for n in (1, 2))
    for before, after in zip(plain.traffic, fused.traffic, strict=True):
        assert before["halo"]["messages"] == 2 * (3 * 3 + 4 * 1)  # 3 x 3 pools reach three neighbours, 1 x 7 one
        assert after["halo"]["messages"] <= 2 * 2 * 3


def test_a_whole_network() -> None:
    torch.manual_seed(1)
    shape = (1, 3, 61, 53)
    model = OffsetImages(resnet.resnet18(2, width=8), shape)
    assert_equal_to_one_process(model, shape, (2, 2), fused_halo=4)


def test_stages_take_what_is_owned() -> None:
    """What a stage hands on may stand amid a run of it; others are given parts, and no margins."""
    torch.manual_seed(2)
    model = nn.Sequential(run_of(2), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())
    images, labels = torch.randn(2, 3, 21, 26, dtype=torch.float64), torch.tensor([0, 1])
    plan = hyfi_core.ParallelPlan(grids=((2, 1), (1, 2)), cuts=("1",), fused_halo=3)
    found = parallel(model.double(), images, labels, plan, of_every_pixel, None)
    compare(found, one_process(copy.deepcopy(model), images, labels, 1, of_every_pixel, identity))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("shape", "fused_halo"),
    [((1, 3, 96, 128), n) for n in (1, "auto")] + [((3, 3, 101, 87), n) for n in (2, 4, 6)],
)
@pytest.mark.parametrize("grid", [(1, 2), (2, 1), (1, 3), (2, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: resnet.resnet18(2, width=8),
        lambda: resnet.resnet50(2, width=8),
        lambda: resnet.resnet_v2(29, classes=2),
        lambda: amoebanet.amoebanet_d(2, layers=6, filters=16),
    ],
)
def test_whole_networks_on_all_grids(make: Any, grid: tuple[int, int], shape: Shape, fused_halo: Any) -> None:
    torch.manual_seed(1)
    assert_equal_to_one_process(OffsetImages(make(), shape), shape, grid, fused_halo=fused_halo)


class DrawnNetwork(nn.Module):
    """A network drawn by lot: windows, points, norms and joins in any order, values used again later."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.lot = random.Random(seed)
        self.layers = nn.ModuleList([nn.Conv2d(3, 4, 1)])
        self.plan: list[tuple[str, int, int]] = []
        scales = [1]
        for _ in range(self.lot.randint(4, 12)):
            source = self.lot.randrange(max(0, len(scales) - 4), len(scales))
            partners = [at for at, scale in enumerate(scales) if scale == scales[source]]
            kind = self.lot.choice(["layer", "layer", "layer", "add", "cut"])
            if kind == "layer":
                self.layers.append(self.drawn_layer())
                stride = getattr(self.layers[-1], "stride", 1)
                halves = stride in (2, (2, 2))
                scales.append(scales[source] * (2 if halves else 1))
                self.plan.append((kind, source, len(self.layers) - 1))
            elif kind == "add":
                scales.append(scales[source])
                self.plan.append((kind, source, self.lot.choice(partners)))
            else:
                scales.append(scales[source])
                self.plan.append((kind, source, 0))

    def drawn_layer(self) -> nn.Module:
        kernel, stride = self.lot.choice([(3, 1), (3, 1), (5, 1), (3, 2), (1, 2), (1, 1)])
        made: list[nn.Module] = [
            nn.Conv2d(4, 4, kernel, stride, kernel // 2),
            nn.MaxPool2d(3, self.lot.choice([1, 2]), 1),
            nn.AvgPool2d(3, self.lot.choice([1, 2]), 1, count_include_pad=self.lot.random() < 0.5),
            norm_relu(4)[0],
            nn.GroupNorm(2, 4),
            nn.SiLU(),
        ]
        return self.lot.choice(made[:1] + made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.layers[0](x)]
        for kind, source, other in self.plan:
            if kind == "layer":
                values.append(self.layers[other](values[source]))
            elif kind == "add":
                values.append(values[source] + values[other])
            else:  # what ends a run: rows move
                values.append(F.pad(values[source][:, :, 1:], (0, 0, 0, 1)))
        return values[-1]


def assert_drawn(seed: int) -> None:
    lot = random.Random(1000 + seed)
    torch.manual_seed(seed)
    shape = (lot.choice([1, 2]), 3, lot.randint(9, 30), lot.randint(9, 30))
    grid = lot.choice([(1, 2), (2, 1), (2, 2), (1, 3), (2, 3)])
    assert_equal_maps(DrawnNetwork(seed).train(), shape, grid, lot.choice([2, 3, 4, 6]))


def test_networks_drawn_by_lot() -> None:
    for seed in range(3):
        assert_drawn(seed)


@pytest.mark.soak
def test_many_networks_drawn_by_lot() -> None:
    for seed in range(3, 250):
        assert_drawn(seed)
