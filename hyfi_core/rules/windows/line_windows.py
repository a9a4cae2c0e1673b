"""Rules for windows over the positions of a flat map ``(B, C, H · W)``: one-dimensional convolutions and pools.

    kernel 3, columns 0 … 5 on two ranks; a row continues with the next one

    rank 0 needs   end of the row above │ 0 1 2 │ 3
    rank 1 needs                      2 │ 3 4 5 │ start of the row below

So each rank opens its part into rows, receives what its windows reach, and applies the window to every row. The
positions before the first and after the last row are the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hyfi_core.capture.program import Operator
from hyfi_core.ops.constants import Constant
from hyfi_core.ops.reduce import FirstMaximum, least
from hyfi_core.plan.boxes import Boxes, Interval
from hyfi_core.plan.layout import Layout
from hyfi_core.rules.accepted_maps import on_tiles, one_map
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import arguments, emit_on_part
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.reduction import mean_over_space

_INSTEAD = (
    "stride 1 and padding that keeps the number of positions, a kernel that reaches at most one row, or F.conv2d or a "
    "pool of (B, C, H, W) before flattening"
)


@dataclass(frozen=True)
class _Line:
    """A window of stride 1 along the positions.

    Attributes:
        kernel: taps of the window.
        before: positions that it reaches before its own.
        dilation: distance between taps.
        fill: value of the padding.
    """

    kernel: int
    before: int
    dilation: int = 1
    fill: float = 0.0

    @property
    def after(self) -> int:
        """Positions that it reaches after its own."""
        return self.dilation * (self.kernel - 1) - self.before


def conv1d(builder: Builder, op: Operator) -> None:
    """Convolution over positions, with stride 1 and as many results: each row receives the ends of its neighbours."""
    _, weight, bias, stride, padding, dilation, groups = arguments(op.args, (None, [1], [0], [1], 1), 2)
    kernel, step = builder.shape(weight.name)[2], _number(dilation)
    if isinstance(padding, str):  # "same" or "valid"
        padding = step * (kernel - 1) // 2 if padding == "same" else 0
    rows = _rows_with_ends(builder, op, _Line(kernel, _number(padding), step), _number(stride))
    if rows is None:  # no row is divided, and the operator has been emitted as it is
        return

    def call(tensor: torch.Tensor, taps: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        # Each row of (B, C, h, before + w + after) by itself: a kernel of height 1, without further padding.
        result = F.conv2d(tensor, taps.unsqueeze(2), bias[0] if bias else None, 1, 0, (1, step), groups)
        return result.flatten(2)

    inputs = (rows, weight.name) if bias is None else (rows, weight.name, bias.name)
    builder.compute(call, inputs, op.outputs, builder.splits[op.args[0].name].owned)


def max_pool1d(builder: Builder, op: Operator) -> None:
    """Max pooling over positions, as a convolution over positions."""
    _, kernel, stride, padding, dilation, _ = arguments(op.args, ([], [0], [1], False), 2)
    fill = least(builder.values[op.args[0].name].dtype)
    line = _Line(_number(kernel), _number(padding), _number(dilation), fill)
    rows = _rows_with_ends(builder, op, line, _number(stride or kernel))
    if rows is None:  # no row is divided, and the operator has been emitted as it is
        return

    def call(tensor: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(tensor, (1, line.kernel), 1, 0, (1, line.dilation)).flatten(2)

    builder.compute(call, (rows,), op.outputs, builder.splits[op.args[0].name].owned)


def avg_pool1d(builder: Builder, op: Operator) -> None:
    """Average pooling over positions, as a convolution over positions."""
    _, kernel, stride, padding, _, include_pad = arguments(op.args, ([], [0], False, True), 2)
    line, split = _Line(_number(kernel), _number(padding)), builder.splits[op.args[0].name].owned
    rows = _rows_with_ends(builder, op, line, _number(stride or kernel))
    if rows is None:  # no row is divided, and the operator has been emitted as it is
        return
    factors = Constant(line.kernel / _counts(line, split.layout, builder.rank))

    def call(tensor: torch.Tensor) -> torch.Tensor:
        # Sums divided by the kernel size: padding counts here, and ``factors`` corrects for it.
        means = F.avg_pool2d(tensor, (1, line.kernel), 1)
        return (means if include_pad else means * factors.like(means)).flatten(2)

    builder.compute(call, (rows,), op.outputs, split)


def _counts(line: _Line, layout: Layout, rank: int) -> torch.Tensor:
    """Return how many positions of the map each window of a rank's part covers."""
    box, area = layout.parts[rank], layout.map.area
    at = torch.arange(area).view(layout.map.shape)[box.slices()]
    return ((at + line.after + 1).clamp(max=area) - (at - line.before).clamp(min=0)).double()


def _number(value: Any) -> int:
    """Return a setting of the only axis, which may be given as a list of one number."""
    return int(value) if isinstance(value, int) else int(value[0])


