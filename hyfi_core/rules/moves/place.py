"""Rules for operators that move pixels: pad, slice, split, cat, nearest-neighbour resizing, pixel shuffle.

Every output pixel is one input pixel or a constant, independently along y and x. So most are described by a table for
each axis: output index -> input index.

    y[:, :, ::2]         table of y: 0 2 4 6
    reflection by 1      table of y: 1 0 1 2 3 2
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyfi_core.capture.program import Operator
from hyfi_core.ops.cut import cut
from hyfi_core.plan.box import Box
from hyfi_core.plan.boxes import Boxes
from hyfi_core.plan.layout import Layout
from hyfi_core.rules.accepted_maps import on_maps, one_map
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import emit_on_part
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.moves.axis import Axis, Selection, reach
from hyfi_core.rules.moves.groups import cat_of_groups, group
from hyfi_core.rules.moves.slices import pad_circular
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.windows.taps import of_pad


def pad(builder: Builder, op: Operator) -> None:
    """``pad`` in all modes; negative widths crop."""
    name, widths = op.args[0].name, list(op.args[1])
    mode = op.args[2] if len(op.args) > 2 else op.kwargs.get("mode", "constant")
    value = op.args[3] if len(op.args) > 3 else op.kwargs.get("value")
    shape, dims = builder.shape(name), builder.splits[name].dims
    # ``widths`` has pairs (before, after), of the last dim first.
    padded = {len(shape) - 1 - at // 2 for at, width in enumerate(widths) if width}
    if not builder.splits[name].has_own_dims and not padded & set(dims):  # such as within each tile
        split = builder.splits[name].owned
        emit_on_part(builder, op, split, split)
        return
    if not builder.splits[name].has_own_dims:
        builder.refuse(op, "pads a map whose height and width are flattened into one dim", "padding before flattening")
    around = {len(shape) - 1 - at: (widths[2 * at], widths[2 * at + 1]) for at in range(len(widths) // 2)}
    space = (around.pop(dims[0], (0, 0)), around.pop(dims[1], (0, 0)))
    if mode == "constant":
        _pad_constant(builder, op, space, around, 0.0 if value is None else float(value))
    elif others := sorted(dim for dim, pair in around.items() if pair != (0, 0)):
        builder.refuse(op, f"pads dims {others} in mode {mode!r}", f"padding of height and width (dims {dims})")
    elif mode == "circular":
        pad_circular(builder, op, space)
    else:
        fold = _reflected if mode == "reflect" else _replicated
        tables = []
        for dim, (before, behind) in zip(dims, space, strict=True):
            tables.append([fold(at, shape[dim]) for at in range(-before, shape[dim] + behind)])
        _by_table(builder, op.outputs[:1], name, tables)


def _pad_constant(
    builder: Builder,
    op: Operator,
    space: tuple[tuple[int, int], ...],
    around: dict[int, tuple[int, int]],
    value: float,
) -> None:
    """Emit a padding with one value.

    Args:
        builder: builder of the rank's program.
        op: the padding.
        space: (before, after) along y and along x; negative amounts crop.
        around: other dim -> (before, after).
        value: value of the new pixels.
    """
    name = op.args[0].name
    dims = builder.splits[name].dims
    output = op.first_output
    sizes = builder.shape(output)
    axes = tuple(Axis.shifted(sizes[dim], -before) for dim, (before, _) in zip(dims, space, strict=True))
    reached = reach(builder, name, axes, fill=value)  # type: ignore[arg-type]
    # Channels and batch are padded locally; F.pad takes the last dim first.
    amounts = [around.get(dim, (0, 0)) for dim in reversed(range(len(sizes)))]
    widths = [width for pair in amounts for width in pair]

    def call(tensor: torch.Tensor) -> torch.Tensor:
        return F.pad(tensor, widths, value=value) if any(widths) else tensor

    builder.compute(call, (reached.canvas,), op.outputs, reached.split)


def _reflected(index: int, size: int) -> int:
    """Return the input pixel that a reflecting padding puts at ``index``, from -(size - 1) to 2 · (size - 1)."""
    # Mirrored at 0 and at the last pixel, neither of which is repeated.
    index = abs(index)
    return index if index < size else 2 * (size - 1) - index


def _replicated(index: int, size: int) -> int:
    """Return the input pixel that a replicating padding puts at ``index``: the nearest one."""
    return min(max(index, 0), size - 1)


def _by_table(builder: Builder, outputs: tuple[str | None, ...], name: str, tables: list[list[int]]) -> None:
    """Emit the operator whose output pixel (y, x) is input pixel (tables[0][y], tables[1][x])."""
    reached = reach(builder, name, (Axis.of_table(tables[0]), Axis.of_table(tables[1])))
    part, need, dims = reached.part, reached.need, reached.split.dims
    rows = Selection(torch.tensor(tables[0][part.y0 : part.y1], dtype=torch.int64) - need.y0)
    columns = Selection(torch.tensor(tables[1][part.x0 : part.x1], dtype=torch.int64) - need.x0)

    # That of the captured result: a padding by table, too, is in float32 under autocast on CPUs.
    dtype = builder.values[next(output for output in outputs if output is not None)].dtype

    def call(tensor: torch.Tensor) -> torch.Tensor:
        return columns.of(rows.of(tensor, dims[0]), dims[1]).to(dtype)

    builder.compute(call, (reached.canvas,), outputs, reached.split)


def slice_of_space(builder: Builder, op: Operator, dim: int) -> None:
    """``slice`` along y or x, with any positive step."""
    name = op.args[0].name
    shape, dims = builder.shape(name), builder.splits[name].dims
    start, stop, step = (list(op.args[2:5]) + [None] * 3)[:3]
    kept_lines = range(shape[dim])[start:stop:step]
    if not kept_lines:
        builder.refuse(op, f"gives an empty slice of dim {dim}", "a slice that is not empty")
    # For y and for x: the row or column of the input that each one of the result is.
    tables = [list(kept_lines) if axis_dim == dim else list(range(shape[axis_dim])) for axis_dim in dims]
    _by_table(builder, op.outputs[:1], name, tables)


def split_of_space(builder: Builder, op: Operator, dim: int) -> None:
    """``split`` and ``chunk`` along y or x, or of tiles: one slice for each used output."""
    name = op.args[0].name
    shape, dims, in_batch = builder.shape(name), builder.splits[name].dims, builder.splits[name].in_batch
    start = 0
    for output, length in zip(op.outputs, _lengths(op, shape[dim]), strict=True):
        tables = [list(range(start, start + length)) if d == dim else list(range(shape[d])) for d in dims]
        start += length
        if output is not None and in_batch:
            group(builder, name, output, start - length, start)
        elif output is not None:
            _by_table(builder, (output,), name, tables)


def _lengths(op: Operator, size: int) -> list[int]:
    """Return the lengths of the pieces of a ``split`` or ``chunk`` of a dim of this size."""
    if op.text == "aten.split_with_sizes.default":
        return list(op.args[1])
    # ``chunk`` takes a number of pieces, ``split`` their length.
    step = -(-size // op.args[1]) if op.text == "aten.chunk.default" else op.args[1]
    return [min(step, size - start) for start in range(0, size, step)]


def cat_of_space(builder: Builder, op: Operator, dim: int) -> None:
    """``cat`` along y or x: each rank receives the pixels of each input that are in its part."""
    # PyTorch leaves out tensors of shape (0,), with which loops of ``cat`` begin.
    names = [item.name for item in op.args[0] if builder.shape(item.name) != (0,)]
    first = next(builder.splits[name] for name in names if name in builder.splits)
    if first.in_batch:
        cat_of_groups(builder, op, names)
        return
    shape = builder.shape(op.first_output)
    for name in names:
        split = builder.splits.get(name)
        if split is not None and (not split.has_own_dims or set(split.dims) != set(first.dims)):
            builder.refuse(
                op,
                f"concatenates maps whose height and width are dims {first.dims} and {split.dims}",
                "maps in the same dims",
            )
    y, x = first.dims
    # A new layout: a rank's parts of two inputs are not adjacent in the joined map.
    layout = Layout.even(shape[y], shape[x], builder.grid)
    start, is_present, inputs = 0, [], []
    for name in names:
        stop = start + builder.shape(name)[dim]
        band = Box(start, stop, 0, shape[x]) if dim == y else Box(0, shape[y], start, stop)
        # From the joined map's coordinates to those of this input.
        need = layout.parts.within(band).shift(-band.y0, -band.x0)
        is_present.append(not need[builder.rank].empty)
        inputs.append(_piece(builder, name, first.dims, need))
        start = stop

    dtype = builder.values[op.first_output].dtype

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        # With inputs of several dtypes, a rank may have pieces of one dtype only.
        pieces = [tensor for tensor, present in zip(tensors, is_present, strict=True) if present]
        return torch.cat(pieces, dim).to(dtype)

    builder.compute(call, tuple(inputs), op.outputs, Split(layout, first.dims))


def _piece(builder: Builder, name: str, dims: tuple[int, int], need: Boxes) -> str:
    """Return the name of the box of an input that each rank needs; ``dims``: the tensor dims of the boxes' (y, x)."""
    split = builder.splits.get(name)
    if split is not None:
        turned = split.dims != dims
        return builder.moved(name, need.transposed() if turned else need)
    # A replicated value: this rank has all of it, and what it needs is within it.
    box, result = need[builder.rank], builder.fresh(name)
    whole_box = Box.of_size(*(builder.shape(name)[dim] for dim in dims))
    local = cut(whole_box, box, box, dims, 0.0)
    builder.compute(local, (name,), (result,))
    return result


