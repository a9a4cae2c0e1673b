"""Rules for transposed convolution, bilinear resizing and adaptive pools.

transposed convolution, kernel 3, stride 2, padding 1

input      0       1       2          input i adds to the outputs 2i - 1 … 2i + 1
output   · 0 1 2 3 4 ·                output 3 needs inputs 1 and 2
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyfi_core.capture.program import Operator
from hyfi_core.ops.constants import Constant
from hyfi_core.ops.reduce import FirstMaximum
from hyfi_core.plan.box import Box
from hyfi_core.rules.accepted_maps import on_maps
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import arguments, pair
from hyfi_core.rules.moves.axis import Axis, Selection, reach, scattered
from hyfi_core.rules.moves.interpolate import refuse_bytes
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.reduction import mean_over_space


def conv_transpose2d(builder: Builder, op: Operator) -> None:
    """Transposed convolution: any stride, padding, output padding, groups and dilation."""
    defaults = (None, [1, 1], [0, 0], [0, 0], 1, [1, 1])
    x, weight, bias, stride, padding, _, groups, dilation = arguments(op.args, defaults, 2)
    stride, padding, dilation = pair(stride), pair(padding), pair(dilation)
    sizes = builder.shape(op.first_output)[2:]
    spans = [d * (k - 1) for d, k in zip(dilation, builder.shape(weight.name)[2:], strict=True)]
    axes = tuple(scattered(size, *settings) for size, *settings in zip(sizes, stride, padding, spans, strict=True))
    reached = reach(builder, x.name, axes)  # type: ignore[arg-type]
    need, part = reached.need, reached.part
    # Rows and columns to add to the local result at each side, so that it is the owned part; negative: to crop.
    before = (need.y0 * stride[0] - padding[0] - part.y0, need.x0 * stride[1] - padding[1] - part.x0)
    sizes_made = [(n - 1) * s + span + 1 for n, s, span in zip(need.shape, stride, spans, strict=True)]
    after = [wanted - start - made for wanted, start, made in zip(part.shape, before, sizes_made, strict=True)]
    edges = (before[1], after[1], before[0], after[0])

    def call(tensor: torch.Tensor, kernel: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        if groups > 1 and max(dilation) > 1 and tensor.device.type == "cpu":
            # For 16-bit inputs in channels-last, PyTorch 2.13 does not write the gradient of the weights.
            tensor = tensor.contiguous()
        # Without padding, which is cropped below, and bias, which must be added also where no input reaches.
        result = F.conv_transpose2d(tensor, kernel, None, stride, 0, 0, groups, dilation)
        result = F.pad(result, edges)
        return result + bias[0].to(result.dtype).view(1, -1, 1, 1) if bias else result

    inputs = (reached.canvas, weight.name) if bias is None else (reached.canvas, weight.name, bias.name)
    builder.compute(call, inputs, op.outputs, reached.split)


def upsample_bilinear(builder: Builder, op: Operator) -> None:
    """Bilinear resizing to any size, corners aligned or not."""
    refuse_bytes(builder, op)
    name, align = op.args[0].name, bool(op.args[2])
    factors = op.args[3] if len(op.args) > 3 else None
    dims = builder.splits[name].dims
    is_double, result_dtype = builder.values[name].dtype == torch.float64, builder.values[op.first_output].dtype
    blends = []  # along y and along x: (lower index, upper index, weight of the upper) of every output
    for at, dim in enumerate(dims):
        size, outputs = builder.shape(name)[dim], builder.shape(op.first_output)[dim]
        blends.append(_blend(size, outputs, align, None if factors is None else factors[at], is_double))
    axes = tuple(Axis(low.numel(), _between(low.tolist(), high.tolist())) for low, high, _ in blends)
    reached = reach(builder, name, axes)  # type: ignore[arg-type]
    part, need = reached.part, reached.need
    # Of this rank's outputs alone, with indices that count from the first received input.
    own_blends = [
        (Selection(low[a:b] - start), Selection(high[a:b] - start), Constant(weight[a:b]))
        for (low, high, weight), a, b, start in zip(
            blends, (part.y0, part.x0), (part.y1, part.x1), (need.y0, need.x0), strict=True
        )
    ]

    def call(tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part: along y, then along x, each output is blended from two inputs."""
        result = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        for dim, (low, high, weight) in zip(dims, own_blends, strict=True):
            sides = [1] * tensor.dim()
            sides[dim] = -1
            high_weight = weight.like(result).view(sides)
            result = low.of(result, dim) * (1 - high_weight) + high.of(result, dim) * high_weight
        return result.to(result_dtype)  # autocast returns float32 on GPUs

    builder.compute(call, (reached.canvas,), op.outputs, reached.split)


def _between(low: list[int], high: list[int]) -> Any:
    """Return ``Axis.interval`` of outputs that read the inputs from ``low`` to ``high``, both ascending."""
    return lambda start, stop: (low[start], high[stop - 1] + 1)


