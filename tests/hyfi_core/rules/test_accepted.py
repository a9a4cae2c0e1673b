"""What looks like a case to refuse, and need not be: equal to one process, with nothing gathered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.lowering.lower import Target, lower
from tests.harness import assert_answers_equal_one_process, captured_once

Tensor = torch.Tensor
SHAPE = (2, 3, 12, 12)  # a map of 6 x 6: turned, it has the same shape; on five rows of ranks one owns nothing
attend = F.scaled_dot_product_attention


def table(*sizes: int) -> Tensor:
    return torch.arange(float(torch.Size(sizes).numel()), dtype=torch.float64).cos().view(sizes)


def heads(y: Tensor, count: int) -> Tensor:
    """Return (B, heads, positions, channels)."""
    return y.unflatten(1, (count, 6 // count)).flatten(3).transpose(2, 3)


def positions(y: Tensor) -> Tensor:
    return heads(y, 1).squeeze(1)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a map and itself turned, stacked": lambda y: torch.stack([y, y.transpose(2, 3)], 1),
    "a table and a map, stacked": lambda y: torch.stack([table(2, 6, 6, 6), y], 4),
    "zeros of fewer channels": lambda y: torch.cat([y, y.new_zeros(2, 1, 6, 6) + 0.5], 1),
    "a number for each position": lambda y: positions(y) * y.new_full((2, 36, 1), 0.5),
    "ones of another size": lambda y: y * F.interpolate(y.new_ones(2, 6, 3, 3), (6, 6)),
    "one query for all images": lambda y: attend(table(1, 1, 6), positions(y), positions(y)),
    "a query of fewer dims": lambda y: attend(table(2, 6), positions(y), positions(y) * 2),
    "queries of several heads to keys of one": lambda y: attend(table(2, 3, 2, 6), heads(y, 1), heads(y, 1)),
    "values of several heads": lambda y: attend(table(2, 1, 2, 6), heads(y, 1), heads(y, 3)),
    "values of more dims": lambda y: attend(table(2, 2, 6), positions(y), heads(y, 2).transpose(0, 1)),
    "keys of more dims": lambda y: attend(positions(y), table(4, 2, 9, 6), table(4, 2, 9, 3)),
}


@pytest.mark.parametrize("grid", [(2, 2), (5, 1)])
def test_they_equal_one_process(grid: tuple[int, int]) -> None:
    assert_answers_equal_one_process(FUNCTIONS, SHAPE, grid)


class NormOfFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        normalised: Tensor = self.norm(self.stem(x).mean((2, 3)))
        return normalised


def test_a_frozen_norm_of_features_needs_no_other_replica() -> None:
    """In training mode it would: its statistics are over the images of all replicas, see `test_refused`."""
    program = captured_once(NormOfFeatures().eval(), SHAPE, torch.float32)
    lower(program, Target((2, 2), 0, gather_bytes=0, norm_replicas=2))
