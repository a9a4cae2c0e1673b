"""Rules for roll, flip, circular padding and repeats: each rank needs a few slices of the input along each axis.

    roll by 1, columns 0 … 7 on two ranks

    rank 0 needs   7 │ 0 1 2        two slices, so two redistributions: one of the first slices of all ranks,
    rank 1 needs   3 4 5 6          one of the second slices; each rank concatenates what it has received

Most of these pixels are already on the rank, so little is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.plan.boxes import Boxes
from hyfi_core.plan.layout import Layout
from hyfi_core.rules.accepted_maps import one_map
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import emit_on_part
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.operator_facts import OperatorFacts

Slice = tuple[int, int, int]
"""(start, stop, step): the inputs [start, stop), ascending, or descending for a step of -1."""


def roll(builder: Builder, op: Operator) -> None:
    """``roll`` along any dims."""
    name = op.args[0].name
    split, shape = builder.splits[name], builder.shape(name)
    shifts = op.args[1] if isinstance(op.args[1], (list, tuple)) else [op.args[1]]
    argument = op.args[2] if len(op.args) > 2 else op.kwargs.get("dims", [])
    dims = [dim % len(shape) for dim in ([argument] if isinstance(argument, int) else argument)]
    if not dims:
        builder.refuse(
            op, "rolls the flattened tensor, across all dims", "explicit dims, torch.roll(y, (1, 2), (2, 3))"
        )
    # A dim may be given twice: its shifts add up.
    shift_of = dict.fromkeys(range(len(shape)), 0)
    for shift, dim in zip(shifts, dims, strict=True):
        shift_of[dim] += shift
    channel_shifts = [(shift, dim) for dim, shift in shift_of.items() if shift and dim not in split.dims]
    if not set(dims) & set(split.dims):
        _emit_on_other_dims(builder, op)
        return
    if not split.has_own_dims:
        builder.refuse(
            op, f"rolls dims {dims}, which mix rows or columns with something else", "either height or width"
        )
    # Output ``at`` is the input that moves there.
    tables = [[(at - shift_of[dim]) % shape[dim] for at in range(shape[dim])] for dim in split.dims]
    amounts, channel_dims = [shift for shift, _ in channel_shifts], [dim for _, dim in channel_shifts]
    _by_slices(
        builder, op, tables, split.layout, (lambda y: torch.roll(y, amounts, channel_dims)) if channel_shifts else None
    )


def flip(builder: Builder, op: Operator) -> None:
    """``flip`` along any dims."""
    name = op.args[0].name
    split, shape = builder.splits[name], builder.shape(name)
    dims = [dim % len(shape) for dim in op.args[1]]
    if not set(dims) & set(split.dims):
        _emit_on_other_dims(builder, op)
        return
    if not split.has_own_dims:
        builder.refuse(
            op, f"flips dims {dims}, which mix rows or columns with something else", "either height or width"
        )
    tables = [list(range(shape[dim]))[:: -1 if dim in dims else 1] for dim in split.dims]
    channel_dims = [dim for dim in dims if dim not in split.dims]
    _by_slices(builder, op, tables, split.layout, (lambda y: y.flip(channel_dims)) if channel_dims else None)


def _emit_on_other_dims(builder: Builder, op: Operator) -> None:
    """Emit an operator along dims other than height and width."""
    split = builder.same_pixels(op, op.args[0].name)
    emit_on_part(builder, op, split, split)


def pad_circular(builder: Builder, op: Operator, space: Sequence[tuple[int, int]]) -> None:
    """Circular padding of height and width by (before, after) each."""
    split = builder.splits[op.args[0].name]
    # Python's remainder is not negative: -1 is the last pixel.
    tables = [
        [at % size for at in range(-before, size + after)]
        for size, (before, after) in zip(split.layout.map.shape, space, strict=True)
    ]
    layout = Layout(_grown(split.layout.rows, space[0]), _grown(split.layout.columns, space[1]))
    _by_slices(builder, op, tables, layout)


def _grown(cuts: tuple[int, ...], pair: tuple[int, int]) -> tuple[int, ...]:
    """Return the cuts of a padded axis; padding belongs to the first and last part."""
    return (0, *(cut + pair[0] for cut in cuts[1:-1]), cuts[-1] + sum(pair))


def repeat_space(builder: Builder, op: Operator, times: tuple[int, int]) -> None:
    """``repeat`` of whole maps, (y, x) times."""
    split = builder.splits[op.args[0].name]
    sides = split.layout.map.shape
    tables = [[at % size for at in range(size * count)] for size, count in zip(sides, times, strict=True)]
    layout = Layout.even(sides[0] * times[0], sides[1] * times[1], builder.grid)
    _by_slices(builder, op, tables, layout)


def _by_slices(
    builder: Builder,
    op: Operator,
    tables: Sequence[Sequence[int]],
    layout: Layout,
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Emit the operator whose output pixel (y, x) is input pixel (tables[0][y], tables[1][x]).

    Args:
        builder: builder of the rank's program.
        op: its first argument is the map.
        tables: output index -> input index, for height and for width.
        layout: layout of the result.
        finish: applied to each rank's part of the result; None: nothing.
    """
    name = op.args[0].name
    dims = builder.splits[name].dims
    slices = [
        [_slices(table[start:stop]) for start, stop in pairwise(cuts)]
        for table, cuts in zip(tables, (layout.rows, layout.columns), strict=True)
    ]
    most = [max(len(pieces) for pieces in along) for along in slices]
    columns = len(layout.columns) - 1
    own = slices[0][builder.rank // columns], slices[1][builder.rank % columns]
    pieces = []
    # All ranks take part in each redistribution: ranks with fewer slices need empty boxes.
    for i in range(most[0]):
        for j in range(most[1]):
            pieces.append(builder.moved(name, Boxes(_nth(slices[0], i), _nth(slices[1], j))))

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        """Return this rank's part, joined from pieces: ``tensors[i * most[1] + j]`` has slices i of y and j of x."""
        bands = []
        for i, (_, _, step_y) in enumerate(own[0]):
            row = [
                _stepped(tensors[i * most[1] + j], dims, (step_y, step_x)) for j, (_, _, step_x) in enumerate(own[1])
            ]
            bands.append(row[0] if len(row) == 1 else torch.cat(row, dims[1]))
        result = bands[0] if len(bands) == 1 else torch.cat(bands, dims[0])
        return result.clone() if finish is None else finish(result)

    builder.compute(call, tuple(pieces), op.outputs, Split(layout, dims))


def _stepped(tensor: torch.Tensor, dims: tuple[int, int], steps: tuple[int, int]) -> torch.Tensor:
    """Return the tensor flipped along the dims with a step of -1."""
    flipped = [dim for dim, step in zip(dims, steps, strict=True) if step < 0]
    return tensor.flip(flipped) if flipped else tensor


def _slices(table: Sequence[int]) -> list[Slice]:
    """Return a table as slices: ``[7, 0, 1, 2]`` is ``[(7, 8, 1), (0, 3, 1)]``."""
    result: list[Slice] = []
    at = 0
    while at < len(table):
        # Runs ascend or descend by 1; pixels with other steps between them are slices of their own.
        step = table[at + 1] - table[at] if at + 1 < len(table) else 1
        step = step if step in (1, -1) else 1
        end = at + 1
        while end < len(table) and table[end] - table[end - 1] == step:
            end += 1
        low, high = min(table[at], table[end - 1]), max(table[at], table[end - 1])
        result.append((low, high + 1, step))
        at = end
    return result


def _nth(slices: Sequence[list[Slice]], i: int) -> tuple[tuple[int, int], ...]:
    """Return the interval of slice ``i`` of each rank along an axis; empty if it has fewer."""
    return tuple(pieces[i][:2] if i < len(pieces) else (0, 0) for pieces in slices)


FACTS = {
    "roll": OperatorFacts(one_map(roll), keeps="nothing"),
    "flip": OperatorFacts(one_map(flip), keeps="nothing"),
}
