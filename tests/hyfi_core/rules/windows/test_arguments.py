"""Windows as the arguments of operators say them."""

from __future__ import annotations

import pytest
import torch

from hyfi_core.capture.program import Operator, Ref
from hyfi_core.plan.window import AxisWindow, Window
from hyfi_core.rules.windows.arguments import conv2d


@pytest.mark.parametrize(
    ("kernel", "dilation", "paddings", "symmetric"),
    [
        ((3, 5), [1, 1], (1, 2), (True, True)),
        ((3, 4), [1, 1], (1, 1), (True, False)),
        ((2, 3), [3, 2], (1, 2), (False, True)),
    ],
)
def test_same_padding_is_symmetric_where_it_is_even(
    kernel: tuple[int, int], dilation: list[int], paddings: tuple[int, int], symmetric: tuple[bool, bool]
) -> None:
    target = torch.ops.aten.conv2d.padding
    op = Operator("conv", target, (Ref("x"), Ref("w"), None, [1, 1], "same", dilation, 1), {}, ("y",), "")
    sliding = conv2d(op, lambda name: (4, 3, *kernel))
    axes = [AxisWindow(k, 1, first, d) for k, first, d in zip(kernel, paddings, dilation, strict=True)]
    assert sliding.window == Window(*axes)
    assert sliding.symmetric == symmetric
