"""Rules for window operators: convolutions and pools, which need a halo.

    2 x 1 ranks, 3 x 3 kernel, stride 1, padding 1

    rank 0 needs   ┌───────┐ one row of padding (the map ends here: a fill value)
                   │ owned │
                   └───────┘ one row of rank 1 (the halo)

Along an axis with a single rank, the operator's native padding is used and nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from hyfi_core.capture.program import Operator
from hyfi_core.ops.avg_pool import WindowCounts
from hyfi_core.ops.reduce import least
from hyfi_core.plan.boxes import Boxes
from hyfi_core.plan.layout import Layout
from hyfi_core.rules.accepted_maps import on_maps
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import arguments, bound, pair, renamed
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.reduction import mean_over_space
from hyfi_core.rules.windows import arguments as windows
from hyfi_core.rules.windows.arguments import Sliding
from hyfi_core.rules.windows.overlap import (
    try_max_pool_alone,
    try_overlapped_avg_pool,
    try_overlapped_convolution,
    try_overlapped_max_pool,
)


@dataclass(frozen=True)
class _WindowParts:
    """A window operator on a grid.

    Attributes:
        split: layout of the output.
        need: the input box of each rank.
        native_padding: (y, x) padding that is not in ``need``: the native call pads.
    """

    split: Split
    need: Boxes
    native_padding: tuple[int, int]


def _sliding(builder: Builder, op: Operator, sliding: Sliding) -> _WindowParts:
    """Return how a window operator is divided: its output, the input that each rank needs, and native padding.

    Args:
        builder: builder of the rank's program.
        op: the operator.
        sliding: its window.
    """
    layout = builder.splits[op.args[0].name].layout
    window, symmetric = sliding.window, sliding.symmetric
    output = op.outputs[0]
    assert output is not None
    height, width = builder.shape(output)[2:]
    split = builder.with_margins(op, Split(layout.through(window, height, width)))
    # One rank along an axis has both ends of the map, which the native call can pad if the padding is the same at both.
    # A layout lists its borders: two around one row, or one column, of ranks.
    native_y = len(layout.rows) == 2 and symmetric[0]
    native_x = len(layout.columns) == 2 and symmetric[1]
    # The boxes extend beyond the map, where the exchange writes the fill value.
    need = window.input_boxes(split.held)
    if native_y:
        need = replace(need, rows=((0, layout.height),))
    if native_x:
        need = replace(need, columns=((0, layout.width),))
    return _WindowParts(split, need, (window.y.padding if native_y else 0, window.x.padding if native_x else 0))


def _try_on_one_rank(builder: Builder, op: Operator) -> bool:
    """Emit the operator as it is if a single rank has the whole map; return False on other grids."""
    output = op.outputs[0]
    if builder.grid != (1, 1) or output is None:
        return False
    x = op.args[0].name
    function, inputs = bound(renamed(op, {x: builder.part(x, builder.splits[x])}))
    height, width = builder.shape(output)[2:]
    builder.compute(function, inputs, op.outputs, Split(Layout.even(height, width, (1, 1))), op)
    return True


def conv2d(builder: Builder, op: Operator) -> None:
    """Convolution with any kernel, stride, dilation, groups and padding, also "same" and "valid"."""
    x, weight, bias, stride, _, dilation, groups = arguments(op.args, (None, [1, 1], [0, 0], [1, 1], 1), 2)
    stride, dilation = pair(stride), pair(dilation)
    if _onednn_corrupts_memory(builder.shape(weight.name), stride):
        _subsampled_convolution(builder, op, stride)
        return
    if _try_on_one_rank(builder, op):
        return
    sliding = windows.conv2d(op, builder.shape)
    parts = _sliding(builder, op, sliding)
    # Complex numbers: PyTorch convolves their parts, the operator of an overlapped convolution does not.
    is_complex = builder.values[x.name].dtype.is_complex
    if not is_complex and try_overlapped_convolution(
        builder, op, sliding.window, parts.split, parts.need, parts.native_padding
    ):
        return
    canvas = builder.moved(x.name, parts.need)

    def call(tensor: torch.Tensor, kernel: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        return F.conv2d(tensor, kernel, bias[0] if bias else None, stride, parts.native_padding, dilation, groups)

    inputs = (canvas, weight.name) if bias is None else (canvas, weight.name, bias.name)
    builder.compute(call, inputs, op.outputs, parts.split, op)


def _onednn_corrupts_memory(weight: tuple[int, ...], stride: tuple[int, int]) -> bool:
    """Whether a convolution has a 1 x 1 kernel, a stride above 1, and a number of input channels that oneDNN fails on.

    The weight gradient, channels-last and with sides divisible by the stride, writes beyond its memory if a group has
    fewer than 16 input channels (torch 2.13 on CPU: heap corruption with 4, 6, 7, 8, 12).
    """
    return weight[2:] == (1, 1) and max(stride) > 1 and weight[1] % 16 != 0


def _subsampled_convolution(builder: Builder, op: Operator, stride: tuple[int, int]) -> None:
    """Emit a strided 1 x 1 convolution as one with stride 1 on every stride-th pixel: the same results."""
    x, weight, bias, _, _, _, groups = arguments(op.args, (None, [1, 1], [0, 0], [1, 1], 1), 2)
    parts = _sliding(builder, op, windows.conv2d(op, builder.shape))
    canvas = builder.moved(x.name, parts.need)

    def call(tensor: torch.Tensor, kernel: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        # Padded before pixels are chosen, since strides begin in the padding.
        padded = (
            F.pad(tensor, (parts.native_padding[1],) * 2 + (parts.native_padding[0],) * 2)
            if any(parts.native_padding)
            else tensor
        )
        return F.conv2d(padded[:, :, :: stride[0], :: stride[1]], kernel, bias[0] if bias else None, groups=groups)

    inputs = (canvas, weight.name) if bias is None else (canvas, weight.name, bias.name)
    builder.compute(call, inputs, op.outputs, parts.split, op)


def max_pool2d(builder: Builder, op: Operator) -> None:
    """Max pooling; values outside the map are the smallest of their dtype, for floats -inf."""
    sliding = windows.max_pool2d(op, builder.shape)
    y, x = sliding.window.y, sliding.window.x
    if windows.misses_map(op, sliding.window, builder.shape):
        # PyTorch's backward then writes beyond its memory (torch 2.13 on CPU: heap corruption).
        builder.refuse(op, "has windows whose taps are all in the padding", "a dilation of at most the map's size")
    parts = _sliding(builder, op, sliding)
    if try_max_pool_alone(builder, op, sliding.window, parts.split) or _try_on_one_rank(builder, op):
        return
    if try_overlapped_max_pool(builder, op, sliding.window, parts.split, parts.need, parts.native_padding):
        return
    canvas = builder.moved(op.args[0].name, parts.need, fill=least(builder.values[op.args[0].name].dtype))

    def call(tensor: torch.Tensor) -> torch.Tensor:
        kernel, stride, dilation = (y.kernel, x.kernel), (y.stride, x.stride), (y.dilation, x.dilation)
        return F.max_pool2d(tensor, kernel, stride, parts.native_padding, dilation)

    builder.compute(call, (canvas,), op.outputs, parts.split, op)


def avg_pool2d(builder: Builder, op: Operator) -> None:
    """Average pooling: the sum over each window, divided by the number of its pixels that count."""
    if _try_on_one_rank(builder, op):
        return
    *_, include_pad, divisor = arguments(op.args, ([], [0, 0], False, True, None), 2)
    sliding = windows.avg_pool2d(op, builder.shape)
    y, x = sliding.window.y, sliding.window.x
    map_box = builder.splits[op.args[0].name].layout.map
    if divisor is None and y.padding == x.padding == 0 and y.kernel >= map_box.height and x.kernel >= map_box.width:
        # A single window, which may extend beyond the map.
        mean_over_space(builder, op.args[0].name, op.outputs[0], keepdim=True)
        return
    parts = _sliding(builder, op, sliding)
    if try_overlapped_avg_pool(builder, op, sliding.window, parts.split, parts.need, include_pad, divisor):
        return
    canvas = builder.moved(op.args[0].name, parts.need)
    counts = WindowCounts.of(sliding.window, parts.split.held[builder.rank], map_box, include_pad)

    def call(tensor: torch.Tensor) -> torch.Tensor:
        kernel, stride = (y.kernel, x.kernel), (y.stride, x.stride)
        # With an explicit divisor: the native call would count pixels of the canvas, not of the whole map.
        pooled: torch.Tensor = F.avg_pool2d(tensor, kernel, stride, divisor_override=divisor or counts.most)
        factors = None if divisor else counts.factors(tensor)
        return pooled if factors is None else pooled * factors

    builder.compute(call, (canvas,), op.outputs, parts.split, op)


_CONVOLUTION = OperatorFacts(on_maps(conv2d), "convolution", gradient="new", fresh=True, window=windows.conv2d)

FACTS = {
    "conv2d": _CONVOLUTION,
    "conv2d.padding": _CONVOLUTION,
    "max_pool2d": OperatorFacts(
        on_maps(max_pool2d), "pool", keeps="inputs and places", gradient="new", window=windows.max_pool2d
    ),
    "avg_pool2d": OperatorFacts(on_maps(avg_pool2d), "pool", gradient="new", window=windows.avg_pool2d),
    "max_pool2d_with_indices": OperatorFacts(
        None, "pool", keeps="inputs and places", gradient="new", instead="F.max_pool2d with return_indices=False"
    ),
    "max_pool3d": OperatorFacts(None, "pool", keeps="inputs and places"),
    "conv3d": OperatorFacts(None, "convolution"),
    "conv3d.padding": OperatorFacts(None, "convolution"),
}
