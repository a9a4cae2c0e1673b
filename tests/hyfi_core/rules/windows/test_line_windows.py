"""One-dimensional convolutions and pools over the positions of a flat map equal one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from hyfi_core.plan import ParallelPlan
from tests.harness import assert_equal_also_by_cells, compare, identity, one_process, parallel

SHAPE = (2, 3, 9, 14)  # 5 x 7 positions: uneven; a part of four columns has one or two


class PerPosition(nn.Module):
    """A convolution over the channels of every position."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, n = x.shape
        return self.conv(x.transpose(1, 2).reshape(b * n, 1, c)).reshape(b, n, c).transpose(1, 2)


def windows() -> nn.ModuleList:
    """One layer of each kind, the last of which reaches a whole row."""
    return nn.ModuleList(
        [
            nn.Conv1d(6, 4, 1),
            nn.Conv1d(6, 6, 3, padding=1, groups=6, bias=False),
            nn.Conv1d(6, 4, 5, padding="same", dilation=2, groups=2),
            nn.Conv1d(6, 3, 4, padding="same"),
            nn.Conv1d(6, 3, 15, padding=7),
            nn.Sequential(nn.Conv1d(6, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 2, 3, padding=1)),
            nn.AvgPool1d(3, 1, 1),
            nn.AvgPool1d(5, 1, 2, count_include_pad=False),
            nn.MaxPool1d(3, 1, 1),
            nn.MaxPool1d(5, 1, 2),
            nn.AdaptiveAvgPool1d(1),
            nn.AdaptiveMaxPool1d(1),
            PerPosition(),
        ]
    )


class Tokens(nn.Module):
    """A small body, and layers over the positions of its flattened map; each result counts by itself."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(2))
        self.layers = layers
        self.fc = nn.LazyLinear(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.body(x)
        weights = torch.sin(tokens[:, :1])  # tells positions apart
        return self.fc(torch.cat([((layer(tokens) + 1) ** 2 * weights).sum(2) for layer in self.layers], 1))


def tokens() -> Tokens:
    torch.manual_seed(0)
    model = Tokens(windows())
    with torch.no_grad():
        model(torch.randn(SHAPE))
    return model


GRIDS = [*(pytest.param(grid, marks=pytest.mark.soak) for grid in ((1, 2), (1, 9))), (2, 1), (2, 2), (3, 5)]


@pytest.mark.parametrize("grid", GRIDS)
def test_windows_over_positions_equal_one_process(grid: tuple[int, int]) -> None:
    assert_equal_also_by_cells(tokens(), SHAPE, grid)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(ParallelPlan(grids=((2, 1), (1, 2)), cuts=("body",)), id="two stages", marks=pytest.mark.soak),
        pytest.param(ParallelPlan(grids=((1, 1),), cells=(2, 3), spill="memory"), id="cells"),
    ],
)
def test_windows_over_positions_in_stages_and_cells(plan: ParallelPlan) -> None:
    model, images, labels = tokens().double(), torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1])
    found = parallel(model, images, labels, plan, F.cross_entropy, None)
    compare(found, one_process(copy.deepcopy(model), images, labels, plan.microbatches, F.cross_entropy, identity))


@pytest.mark.parametrize("training", [True, False])
def test_no_position_is_gathered(training: bool) -> None:
    program = capture(tokens().train(training), SHAPE, torch.float32)
    assert lower(program, Target((2, 2), 1, gather_bytes=0)).gathered == ()


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (nn.Conv1d(6, 6, 3, 2, 1), "makes 18 results of 35 positions, with stride 2"),
        (nn.Conv1d(6, 6, 3), "makes 33 results of 35 positions"),
        (nn.MaxPool1d(2), "makes 17 results of 35 positions"),
        (nn.Conv1d(6, 6, 17, padding=8), "reaches 8 positions, more than a row"),
        (nn.AdaptiveAvgPool1d(5), "pools .* to "),
    ],
)
def test_other_windows_are_gathered_or_refused(layer: nn.Module, what: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.Flatten(2), layer, nn.ReLU())
    with pytest.raises(RequestError, match=rf"1d.*{what}.*what works: .*gather_bytes="):
        lower(capture(model, SHAPE, torch.float32), Target((2, 2), 1, gather_bytes=0))
    images, labels = torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1])
    model = nn.Sequential(model, nn.Flatten(1), nn.LazyLinear(2)).double()
    model(images)
    found = parallel(model, images, labels, ParallelPlan(grids=((2, 2),)), F.cross_entropy, None)
    compare(found, one_process(copy.deepcopy(model), images, labels, 1, F.cross_entropy, identity))
