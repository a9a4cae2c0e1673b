from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hyfi_core.models.amoebanet import AmoebaCell, FactorizedReduction, amoebanet_d
from tests.harness import assert_equal_to_one_process


@pytest.mark.parametrize(
    ("filters", "millions"),
    # GPipe (Huang et al., 2019), table 1, and torchgpipe's table for (18, 416)
    [(208, 81.5), (416, 319.0)],
)
def test_it_has_as_many_parameters_as_published(filters: int, millions: float) -> None:
    with torch.device("meta"):
        model = amoebanet_d(1000, 18, filters)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions


def test_three_by_three_maximum_pools_take_maxima() -> None:
    cell = AmoebaCell(8, 8, 8, reduction=False, older_is_larger=False)
    assert sum(isinstance(module, nn.MaxPool2d) for module in cell.modules()) == 2
    reduction = AmoebaCell(8, 8, 8, reduction=True, older_is_larger=False)
    assert sum(isinstance(module, nn.MaxPool2d) for module in reduction.modules()) == 4
    assert all(sum(isinstance(module, nn.AvgPool2d) for module in cells.modules()) == 1 for cells in (cell, reduction))


def test_the_factorised_reduction_looks_at_every_second_pixel_and_at_those_between() -> None:
    halve = FactorizedReduction(1, 2).eval()
    nn.init.ones_(halve.even.weight)
    nn.init.ones_(halve.odd.weight)
    pixels = torch.arange(1.0, 16.0).view(1, 1, 3, 5)
    even, odd = (halve(pixels) * (1 + 1e-5) ** 0.5)[0].round()
    assert even.tolist() == [[1, 3, 5], [11, 13, 15]]
    assert odd.tolist() == [[7, 9, 0], [0, 0, 0]]


@pytest.mark.parametrize(("layers", "filters"), [(4, 16), (0, 16), (3, 20), (3, 0)])
def test_sizes_that_do_not_divide_are_refused(layers: int, filters: int) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        amoebanet_d(2, layers, filters)


@pytest.mark.parametrize(
    ("grid", "shape"), [pytest.param((1, 2), (2, 3, 45, 67), marks=pytest.mark.soak), ((2, 2), (2, 3, 71, 53))]
)
def test_it_is_equal_to_one_process_at_odd_sizes(grid: tuple[int, int], shape: Any) -> None:
    torch.manual_seed(0)
    assert_equal_to_one_process(amoebanet_d(2, 3, 16), shape, grid)
