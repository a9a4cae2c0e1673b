"""Maps joined and taken apart along space, strips beside the map, maxima of cells: exact, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.harness import assert_answers_equal_one_process, assert_equal_also_by_cells

Tensor = torch.Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "joined": lambda y: torch.cat([y, y[:, :, :1], torch.ones(2, 6, 2, 6).double(), y.mean(2, True)], 2).cumsum(2),
    "joined and turned": lambda y: torch.cat([y, y.transpose(2, 3)[..., :4, :3]], 3),
    "apart": lambda y: y.split([1, 3], 2)[1] * y.chunk(2, 3)[0].mean() + y.split(4, 3)[1].sum(),
    "expanded": lambda y: torch.cat([y, F.avg_pool2d(y, (1, 6)).expand(-1, -1, -1, 6)], 1),
    "a pixel expanded": lambda y: y * y[:, :, :1, :1].expand_as(y),
    "pooled rows": lambda y: y * F.adaptive_avg_pool2d(y, (None, 1)) + F.adaptive_max_pool2d(y, (1, None)),
    "cells": lambda y: F.adaptive_max_pool2d(y, (2, 3)) - F.adaptive_max_pool2d(y, (2, 1)),
    "cells that overlap": lambda y: F.adaptive_max_pool2d(y, (3, 4)),
    "their places": lambda y: sum(F.adaptive_max_pool2d(y, (3, 2), return_indices=True)).sum(1),  # type: ignore[arg-type]
    "pyramid": lambda y: F.interpolate(F.adaptive_max_pool2d(y, 3), (4, 6), mode="bilinear") * y,
}


@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (5, 1), (2, 3)])
def test_maps_placed_anew_equal_one_process(grid: tuple[int, int]) -> None:
    assert_answers_equal_one_process(FUNCTIONS, (2, 3, 8, 11), grid)


class Coordinates(nn.Module):
    """Coordinate attention (Hou et al., 2021): strips of means joined, normalised, and laid over the map."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.squeeze, self.norm = nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)
        self.rows, self.columns = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 1)
        self.fc = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        height, width = x.shape[2:]
        rows = F.adaptive_avg_pool2d(x, (None, 1))
        columns = F.adaptive_avg_pool2d(x, (1, None)).permute(0, 1, 3, 2)
        y = F.hardswish(self.norm(self.squeeze(torch.cat([rows, columns], 2))))
        rows, columns = torch.split(y, [height, width], 2)
        x = x * self.rows(rows).sigmoid() * self.columns(columns.permute(0, 1, 3, 2)).sigmoid()
        return self.fc(x.max(3)[0].max(2)[0])


@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (3, 2), (6, 1)])
def test_coordinate_attention_equals_one_process(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_equal_also_by_cells(Coordinates(), (2, 3, 9, 22), grid)
