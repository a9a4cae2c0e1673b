"""Rules for operators that change dims: view, permute, squeeze, expand.

view (B, 8, H, W) -> (B, 2, 4, H, W)          channels are regrouped; dims (2, 3) become (3, 4)
view (B, 8, H, W) -> (B, 8, H · W)            the map becomes flat; dims (2, 3) become (2, 2)
view (B, 8, H, W) -> (B, 8, H/4, 4, W/4, 4)   the map is divided into blocks; see ``moves.blocks``
view (B, H, W, 8) -> (B · H · W, 8)           the map becomes flat with the batch; dims (0, 0), map counts (B, 1)
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from hyfi_core.capture.program import Operator, Ref
from hyfi_core.rules.accepted_maps import ALL_TILES, one_map
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import bound, emit, emit_on_part, renamed
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.moves.blocks import try_view_of_blocks
from hyfi_core.rules.moves.groups import group
from hyfi_core.rules.moves.place import slice_of_space
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.operator_facts import view as view_record
from hyfi_core.rules.pointwise import operands, pointwise
from hyfi_core.rules.replicated import gathered
from hyfi_core.rules.windows.taps import of_slice


def view(builder: Builder, op: Operator) -> None:
    """``view`` and ``reshape``; small maps are gathered if height and width are mixed with other dims."""
    name, sizes = op.args[0].name, builder.shape(op.first_output)
    shape, split_before = builder.shape(name), builder.splits[name]
    dims = _viewed(shape, split_before, sizes)
    if dims is None and try_view_of_blocks(builder, op):
        return
    if dims is None:
        gathered(builder, op, f"reshapes {shape} to {sizes}, which mixes height and width with other dims")
        return
    if split_before.flat == (dims[0] == dims[1]):
        split_before = builder.same_pixels(op, name)
    else:  # flat values take no part in fused runs
        name, split_before = builder.owned(name), split_before.owned
    split = replace(split_before, dims=dims)
    # Each rank reshapes its part: the sizes are those of the part, not of the graph.
    local = split.local_shape(sizes, builder.rank)
    part = builder.part(name, split_before)
    builder.compute(lambda tensor: tensor.reshape(local), (part,), op.outputs, split)


def _viewed(shape: tuple[int, ...], split: Split, sizes: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the dims of height and width after a view; None if they are mixed with other dims."""
    y, x = (_survivor(shape, dim, sizes) for dim in split.dims)
    if y is not None and x is not None and (split.flat or y != x):
        return y, x
    if split.map_counts != (1, 1):
        return None
    # The product of the sizes before a dim identifies it: a view does not change this product.
    ahead = prod(shape[: split.dims[0]])
    height, width = split.layout.map.shape
    if split.flat:
        starts = (at for at in range(len(sizes) - 1) if sizes[at : at + 2] == (height, width))
        at = next((at for at in starts if prod(sizes[:at]) == ahead), None)
        return None if at is None else (at, at + 1)
    # A flat dim is row-major, so height must come just before width.
    if split.dims[1] != split.dims[0] + 1:
        return None
    at = next((at for at, size in enumerate(sizes) if size == height * width and prod(sizes[:at]) == ahead), None)
    return None if at is None else (at, at)


