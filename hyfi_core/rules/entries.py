"""Rules for operators that select, repeat or overwrite entries by index: index, gather, scatter, repeat.

They work along dims other than height and width. Along height or width, a slice may be overwritten and whole maps may
be repeated; other indexing of pixels is computed on gathered maps, or refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.plan.box import Box
from hyfi_core.rules import positions
from hyfi_core.rules.accepted_maps import one_map
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import arguments, emit, emit_on_part
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.moves.slices import repeat_space
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.pointwise import operands
from hyfi_core.rules.replicated import cut_of_whole

_CHANNELS = "entries of a dim other than height and width, such as channels (1)"


def index(builder: Builder, op: Operator) -> None:
    """``y[:, [2, 0]]``: indices along dims other than height and width; or by replicated indices of a flat map."""
    name = op.args[0].name
    indices = [item for item in op.args[1] if item is not None]
    if any(item.name in builder.splits for item in indices):
        _refuse_map_of_indices(builder, op)
    dim = builder.splits[name].dims[0]  # of the positions, if the map is flat
    is_indexed = dim < len(op.args[1]) and op.args[1][dim] is not None
    # Not with a mask: the size of its result depends on its values.
    by_numbers = not any(_is_mask(builder, item.name) for item in indices)
    if by_numbers and is_indexed and positions.over_positions(builder, op, dim):
        positions.index(builder, op)
        return
    input_split = builder.same_pixels(op, name)
    split = _split_of_indexed(builder, op, input_split)
    emit_on_part(builder, op, input_split, split)


def _is_mask(builder: Builder, name: str) -> bool:
    # PyTorch still treats indices of bytes as a mask.
    return builder.values[name].dtype in (torch.bool, torch.uint8)


def _split_of_indexed(builder: Builder, op: Operator, split: Split) -> Split:
    """Return how ``y[indices]`` is split, where ``y`` is split as ``split``."""
    indexed = [at for at, item in enumerate(op.args[1]) if item is not None]
    infos = [builder.values[op.args[1][at].name] for at in indexed]
    if set(indexed) & set(split.dims) or any(_is_mask(builder, op.args[1][at].name) for at in indexed):
        builder.refuse(op, f"indexes dims {indexed} of a map whose height and width are dims {split.dims}", _CHANNELS)
    if any(op.args[1][at].name in builder.splits for at in indexed):
        _refuse_map_of_indices(builder, op)
    # Dims of the indices replace the indexed dims: in their place, or, as in NumPy, first if these are not adjacent.
    index_dims = len(torch.broadcast_shapes(*(info.shape for info in infos)))
    are_adjacent = indexed == list(range(indexed[0], indexed[0] + len(indexed)))

    def dim_in_result(dim: int) -> int:
        removed_before = sum(at < dim for at in indexed)
        added_before = index_dims if not are_adjacent or indexed[0] < dim else 0
        return dim - removed_before + added_before

    y, x = split.dims
    return replace(split, dims=(dim_in_result(y), dim_in_result(x)))


def _refuse_map_of_indices(builder: Builder, op: Operator) -> NoReturn:
    works = "torch.gather, F.embedding, or indices that are not computed from a map"
    builder.refuse(op, "indexes by a feature map", works)


def index_put(builder: Builder, op: Operator) -> None:
    """``y[:, [2, 0]] = z``, also accumulating; ``z`` is replicated, or a map with the same pixels."""
    name = op.args[0].name
    if name not in builder.splits:
        builder.refuse(
            op, "writes a map into a tensor that is not a map", "a map as destination, such as torch.zeros_like(y)"
        )
    split = builder.splits[name].owned
    split_of_indexed = _split_of_indexed(builder, op, split)
    values = op.args[2].name
    # Dims of ``y[indices]``: without the indexed ones, and with those to which the indices broadcast.
    dim_count = len(builder.shape(name)) - sum(item is not None for item in op.args[1])
    dim_count += len(torch.broadcast_shapes(*(builder.shape(item.name) for item in op.args[1] if item is not None)))
    fitted = _fitted(builder, op, values, split_of_indexed, dim_count)
    names = {name: builder.part(name, split), values: fitted}
    emit(builder, op, names, split)


def _fitted(builder: Builder, op: Operator, name: str, split: Split, dim_count: int) -> str:
    """Return the name of this rank's part of a value that broadcasts to a split one.

    Args:
        builder: builder of the rank's program.
        op: the operator that takes the value.
        name: name of the value.
        split: how the target of the broadcast is split.
        dim_count: number of dims of that target.
    """
    shape = builder.shape(name)
    fewer = dim_count - len(shape)
    dims = (split.dims[0] - fewer, split.dims[1] - fewer)
    own = builder.splits.get(name)
    if own is not None:
        if own.dims != dims or own.pixels != split.pixels:
            builder.refuse(
                op,
                f"writes a map whose height and width are dims {own.dims} where dims {dims} are expected",
                "maps of equal size in the same dims",
            )
        return builder.part(name, replace(split, dims=dims))
    # Broadcast along height and width: every rank needs the same values.
    if not any(dim >= 0 and shape[dim] > 1 for dim in dims):
        return name
    result = builder.fresh(name)
    builder.compute(cut_of_whole(replace(split, dims=dims), builder.rank, shape), (name,), (result,))
    return result


def by_map(builder: Builder, op: Operator) -> None:
    """``gather``, ``scatter`` and similar operators with a map of indices; their dim is not height or width.

    Only a ``gather`` with the same indices on all ranks may go along height and width.
    """
    name = op.args[0].name
    shape = builder.shape(name)
    dim = op.args[1] % len(shape)
    replicated = all(item not in builder.splits for item in op.inputs if item != name)
    if op.text == "aten.gather.default" and replicated and positions.over_positions(builder, op, dim):
        positions.gather(builder, op)
        return
    names, split = operands(builder, op, shape)
    # ``gather`` accepts fewer rows of indices than the map has; then parts of the two have other pixels.
    shapes = [builder.shape(item) for item in op.inputs if len(builder.shape(item))]
    sides = {tuple(item_shape[at] for at in split.dims) for item_shape in shapes}
    if dim in split.dims:
        builder.refuse(op, f"works along dim {dim}, which is height or width", _CHANNELS)
    if len(sides) != 1:
        sizes = ", ".join(map(str, sorted(sides)))
        builder.refuse(op, f"takes maps of different sizes: {sizes}", "maps of equal size in the same dims")
    emit(builder, op, names, split)


def slice_scatter(builder: Builder, op: Operator) -> None:
    """``y[:, 2:5] = z``, along any dim."""
    name, source = op.args[0].name, op.args[1].name
    _, _, dim, start, stop, step = arguments(op.args, (0, None, None, 1), 2)
    dim %= len(builder.shape(name))
    if name in builder.splits and dim in builder.splits[name].dims:
        _overwrite_pixels(builder, op, dim, range(builder.shape(name)[dim])[start:stop:step], source)
        return
    if name not in builder.splits and dim in builder.splits[source].dims:
        builder.refuse(
            op,
            "writes a slice of a map into a tensor that is not a map",
            "a map as destination, such as torch.zeros_like(y)",
        )
    names, split = operands(builder, op, builder.shape(name))
    emit(builder, op, names, split)


def _overwrite_pixels(builder: Builder, op: Operator, dim: int, lines: range, source: str) -> None:
    """Emit the call that overwrites the rows or columns ``lines`` of a map by those of ``source``.

    Each rank needs the rows of ``source`` that are written into its part::

        y[:, :, 1:8:3] = z      rows 0 1 2 3 │ 4 5 6 7          kept: rows 1, 4, 7
        rank 0 needs row 0 of z, for row 1; rank 1 rows 1 and 2, for rows 4 and 7
    """
    name = op.args[0].name
    split = builder.splits[name].owned
    if not split.has_own_dims:
        builder.refuse(
            op, "overwrites pixels of a map whose height and width are flattened into one dim", "either height or width"
        )
    along_y = split.dims[0] == dim

    def written(start: int, stop: int) -> tuple[int, int]:
        return _count_below(lines, start), _count_below(lines, stop)

    parts = split.layout.parts
    need = parts.each(written, _as_it_is) if along_y else parts.each(_as_it_is, written)
    source_split = builder.splits.get(source)
    if source_split is not None and (source_split.dims != split.dims or not source_split.has_own_dims):
        builder.refuse(
            op,
            f"writes a map whose height and width are dims {source_split.dims} into one where they are {split.dims}",
            "maps in the same dims",
        )
    # The box of this rank, in rows and columns of the source.
    box = need[builder.rank]
    if source_split is None:
        own = builder.fresh(source)
        shape = builder.shape(source)
        builder.compute(_cut_at(box, split.dims, shape), (source,), (own,))
    else:
        own = builder.moved(source, need)
    part = parts[builder.rank]
    begin, end = (box.y0, box.y1) if along_y else (box.x0, box.x1)
    part_start = part.y0 if along_y else part.x0

    def call(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part with ``values`` on the lines that are in it."""
        # Nothing is written into this rank's part.
        if box.empty:
            return tensor.clone()
        # From lines of the whole map to lines of this part.
        low = lines[begin] - part_start
        high = lines[end - 1] - part_start + 1
        result: torch.Tensor = torch.ops.aten.slice_scatter.default(tensor, values, dim, low, high, lines.step)
        return result

    builder.compute(call, (builder.part(name, split), own), op.outputs, split)


