"""Convolutions of one pixel with a stride: every stride-th pixel is taken first, where oneDNN would fail."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyfi_core.rules.calls import pair
from hyfi_core.rules.windows.sliding import _onednn_corrupts_memory
from tests.harness import assert_answers_equal_one_process


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (5, 1), (1, 3)])
def test_they_equal_one_process(grid: tuple[int, int]) -> None:
    """With padding that differs along the axes, groups, and with and without bias; maps end between two strides."""
    torch.manual_seed(2)
    layers = (
        nn.Conv2d(6, 4, 1, 2),
        nn.Conv2d(6, 4, 1, (1, 3), groups=2, bias=False),
        nn.Conv2d(6, 6, 1, (3, 2), (1, 2), groups=3),
        nn.Conv2d(6, 2, 1, (2, 1), (2, 0), dilation=(2, 3), bias=False),
    )
    functions = {str(layer): layer.double().requires_grad_(False) for layer in layers}
    assert_answers_equal_one_process(functions, (2, 3, 13, 18), grid)


@pytest.mark.parametrize(
    ("weight", "stride", "needed"),
    [
        ((8, 4, 1, 1), (2, 2), True),
        ((8, 4, 1, 1), (1, 2), True),
        ((8, 4, 1, 1), (2, 1), True),
        ((8, 4, 1, 1), (1, 1), False),
        ((8, 4, 1, 2), (2, 2), False),
        ((8, 16, 1, 1), (2, 2), False),
        ((8, 32, 1, 1), (2, 2), False),
        ((8, 24, 1, 1), (2, 2), True),
    ],
)
def test_which_of_them_need_it(weight: tuple[int, ...], stride: tuple[int, int], needed: bool) -> None:
    assert _onednn_corrupts_memory(weight, stride) == needed


def test_a_setting_of_one_number_is_for_both_axes() -> None:
    assert [pair(value) for value in (3, [3], (3,), [3, 2])] == [(3, 3), (3, 3), (3, 3), (3, 2)]
