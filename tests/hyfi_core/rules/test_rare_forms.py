"""Forms of operators that few models have, each in one of the ways in which rules tell them apart: as one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from hyfi_core.rules.batch_norm import NativeBatchNorm
from tests.harness import assert_answers_equal_one_process

Tensor = torch.Tensor
SHAPE = (2, 3, 12, 12)  # a map of 6 x 6; on five rows of ranks one owns nothing


def table(*sizes: int) -> Tensor:
    return torch.arange(float(torch.Size(sizes).numel()), dtype=torch.float64).cos().view(sizes)


def tokens(y: Tensor) -> Tensor:
    return y.flatten(2).transpose(1, 2)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "copied over another": lambda y: torch.zeros_like(y).copy_(y.mean(1, keepdim=True)),
    "pooled to its own size": lambda y: F.adaptive_avg_pool2d(y, (6, 6)) * 2,
    "nothing dropped": lambda y: F.dropout(y, 0.0) + 1,
    "a table with letters of the map": lambda y: torch.einsum("bchw,hw->bchw", y, table(6, 6)),
    "a table with letters of rows": lambda y: torch.einsum("bchw,dh->bdchw", y, table(3, 6)),
    "einsum without an arrow": lambda y: torch.einsum("bchw,cd", y, table(6, 2)),
    "einsum with dots and without an arrow": lambda y: torch.einsum("bc...,cd", y, table(6, 2)),
    "any and all of channels": lambda y: ((y > 0).any(1) & (y < 1).all(1)) * 2.0 + y.sum(1),
    "any and all of rows": lambda y: ((y > 0).any(3) & (y < 2).all(2)) * 2.0 + y.sum(3),
    "a table written into channels": lambda y: torch.index_put(y, (torch.tensor([0]),), table(1, 6, 6, 6)),
    "a column written into channels": lambda y: torch.index_put(y, (torch.tensor([0]),), table(6, 1)),
    "tokens by two indices": lambda y: tokens(y)[torch.tensor([0, 1]), torch.tensor([3, 30])],
    "channels merged with rows, by a table": lambda y: y.reshape(2, 36, 6) * table(36, 6),
    "channels merged with rows, by rows": lambda y: y.reshape(2, 36, 6) + table(36, 1),
    "normalised by known statistics": lambda y: F.batch_norm(
        y, table(6), table(6).abs() + 0.5, table(6), training=False
    ),
    "padded with a value": lambda y: F.pad(y, (1, 2, 0, 1), "constant", 1.5),
    "the largest along a negative dim": lambda y: y.topk(2)[0] + y.topk(2, -1, False)[0],
    "spread with another correction": lambda y: y.var((2, 3), correction=0) + y.std((1, 2, 3), correction=2)[:, None],
}
GATHERED: dict[str, Callable[[Tensor], Tensor]] = {
    "rows and channels mixed": lambda y: y.reshape(8, 9, 6).sum(1),
    "one row without its dim": lambda y: y[:, :, 2:3].squeeze(2),
    "all rows": lambda y: y.unbind(2)[1] + y.unbind(3)[4],
}


@pytest.mark.parametrize("grid", [(2, 2), (5, 1)])
def test_they_equal_one_process(grid: tuple[int, int]) -> None:
    assert_answers_equal_one_process(FUNCTIONS, SHAPE, grid)


def test_those_that_are_gathered_equal_one_process() -> None:
    assert_answers_equal_one_process(GATHERED, SHAPE, (2, 2), gathers=True)


@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, True), (True, False), (False, False)])
def test_a_norm_that_declares_what_it_changes_computes_the_same(has_weight: bool, has_bias: bool) -> None:
    norm = NativeBatchNorm(has_weight, has_bias, 0.2, 0.01)
    affine = [table(6) + 2] * has_weight + [table(6)] * has_bias
    x, mean, variance = table(3, 6, 4, 5), table(6), table(6).abs()
    result, *_, new_mean, new_variance = norm.traceable(x, mean, variance, *affine)
    assert torch.equal(mean, table(6)) and torch.equal(variance, table(6).abs()), "they are not changed in place"
    wanted = norm(x, mean, variance, *affine)
    for found, other in zip((result, new_mean, new_variance), (wanted[0], *wanted[3:]), strict=True):
        torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-12)
    exact = F.batch_norm(
        x, mean := table(6), variance := table(6).abs(), affine[0] if has_weight else None,
        affine[-1] if has_bias else None, True, 0.2, 0.01,
    )  # fmt: skip
    torch.testing.assert_close(result, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.stack([new_mean, new_variance]), torch.stack([mean, variance]))
