"""Bicubic and antialiased resizing is PyTorch's own, on any grid, to any size, in any of its settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.harness import assert_answers_equal_one_process

Tensor = torch.Tensor
cubic = partial(F.interpolate, mode="bicubic")
linear = partial(F.interpolate, mode="bilinear", antialias=True)

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cubic, twice": partial(cubic, scale_factor=2),
    "cubic, odd factors": partial(cubic, scale_factor=(1.7, 0.6)),
    "cubic, a size": partial(cubic, size=(7, 3)),
    "cubic, corners": partial(cubic, size=(9, 5), align_corners=True),
    "cubic, smaller without aliases": partial(cubic, size=(3, 4), antialias=True),
    "cubic, larger without aliases": partial(cubic, size=(11, 5), antialias=True),
    "smaller without aliases": partial(linear, size=(3, 2)),
    "factors without aliases": partial(linear, scale_factor=(0.4, 1.3)),
    "corners without aliases": partial(linear, size=(3, 4), align_corners=True),
    "one pixel": partial(linear, size=(1, 1)),
}


LONG = [pytest.param(grid, marks=pytest.mark.soak) for grid in ((1, 2), (2, 2))]


@pytest.mark.parametrize("grid", [(5, 1), (2, 3), *LONG])
def test_resizing_equals_one_process(grid: tuple[int, int]) -> None:
    assert_answers_equal_one_process(FUNCTIONS, (2, 3, 8, 11), grid)