def _blend(
    size: int, outputs: int, align: bool, factor: float | None, double: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (lower index, upper index, weight of the upper) of every output, in PyTorch's arithmetic.

    See ``area_pixel_compute_source_index`` in ATen/native/UpSample.h; positions have the precision of the map.
    """
    dtype = torch.float64 if double else torch.float32
    out = torch.arange(outputs, dtype=dtype)
    # With equal sizes, PyTorch copies, whatever ``factor`` is.
    if size == outputs:
        position = out
    elif align:
        position = out * (torch.tensor(size - 1, dtype=dtype) / max(outputs - 1, 1) if outputs > 1 else 0.0)
    else:
        step = torch.tensor(1.0 / factor if factor else size / outputs, dtype=dtype)
        position = (step * (out + 0.5) - 0.5).clamp(min=0.0)
    low = position.floor().long().clamp(max=size - 1)
    high = (low + 1).clamp(max=size - 1)
    return low, high, (position - low).clamp(0.0, 1.0)


def adaptive_avg_pool2d(builder: Builder, op: Operator) -> None:
    """Adaptive average pooling: to one pixel, a mean over the map; to the current size, the identity.

    Otherwise output ``i`` of ``n`` is the mean of inputs floor(i·N/n) to ceil((i + 1)·N/n).
    """
    name, split = op.args[0].name, builder.splits[op.args[0].name]
    sizes, outputs = builder.shape(name)[-2:], tuple(op.args[1])
    if outputs == (1, 1):
        mean_over_space(builder, name, op.outputs[0], keepdim=True)
        return
    if outputs == sizes:
        builder.compute(lambda tensor: tensor.clone(), (builder.part(name, split),), op.outputs, split)
        return
    axes = tuple(_adaptive(size, count) for size, count in zip(sizes, outputs, strict=True))
    reached = reach(builder, name, axes)  # type: ignore[arg-type]
    part, need = reached.part, reached.need
    rows = Constant(_means(axes[0], part.y0, part.y1, need.y0, need.y1))
    columns = Constant(_means(axes[1], part.x0, part.x1, need.x0, need.x1))

    def call(tensor: torch.Tensor) -> torch.Tensor:
        # Means are computed as products of matrices, which autocast would compute in 16 bits.
        with torch.autocast(tensor.device.type, enabled=False):
            dtype = torch.promote_types(tensor.dtype, torch.float32)
            means = torch.matmul(rows.on(tensor.device, dtype), tensor.to(dtype))
            return torch.matmul(means, columns.like(means).T).to(tensor.dtype)

    builder.compute(call, (reached.canvas,), op.outputs, reached.split)


def _adaptive(size: int, count: int) -> Axis:
    """Return the axis of an adaptive pool of ``size`` inputs to ``count`` outputs."""
    return Axis(count, lambda start, stop: (start * size // count, -(-stop * size // count)))


def _means(axis: Axis, start: int, stop: int, first: int, last: int) -> torch.Tensor:
    """Return the matrix (outputs [start, stop), inputs [first, last)) that computes each output as a mean of inputs."""
    matrix = torch.zeros(max(0, stop - start), max(0, last - first), dtype=torch.float64)
    for output in range(start, stop):
        low, high = axis.interval(output, output + 1)
        matrix[output - start, low - first : high - first] = 1.0 / (high - low)
    return matrix


def _pixels(box: Box) -> list[Box]:
    """Return the pixels of a box in row-major order."""
    return [Box(y, y + 1, x, x + 1) for y in range(box.y0, box.y1) for x in range(box.x0, box.x1)]


def adaptive_max_pool2d(builder: Builder, op: Operator) -> None:
    """Adaptive max pooling: the first of equal maxima, in row-major order of the whole map, gets the gradient."""
    name = op.args[0].name
    split = builder.splits[name]
    sizes, outputs = builder.shape(name)[2:], builder.shape(op.first_output)[2:]
    if outputs == (1, 1):
        first = FirstMaximum(split.layout.parts[builder.rank], split.layout.width)
        builder.communicate(first, (builder.part(name, split),), op.outputs, "reduce")
        return
    axes = tuple(_adaptive(size, count) for size, count in zip(sizes, outputs, strict=True))
    reached = reach(builder, name, axes)  # type: ignore[arg-type]
    part, need = reached.part, reached.need
    # Equal windows without overlap need one call. Others need one call for each output.
    even = all(size % count == 0 for size, count in zip(sizes, outputs, strict=True))
    outputs_at_once = (part,) if even else tuple(_pixels(part))
    read_boxes = [
        Box(*axes[0].interval(c.y0, c.y1), *axes[1].interval(c.x0, c.x1)).relative_to(need) for c in outputs_at_once
    ]

    def pooled(tensor: torch.Tensor, outputs: Box, inputs: Box) -> tuple[torch.Tensor, torch.Tensor]:
        y, x = inputs.slices()
        # Indices within the box, turned into those of the whole map below.
        top, where = F.adaptive_max_pool2d(tensor[:, :, y, x], outputs.shape, return_indices=True)
        rows, columns = where // inputs.width + inputs.y0 + need.y0, where % inputs.width + inputs.x0 + need.x0
        return top, rows * sizes[1] + columns

    def call(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pieces = [pooled(tensor, box, inputs) for box, inputs in zip(outputs_at_once, read_boxes, strict=True)]
        if even:
            return pieces[0]
        shape = (*tensor.shape[:2], *part.shape)
        return tuple(torch.cat(item, -1).reshape(shape) for item in zip(*pieces, strict=True))

    builder.compute(call, (reached.canvas,), op.outputs, reached.split)


FACTS = {
    "conv_transpose2d.input": OperatorFacts(on_maps(conv_transpose2d), "transposed_convolution"),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose3d.input"), OperatorFacts(None, "transposed_convolution")),
    "upsample_bilinear2d.vec": OperatorFacts(on_maps(upsample_bilinear), keeps="nothing"),
    "adaptive_avg_pool2d": OperatorFacts(on_maps(adaptive_avg_pool2d), "pool"),
    "adaptive_max_pool2d": OperatorFacts(on_maps(adaptive_max_pool2d), "pool", keeps="inputs and places"),
}
