"""Rules for operators that put pixels in other places: pad, slices of space, nearest-neighbour resizing, pixel shuffle.

Every output pixel is one input pixel (or a constant), along y and x independently, so a table per axis says it all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyfi_core.capture.program import Operator
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.moves.axis import Axis, reach, taken

_MODES = "constant, reflect and replicate padding"


def pad(builder: Builder, op: Operator) -> None:
    """Padding by a constant, by reflection or by the border; negative widths crop."""
    name, widths = op.args[0].name, list(op.args[1])
    mode = op.args[2] if len(op.args) > 2 else op.kwargs.get("mode", "constant")
    value = op.args[3] if len(op.args) > 3 else op.kwargs.get("value")
    shape, dims = builder.shape(name), builder.splits[name].dims
    if builder.splits[name].flat:
        builder.refuse(op, "pads a map whose height and width are one dim", "padding before they are flattened")
    around = {len(shape) - 1 - at: (widths[2 * at], widths[2 * at + 1]) for at in range(len(widths) // 2)}
    space = (around.pop(dims[0], (0, 0)), around.pop(dims[1], (0, 0)))
    if mode == "constant":
        _pad_constant(builder, op, space, around, 0.0 if value is None else float(value))
    elif mode not in ("reflect", "replicate"):
        builder.refuse(op, f"pads in mode {mode!r}", _MODES)
    elif any(pair != (0, 0) for pair in around.values()):
        builder.refuse(op, f"pads dims {sorted(around)} in mode {mode!r}", f"padding of the dims of space {dims}")
    else:
        fold = _reflected if mode == "reflect" else _replicated
        tables = [[fold(i, shape[d]) for i in range(-b, shape[d] + a)] for d, (b, a) in zip(dims, space, strict=True)]
        _by_table(builder, op, name, tables)


def _pad_constant(
    builder: Builder,
    op: Operator,
    space: tuple[tuple[int, int], ...],
    around: dict[int, tuple[int, int]],
    value: float,
) -> None:
    name = op.args[0].name
    dims = builder.splits[name].dims
    output = op.first_output
    sizes = builder.shape(output)
    axes = tuple(Axis.shifted(sizes[dim], -before) for dim, (before, _) in zip(dims, space, strict=True))
    plan = reach(builder, name, axes, fill=value)  # type: ignore[arg-type]
    rest = [around.get(dim, (0, 0)) for dim in reversed(range(len(sizes)))]
    widths = [width for pair in rest for width in pair]

    def call(tensor: torch.Tensor) -> torch.Tensor:
        return F.pad(tensor, widths, value=value) if any(widths) else tensor.view_as(tensor)

    builder.compute(call, (plan.canvas,), op.outputs, plan.split)


def _reflected(index: int, size: int) -> int:
    index = abs(index)
    return index if index < size else 2 * (size - 1) - index


def _replicated(index: int, size: int) -> int:
    return min(max(index, 0), size - 1)


def _by_table(builder: Builder, op: Operator, name: str, tables: list[list[int]]) -> None:
    """Emit the operator whose output pixel (y, x) is input pixel (tables[0][y], tables[1][x])."""
    plan = reach(builder, name, (Axis.of_table(tables[0]), Axis.of_table(tables[1])))
    part, need, dims = plan.part, plan.need, plan.split.dims
    rows = torch.tensor(tables[0][part.y0 : part.y1]) - need.y0
    columns = torch.tensor(tables[1][part.x0 : part.x1]) - need.x0

    def call(tensor: torch.Tensor) -> torch.Tensor:
        return taken(taken(tensor, dims[0], rows), dims[1], columns)

    builder.compute(call, (plan.canvas,), op.outputs, plan.split)


def slice_of_space(builder: Builder, op: Operator, dim: int) -> None:
    """A slice along y or x, with any positive step."""
    name = op.args[0].name
    shape, dims = builder.shape(name), builder.splits[name].dims
    start, stop, step = (list(op.args[2:5]) + [None] * 3)[:3]
    kept = range(shape[dim])[start:stop:step]
    tables = [list(kept) if d == dim else list(range(shape[d])) for d in dims]
    if not len(kept):
        builder.refuse(op, f"keeps nothing of dim {dim}", "a slice that keeps something")
    _by_table(builder, op, name, tables)


def upsample_nearest(builder: Builder, op: Operator) -> None:
    """Nearest-neighbour resizing to any size; the table is what PyTorch itself does to a ramp."""
    name = op.args[0].name
    output = op.first_output
    factors = op.args[2] if len(op.args) > 2 else None
    tables = []
    for at, dim in enumerate(builder.splits[name].dims):
        factor = None if factors is None else factors[at]
        tables.append(_nearest(op, builder, builder.shape(name)[dim], builder.shape(output)[dim], factor))
    _by_table(builder, op, name, tables)


def _nearest(op: Operator, builder: Builder, size: int, outputs: int, factor: float | None) -> list[int]:
    """Return the input index of every output; PyTorch's arithmetic is that of the map's own type."""
    exact = "exact" in op.text
    resize: Any = torch.ops.aten._upsample_nearest_exact2d if exact else torch.ops.aten.upsample_nearest2d
    kind = torch.float64 if builder.values[op.args[0].name].dtype == torch.float64 else torch.float32
    ramp = torch.arange(size, dtype=kind).view(1, 1, size, 1)
    return [int(index) for index in resize.default(ramp, [outputs, 1], factor, None).flatten()]


def pixel_shuffle(builder: Builder, op: Operator) -> None:
    """Channels become pixels: each input pixel a block of its own."""
    name, factor = op.args[0].name, int(op.args[1])
    here = builder.splits[name].layout
    axes = tuple(
        Axis(size * factor, lambda start, stop: (start // factor, -(-stop // factor)))
        for size in (here.height, here.width)
    )
    plan = reach(builder, name, axes)  # type: ignore[arg-type]
    part = plan.part.shift(-plan.need.y0 * factor, -plan.need.x0 * factor)

    def call(tensor: torch.Tensor) -> torch.Tensor:
        whole = F.pixel_shuffle(tensor, factor)
        return whole[..., part.y0 : part.y1, part.x0 : part.x1]

    builder.compute(call, (plan.canvas,), op.outputs, plan.split)


def pixel_unshuffle(builder: Builder, op: Operator) -> None:
    """Blocks of pixels become channels."""
    name, factor = op.args[0].name, int(op.args[1])
    here = builder.splits[name].layout
    axes = tuple(
        Axis(size // factor, lambda start, stop: (start * factor, stop * factor)) for size in (here.height, here.width)
    )
    plan = reach(builder, name, axes)  # type: ignore[arg-type]
    builder.compute(lambda tensor: F.pixel_unshuffle(tensor, factor), (plan.canvas,), op.outputs, plan.split)