def _survivor(shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> int | None:
    """Return the dim of ``sizes`` that dim ``dim`` of ``shape`` becomes in a view; None if it is split or merged.

    It has the same size, and the same product of sizes before it.
    """
    ahead = prod(shape[:dim])
    hits = [at for at, size in enumerate(sizes) if size == shape[dim] and prod(sizes[:at]) == ahead]
    # Neighbouring dims of size 1 are indistinguishable; choose the one at the same distance from the end.
    return min(hits, key=lambda at: abs((len(sizes) - at) - (len(shape) - dim))) if hits else None


def permute(builder: Builder, op: Operator) -> None:
    """``permute`` and ``transpose``: each rank permutes its part; the map's height and width are other dims then."""
    name = op.args[0].name
    count = len(builder.shape(name))
    order = list(range(count))
    if op.text == "aten.permute.default":
        order = [dim % count for dim in op.args[1]]
    else:
        first, second = (dim % count for dim in op.args[1:3])
        order[first], order[second] = second, first
    split = builder.same_pixels(op, name)
    _rename(builder, op, replace(split, dims=(order.index(split.dims[0]), order.index(split.dims[1]))))


def unsqueeze(builder: Builder, op: Operator) -> None:
    """A new dim of size 1 anywhere."""
    name = op.args[0].name
    at = op.args[1] % (len(builder.shape(name)) + 1)
    _rename(builder, op, _renumbered(builder.same_pixels(op, name), lambda dim: dim + (dim >= at)))


def squeeze(builder: Builder, op: Operator) -> None:
    """``squeeze``; a map of one row or column that loses height or width is gathered."""
    name = op.args[0].name
    shape, split = builder.shape(name), builder.same_pixels(op, name)
    argument = op.args[1] if len(op.args) > 1 else range(len(shape))
    dims = [argument] if isinstance(argument, int) else argument
    # As in PyTorch: dims of other sizes stay.
    gone = [dim % len(shape) for dim in dims if shape[dim] == 1]
    if set(gone) & set(split.dims):
        gathered(builder, op, f"squeezes height or width (dims {split.dims})")
    else:
        # Dims are named: a part that has one row or column would lose this dim, too.
        op = replace(op, target=torch.ops.aten.squeeze.dims, args=(op.args[0], gone))
        _rename(builder, op, _renumbered(split, lambda dim: dim - sum(at < dim for at in gone)))


def select(builder: Builder, op: Operator) -> None:
    """One index of a dim (``select``), or each of them (``unbind``).

    A row or column that is selected is gathered alone; to unbind height or width, the whole map is gathered.
    """
    name = op.args[0].name
    split = builder.same_pixels(op, name)
    dim = (op.args[1] if len(op.args) > 1 else 0) % len(builder.shape(name))
    if dim in split.dims and split.has_own_dims and op.text == "aten.select.int":
        _row(builder, op, dim)
    elif dim == 0 and split.in_batch:
        builder.refuse(op, "takes single tiles", ALL_TILES)
    elif dim in split.dims:
        gathered(builder, op, f"splits dim {dim}, which is height or width")
    else:
        _rename(builder, op, _renumbered(split, lambda at: at - (dim < at)))


def _row(builder: Builder, op: Operator, dim: int) -> None:
    """Emit a ``select`` of one row or column, gathering that line only."""
    name = op.args[0].name
    shape = builder.shape(name)
    at = op.args[2] % shape[dim]
    line = builder.fresh(name, (*shape[:dim], 1, *shape[dim + 1 :]))
    slice_of_space(builder, replace(op, args=(op.args[0], dim, at, at + 1), outputs=(line,)), dim)
    gathered(
        builder, replace(op, args=(Ref(line), dim, 0)), f"selects one index of dim {dim}, which is height or width"
    )


def stack(builder: Builder, op: Operator) -> None:
    """Maps of one shape along a new dim, also turned ones, and with values that every rank has."""
    sizes = builder.shape(op.args[0][0].name)
    names, split = operands(builder, op, sizes)
    at = (op.args[1] if len(op.args) > 1 else 0) % (len(sizes) + 1)
    emit(builder, op, names, _renumbered(split, lambda dim: dim + (dim >= at)))


def expand(builder: Builder, op: Operator) -> None:
    """``expand``, also of a row, a column or a pixel to a map."""
    sizes = builder.shape(op.first_output)
    names, split = operands(builder, op, sizes)
    local = split.local_shape(sizes, builder.rank)
    name = op.args[0].name
    builder.compute(lambda tensor: tensor.expand(local), (names.get(name, name),), op.outputs, split)


def _renumbered(split: Split, number: Any) -> Split:
    return replace(split, dims=(number(split.dims[0]), number(split.dims[1])))


def _rename(builder: Builder, op: Operator, split: Split) -> None:
    """Emit an operator that only renumbers dims."""
    name = op.args[0].name
    emit_on_part(builder, op, builder.same_pixels(op, name), split)


def new_like(builder: Builder, op: Operator) -> None:
    """``new_zeros`` and similar operators; with the height and width of the map, each rank creates its part."""
    name, sizes, shape = op.args[0].name, builder.shape(op.first_output), builder.shape(op.args[0].name)
    split = builder.splits[name]
    if len(sizes) == len(shape) and all(sizes[dim] == shape[dim] for dim in split.dims):
        local = split.local_shape(sizes, builder.rank)
        part = builder.part(name, split)
        function, inputs = bound(_sized(renamed(op, {name: part}), list(local)))
        builder.compute(function, inputs, op.outputs, split)
    # Without the map's height and width: every rank creates the whole tensor, as ``torch.zeros`` would.
    else:
        emit(builder, op, {name: builder.part(name, split)})


def _sized(op: Operator, sizes: list[int]) -> Operator:
    return Operator(op.name, op.target, (op.args[0], sizes, *op.args[2:]), op.kwargs, op.outputs, op.module)


def sliced(builder: Builder, op: Operator) -> None:
    """``slice``: along height or width, pixels are redistributed; along other dims, each rank slices its part."""
    name = op.args[0].name
    dim = (op.args[1] if len(op.args) > 1 else 0) % len(builder.shape(name))
    split = builder.splits[name]
    if dim not in split.dims:
        pointwise(builder, op)
    elif split.in_batch:
        _slice_tiles(builder, op)
    elif split.has_own_dims:
        slice_of_space(builder, op, dim)
    else:
        builder.refuse(op, "slices a dim in which height and width are flattened", "a slice of either height or width")


def _slice_tiles(builder: Builder, op: Operator) -> None:
    """Emit a slice of a batch of tiles: a group of consecutive tiles, see ``moves.groups``."""
    name = op.args[0].name
    start, stop, step = (list(op.args[2:5]) + [None] * 3)[:3]
    tiles = range(builder.shape(name)[0])[start:stop:step]
    if tiles.step != 1 or not tiles:
        builder.refuse(op, "takes tiles with a step other than 1, or none", "consecutive tiles")
    group(builder, name, op.first_output, tiles.start, tiles.stop)


FACTS = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), view_record(one_map(view))),
    **dict.fromkeys(("permute", "transpose.int"), view_record(one_map(permute))),
    "unsqueeze": view_record(one_map(unsqueeze)),
    **dict.fromkeys(("squeeze", "squeeze.dim", "squeeze.dims"), view_record(one_map(squeeze))),
    **dict.fromkeys(("select.int", "unbind.int"), view_record(one_map(select))),
    "slice.Tensor": replace(view_record(one_map(sliced)), tap=of_slice),
    "expand": view_record(one_map(expand)),
    "stack": OperatorFacts(one_map(stack), keeps="nothing"),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), OperatorFacts(one_map(new_like))),
    **dict.fromkeys(("flatten.using_ints", "unflatten.int", "t", "view.dtype"), view_record(None)),
}
