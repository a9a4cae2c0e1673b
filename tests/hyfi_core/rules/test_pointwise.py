"""Operands that broadcast over space: strips beside the map they came from, transposed maps, truth values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.harness import assert_answers_equal_one_process

Tensor = torch.Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "row beside map": lambda y: y * torch.sigmoid(F.avg_pool2d(y, (1, 6))),
    "map beside column": lambda y: torch.maximum(F.max_pool2d(y, (4, 1)), y),
    "pixel beside map": lambda y: y - F.conv2d(y, torch.ones(6, 6, 4, 6).double()),
    "outer sum": lambda y: F.avg_pool2d(y, (1, 6)) + F.max_pool2d(y, (4, 1)),
    "outer sum of slices": lambda y: y[:, :, :, :1] * y[:, :, :1],
    "square": lambda y: y[..., :4] + y[..., :4].transpose(2, 3),
    "turned strip": lambda y: y[..., :4] + F.avg_pool2d(y, (1, 6)).transpose(2, 3),
    "truth": lambda y: (((y > 0) & (y < 1)) | ~(y > -0.5) ^ (y == 0)) * y,
    "logical": lambda y: torch.logical_xor(y > 0, y < 1) * y,
    "finite": lambda y: torch.where((1 / (y > 0)).isfinite(), y.nan_to_num(), y.clamp(y.mean((2, 3), True) * 0 - 1)),
    "infinite": lambda y: (y / (y > 0)).isinf() * y,
    "any": lambda y: (y > 1).any(1, keepdim=True) * y + (y > 2.5).any() * y,
    "all": lambda y: (y > -1).all((2, 3), keepdim=True) * y + (y > -0.5).all(3, keepdim=True) * y,
    "any of rows": lambda y: (y > 1).any(3).any(2)[:, :, None, None] * y,
    "cosine": lambda y: F.cosine_similarity(y, y.abs() + 1, 1),
    "response": lambda y: F.local_response_norm(y, 3),
}


@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (5, 1), (2, 3)])
def test_operands_equal_one_process(grid: tuple[int, int]) -> None:
    assert_answers_equal_one_process(FUNCTIONS, (2, 3, 8, 11), grid)


FEWER_DIMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a channel": lambda x: (x[0, 0] * x).mean((2, 3)),
    "an image": lambda x: (x + x.mean(1, keepdim=True)[0]).amax((2, 3)),
    "the first of two": lambda x: (x.amax((0, 1)) - x).square().mean((2, 3)),
}


def test_maps_with_fewer_dims_than_the_result_equal_one_process() -> None:
    assert_answers_equal_one_process(FEWER_DIMS, (1, 3, 13, 18), (2, 2))
