"""Operators along a row or a column of the map, and reductions of all kinds: as one process, nothing gathered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower
from tests.harness import assert_answers_equal_one_process

Tensor = torch.Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax of rows": lambda y: y.softmax(3) * y.log_softmax(2),
    "running sum": lambda y: y.cumsum(2) + y.cumsum(3),
    "sorted rows": lambda y: y.sort(3)[0].square(),
    "largest of rows": lambda y: y * y.amax(3, keepdim=True) + y.amin(2, keepdim=True),
    "first largest": lambda y: y.max(3)[0].max(2)[0] + y.min(2)[0].min(2)[0],
    "first largest, kept": lambda y: y.max(2, keepdim=True)[0] * y.max(3, keepdim=True)[0],
    "its place": lambda y: y.sum(3) + y.max(3)[1] + y.argmax(3) + y.min(3)[1],
    "sum of exponentials": lambda y: y.logsumexp(3) + y.logsumexp((1, 3)).unsqueeze(1),
    "spread of rows": lambda y: y.var(3) + torch.var_mean(y, 3)[1] + torch.std_mean(y, (1, 3), keepdim=True)[0][..., 0],
    "number of pixels": lambda y: ((y > 0).sum((2, 3)) & 3) + y.sum((2, 3)) + (y > 0).sum(),
    "one of all": lambda y: y.sum((2, 3)) * (y == y.amax()).any() + (y < y.amax()).all() + (y <= y.amax()).all(),
    "norm of rows": lambda y: torch.linalg.vector_norm(y, dim=3),
    "product": lambda y: y.prod(3, keepdim=True) * y.prod(1, keepdim=True),
    "best three": lambda y: y.topk(3, 3)[0] + y.median(3, keepdim=True)[0],
    "extremes": lambda y: y.amin((2, 3)) + y.max() + y.min() + y.amin((1, 2, 3), keepdim=True)[..., 0, 0],
    "mean and spread": lambda y: torch.cat(torch.var_mean(y, (2, 3)), 1) + torch.cat(torch.std_mean(y, (2, 3)), 1),
    "mean and spread of channels": lambda y: torch.var_mean(y, 1)[0] * torch.var_mean(y, 1)[1],
    "einsum with dots": lambda y: torch.einsum("bc...,bd...->cd", y, y),
    "einsum over channels": lambda y: torch.einsum("bc...,dc->bd...", y, torch.arange(12).view(2, 6).double()),
}


@pytest.mark.parametrize("grid", [(1, 2), (2, 2), (5, 1), (3, 2)])
def test_rows_and_columns_equal_one_process(grid: tuple[int, int]) -> None:
    assert_answers_equal_one_process(FUNCTIONS, (2, 3, 8, 11), grid)


class Flat(nn.Module):
    """A product over all positions, which no rank has."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).prod(2)


def test_positions_in_one_dim_are_no_row_or_column() -> None:
    program = capture(Flat(), (1, 3, 8, 11), torch.float64)
    with pytest.raises(RequestError, match=r"works along dims \(2,\), which mix rows or columns"):
        lower(program, Target((1, 2), 0, gather_bytes=0))