def _rows_with_ends(builder: Builder, op: Operator, line: _Line, stride: int) -> str | None:
    """Return the name of the rows ``(B, C, h, before + w + after)`` that the windows of this rank's part read.

    If no row is divided (on one rank, or for tiles), the operator is emitted as it is, and None is returned.

    Raises:
        RequestError: there are not as many results as positions, or windows reach further than a row.
    """
    name = op.args[0].name
    split, shape = builder.splits[name].owned, builder.shape(name)
    count = builder.shape(op.first_output)[-1]
    # One rank has whole rows, and so has each rank of (tiles, C, L), whose ranks share the tiles: nothing to receive.
    has_all_rows = builder.grid == (1, 1) and split.dims == (2, 2) and count == shape[-1]
    if has_all_rows or (split.in_batch and len(shape) == 3):
        emit_on_part(builder, op, split, split)
        return None
    if len(shape) != 3 or not split.is_flat_map:
        builder.refuse(op, f"works over dims (1, 2) of {shape}, not over positions", "(B, C, H · W)")
    if stride != 1 or count != shape[2]:
        builder.refuse(op, f"makes {count} results of {shape[2]} positions, with stride {stride}", _INSTEAD)
    # Beyond a row, windows would reach two rows up or down.
    if max(line.before, line.after) > split.layout.map.width:
        builder.refuse(op, f"reaches {max(line.before, line.after)} positions, more than a row", _INSTEAD)
    return _with_ends(builder, builder.opened(builder.part(name, split)), line)


def _with_ends(builder: Builder, name: str, line: _Line) -> str:
    """Return the name of this rank's rows, each with the positions before and after it in the flat map."""
    parts, width = builder.splits[name].layout.parts, builder.splits[name].layout.map.width
    before, after = line.before, line.after
    if not before and not after:
        return name

    def boxes(down: int, columns: Any) -> Boxes:
        """Return, for each rank, the rows ``down`` below its own, of the columns that ``columns(x0, x1)`` returns."""

        def moved(start: int, stop: int) -> Interval:
            return (start + down, stop + down)

        return parts.each(moved, lambda x0, x1: columns(x0, x1) if x0 < x1 else (0, 0))

    # Of the rows above and below, only the positions that windows at the ends of a row reach: none for middle parts.
    needs = (
        boxes(-1, lambda x0, x1: (min(width, width + x0 - before), width)),
        boxes(0, lambda x0, x1: (max(0, x0 - before), min(width, x1 + after))),
        boxes(1, lambda x0, x1: (0, max(0, x1 + after - width))),
    )
    pieces = [need for need in needs if any(not box.empty for box in need)]
    inputs = tuple(builder.moved(name, need, fill=line.fill) for need in pieces)
    is_present = [not need[builder.rank].empty for need in pieces]

    def joined(*tensors: torch.Tensor) -> torch.Tensor:
        # cat refuses an empty list: a rank without pixels returns an empty piece.
        present = [tensor for tensor, is_here in zip(tensors, is_present, strict=True) if is_here]
        return torch.cat(present or tensors[:1], 3)

    result = builder.fresh(name)
    builder.compute(joined, inputs, (result,))
    return result


def adaptive_pool1d(builder: Builder, op: Operator) -> None:
    """Adaptive pooling of all positions to one: one sum, or the first maximum."""
    name = op.args[0].name
    split, shape = builder.splits[name], builder.shape(name)
    if split.in_batch and len(shape) == 3:
        on_tiles(builder, op)
        return
    if len(shape) != 3 or not split.is_flat_map or builder.shape(op.first_output)[2] != 1:
        builder.refuse(op, f"pools {shape} to {builder.shape(op.first_output)}", "(B, C, H · W) pooled to one value")
    if "avg" in op.text:
        mean_over_space(builder, name, op.outputs[0], keepdim=True)
        return
    opened = builder.opened(builder.part(name, split.owned))
    pooled_names = tuple(None if output is None else builder.fresh(output) for output in op.outputs)
    first = FirstMaximum(split.layout.parts[builder.rank], split.layout.width)
    builder.communicate(first, (opened,), pooled_names, "reduce")
    for pooled, output in zip(pooled_names, op.outputs, strict=True):
        if pooled is not None:
            builder.compute(lambda tensor: tensor.flatten(2).clone(), (pooled,), (output,))


FACTS = {
    **dict.fromkeys(("conv1d", "conv1d.padding"), OperatorFacts(one_map(conv1d), "convolution")),
    "max_pool1d": OperatorFacts(one_map(max_pool1d), "pool", keeps="inputs and places"),
    "avg_pool1d": OperatorFacts(one_map(avg_pool1d), "pool"),
    "adaptive_avg_pool1d": OperatorFacts(one_map(adaptive_pool1d), "pool"),
    "adaptive_max_pool1d": OperatorFacts(one_map(adaptive_pool1d), "pool", keeps="inputs and places"),
}