def _as_it_is(start: int, stop: int) -> tuple[int, int]:
    return start, stop


def _count_below(lines: range, value: int) -> int:
    """Return how many of ``lines`` are below ``value``."""
    # Rounded up, so that ``value`` itself does not count.
    return min(len(lines), max(0, -(-(value - lines.start) // lines.step)))


def _cut_at(box: Box, dims: tuple[int, int], shape: tuple[int, ...]) -> Any:
    """Return a function that cuts a box out of a tensor of this shape; ``dims``: of height and width."""

    def call(tensor: torch.Tensor) -> torch.Tensor:
        for dim, start, length in ((dims[0], box.y0, box.height), (dims[1], box.x0, box.width)):
            # A side of 1 is broadcast: all ranks with pixels need it.
            tensor = tensor.narrow(dim, start, length) if shape[dim] > 1 else tensor.narrow(dim, 0, min(1, length))
        return tensor

    return call


def repeat(builder: Builder, op: Operator) -> None:
    """``repeat`` and ``tile`` along dims other than height and width, including new ones; or of whole maps."""
    name, result = op.args[0].name, builder.shape(op.first_output)
    split, shape = builder.same_pixels(op, name), builder.shape(name)
    added = len(result) - len(shape)  # dims that are new, in front
    dims = (split.dims[0] + added, split.dims[1] + added)
    if any(result[dim] != shape[old_dim] for dim, old_dim in zip(dims, split.dims, strict=True)):
        channel_dims = [dim for dim in range(len(shape)) if dim not in split.dims]
        if not split.has_own_dims or added or any(result[dim] != shape[dim] for dim in channel_dims):
            builder.refuse(
                op,
                f"repeats height and width (dims {split.dims}) together with other dims",
                "separate repeats for space and for channels",
            )
        repeat_space(builder, op, (result[dims[0]] // shape[dims[0]], result[dims[1]] // shape[dims[1]]))
        return
    emit_on_part(builder, op, split, replace(split, dims=dims))


def diagonal(builder: Builder, op: Operator) -> None:
    """A diagonal of two dims other than height and width; it becomes the last dim."""
    name = op.args[0].name
    split, dim_count = builder.same_pixels(op, name), len(builder.shape(name))
    _, _, first, second = arguments(op.args, (0, 0, 1), 1)
    gone = [first % dim_count, second % dim_count]
    if set(gone) & set(split.dims):
        builder.refuse(
            op, f"takes the diagonal of dims {gone}, which include height or width (dims {split.dims})", _CHANNELS
        )
    # Each of the two removed dims moves the dims after it by one.
    dims = tuple(dim - sum(at < dim for at in gone) for dim in split.dims)
    emit_on_part(builder, op, split, replace(split, dims=(dims[0], dims[1])))


_BY_MAP = "gather scatter.src scatter.value scatter.reduce scatter.value_reduce scatter_add scatter_reduce.two"

FACTS = {
    "index.Tensor": OperatorFacts(index),
    "repeat": OperatorFacts(one_map(repeat), keeps="nothing"),
    "tile": OperatorFacts(one_map(repeat), keeps="nothing"),
    "diagonal": OperatorFacts(one_map(diagonal)),
    **dict.fromkeys(_BY_MAP.split(), OperatorFacts(by_map)),
    "index_put": OperatorFacts(index_put),
    "slice_scatter": OperatorFacts(slice_scatter),
}