def upsample_nearest(builder: Builder, op: Operator) -> None:
    """Nearest-neighbour resizing to any size; PyTorch computes the table, by resizing a row of indices."""
    name = op.args[0].name
    output = op.first_output
    factors = op.args[2] if len(op.args) > 2 else None
    tables = []
    for at, dim in enumerate(builder.splits[name].dims):
        factor = None if factors is None else factors[at]
        tables.append(_nearest(op, builder, builder.shape(name)[dim], builder.shape(output)[dim], factor))
    _by_table(builder, op.outputs[:1], name, tables)


def _nearest(op: Operator, builder: Builder, size: int, outputs: int, factor: float | None) -> list[int]:
    """Return the input index of every output; PyTorch rounds positions in the map's dtype."""
    exact = "exact" in op.text
    resize: Any = torch.ops.aten._upsample_nearest_exact2d if exact else torch.ops.aten.upsample_nearest2d
    dtype = torch.float64 if builder.values[op.args[0].name].dtype == torch.float64 else torch.float32
    # float32 represents all integers up to 2 ** 24, more than any side of a map.
    ramp = torch.arange(size, dtype=dtype).view(1, 1, size, 1)
    return [int(index) for index in resize.default(ramp, [outputs, 1], factor, None).flatten()]


def pixel_shuffle(builder: Builder, op: Operator) -> None:
    """Channels become pixels: each input pixel becomes a block."""
    name, factor = op.args[0].name, int(op.args[1])
    layout = builder.splits[name].layout
    axes = tuple(
        Axis(size * factor, lambda start, stop: (start // factor, -(-stop // factor)))
        for size in (layout.height, layout.width)
    )
    reached = reach(builder, name, axes)  # type: ignore[arg-type]
    # The part in coordinates of the local result, which begins with the block of the first needed input.
    part = reached.part.shift(-reached.need.y0 * factor, -reached.need.x0 * factor)

    def call(tensor: torch.Tensor) -> torch.Tensor:
        shuffled = F.pixel_shuffle(tensor, factor)
        return shuffled[..., part.y0 : part.y1, part.x0 : part.x1]

    builder.compute(call, (reached.canvas,), op.outputs, reached.split)


def pixel_unshuffle(builder: Builder, op: Operator) -> None:
    """Blocks of pixels become channels."""
    name, factor = op.args[0].name, int(op.args[1])
    layout = builder.splits[name].layout
    axes = tuple(
        Axis(size // factor, lambda start, stop: (start * factor, stop * factor))
        for size in (layout.height, layout.width)
    )
    reached = reach(builder, name, axes)  # type: ignore[arg-type]
    builder.compute(lambda tensor: F.pixel_unshuffle(tensor, factor), (reached.canvas,), op.outputs, reached.split)


FACTS = {
    **dict.fromkeys(
        ("upsample_nearest2d.vec", "_upsample_nearest_exact2d.vec"),
        OperatorFacts(on_maps(upsample_nearest), keeps="nothing"),
    ),
    "pixel_shuffle": OperatorFacts(on_maps(pixel_shuffle), keeps="nothing"),
    "pixel_unshuffle": OperatorFacts(on_maps(pixel_unshuffle), keeps="nothing"),
    "pad": OperatorFacts(one_map(pad), keeps="nothing", tap=of_pad),
    "constant_pad_nd": OperatorFacts(one_map(pad), keeps="nothing"),
}
