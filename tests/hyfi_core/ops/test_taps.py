"""A convolution tap by tap equals the convolution, forward and backward, in the memory that it is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyfi_core.ops import taps

CASES = [
    ((2, 5, 9, 1), (4, 5, 3, 1), (1, 1), (1, 1)),
    ((1, 5, 11, 2), (4, 5, 3, 2), (2, 1), (1, 1)),
    ((3, 2, 9, 8), (6, 2, 3, 3), (2, 3), (2, 1)),
    ((1, 3, 4, 4), (2, 3, 1, 1), (1, 1), (1, 1)),
]


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(("canvas", "weight", "stride", "dilation"), CASES)
def test_taps_equal_the_convolution(canvas: Any, weight: Any, stride: Any, dilation: Any, order: Any) -> None:
    x, w = (noise(*shape, seed=i).contiguous(memory_format=order) for i, shape in enumerate((canvas, weight)))
    x.requires_grad_(), w.requires_grad_()
    wanted = F.conv2d(x, w, None, stride, 0, dilation)
    dy = noise(*wanted.shape, seed=2)
    wanted.backward(dy)
    before, shares = noise(*wanted.shape, seed=3), noise(*weight, seed=4).contiguous(memory_format=order)
    outputs, d_weight, part = before.clone(), shares.clone(), x.detach()
    taps.add_outputs(outputs, part, w.detach(), stride, dilation)
    taps.add_to_weight(d_weight, part, dy, stride, dilation)
    back = taps.back(part, w.detach(), dy, stride, dilation)
    for ours, theirs in ((outputs, before + wanted.detach()), (d_weight, shares + w.grad), (back, x.grad)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_which_weights_are_matrices_where_they_stand() -> None:
    plain = torch.zeros(4, 6, 3, 3)
    last = plain.contiguous(memory_format=torch.channels_last)
    assert taps.in_place(last, 1) and not taps.in_place(plain, 1) and not taps.in_place(last, 2)
