"""Maxima before rectification: the same bits, and only where nobody else takes the rectified map."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program, refs_in
from hyfi_core.lowering.pool_before_relu import pool_before_relu
from tests.harness import assert_equal_to_one_process


class Stem(nn.Module):
    """relu and a maximum pool; with ``again`` somebody else takes the rectified map, too."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.conv, self.pool, self.again = nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rectified = torch.relu(self.conv(x))
        pooled = self.pool(rectified)
        return pooled.mean((2, 3)) + rectified.mean((2, 3)) if self.again else pooled.mean((2, 3))


def order(program: Program) -> list[str]:
    names = [op.text.split(".")[1] for op in program.operators]
    return [name.replace("_with_indices", "") for name in names if name == "relu" or "max_pool" in name]


def test_they_change_places() -> None:
    program = capture(Stem(), (1, 3, 12, 10), torch.float32)
    assert order(program) == ["relu", "max_pool2d"]
    changed = pool_before_relu(program, ())
    assert order(changed) == ["max_pool2d", "relu"]
    made = {name for op in changed.operators for name in op.outputs if name is not None}
    assert {name for op in changed.operators for name in op.inputs} - made == set(program.parameters) | {program.image}
    assert [op.name for op in changed.operators if op.outputs[0] == order_of_outputs(program)[-1]]
    pool = next(op for op in changed.operators if "max_pool" in op.text)
    assert changed.values[str(pool.outputs[0])].shape == (1, 4, 6, 5)


def order_of_outputs(program: Program) -> list[str]:
    return list(refs_in(program.outputs))


def test_what_others_need_stays() -> None:
    program = capture(Stem(again=True), (1, 3, 12, 10), torch.float32)
    assert pool_before_relu(program, ()) is program
    program = capture(Stem(), (1, 3, 12, 10), torch.float32)
    rectified = next(op.outputs[0] for op in program.operators if op.text == "aten.relu.default")
    assert rectified is not None and pool_before_relu(program, (rectified,)) is program


def test_a_pool_with_windows_in_the_padding_stays() -> None:
    """Their maximum is -inf, which relu would make 0."""
    stem = Stem()
    stem.pool = nn.MaxPool2d(2, 1, 1, dilation=(5, 1))
    program = capture(stem.eval(), (1, 3, 4, 10), torch.float32)
    assert pool_before_relu(program, ()) is program
    stem.pool = nn.MaxPool2d(2, 1, 1, dilation=(4, 1))
    assert order(pool_before_relu(capture(stem, (1, 3, 4, 10), torch.float32), ())) == ["max_pool2d", "relu"]


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 99))
def test_the_bits_are_the_same(kernel: int, stride: int, pad: bool, ceil: bool, seed: int) -> None:
    # Few different values, most not positive: ties everywhere, and windows without a positive value.
    x = torch.randint(-3, 2, (2, 3, 11, 9), generator=torch.Generator().manual_seed(seed)).double()
    how = (kernel, stride, kernel // 2 if pad else 0, 1, ceil)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    one, other = F.max_pool2d(torch.relu(first), *how), torch.relu(F.max_pool2d(second, *how))
    dy = torch.randn(one.shape, dtype=torch.float64)
    one.backward(dy)
    other.backward(dy)
    assert torch.equal(one, other)
    assert first.grad is not None and second.grad is not None and torch.equal(first.grad, second.grad)


@pytest.mark.parametrize("grid", [(1, 1), (2, 2)])
def test_the_engine_equals_one_process(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert_equal_to_one_process(Stem(), (2, 3, 23, 20), grid)
