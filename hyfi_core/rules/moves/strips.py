"""Rules for operators along height or width: each rank receives whole rows, or whole columns.

    2 x 2 ranks           4 strips of whole rows
    ┌───┬───┐             ┌───────┐
    │ 0 │ 1 │             │   0   │
    ├───┼───┤      ─▶     ├───────┤      a result of the map's size is split into strips;
    │ 2 │ 3 │             │   1 … │      a single row or column is gathered on every rank
    └───┴───┘             └───────┘

This is exact for any operator: softmax, sort, cumulative sums, variances, maxima with ties.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.plan.layout import Layout
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import bound, renamed
from hyfi_core.rules.instructions import Split


def strips(builder: Builder, split: Split, dim: int) -> Split:
    """Return the layout in which ``dim``, height or width, is whole on every rank, and the other is divided."""
    ranks, map_box = len(split.layout.parts), split.layout.map
    if split.dims[0] == dim:
        layout = Layout((0, map_box.height), Layout.even(1, map_box.width, (1, ranks)).columns)
    else:
        layout = Layout(Layout.even(map_box.height, 1, (ranks, 1)).rows, (0, map_box.width))
    return Split(layout, split.dims, map_counts=split.map_counts)


def along_space(builder: Builder, op: Operator, dims: tuple[int, ...], keepdim: bool | None) -> None:
    """Emit an operator along height or width of its first argument, and perhaps along other dims.

    Args:
        builder: builder of the rank's program.
        op: the operator.
        dims: one of height and width, and others.
        keepdim: whether reduced dims are kept as size 1; None if it does not reduce.

    Raises:
        RequestError: height and width are not separate dims.
    """
    name = op.args[0].name
    split = builder.splits[name]
    if not split.has_own_dims:
        builder.refuse(
            op, f"works along dims {dims}, which mix rows or columns with something else", "either height or width"
        )
    # Exactly one: both would be a reduction over the whole map.
    (dim,) = set(dims) & set(split.dims)
    laid = strips(builder, split, dim)
    function, inputs = bound(renamed(op, {name: builder.part(name, laid)}))
    if keepdim is None:
        builder.compute(function, inputs, op.outputs, _resized(laid, dim, builder.shape(op.first_output)[dim]))
        return
    reduced = _resized(laid, dim, 1)
    if not keepdim:  # a row or a column remains, in one dim
        # The other one of height and width, renumbered without the reduced dims.
        divided = laid.dims[0] + laid.dims[1] - dim
        divided -= sum(gone < divided for gone in dims)
        reduced = replace(reduced, dims=(divided, divided))
    parts = tuple(None if output is None else builder.fresh(output) for output in op.outputs)
    builder.compute(function, inputs, parts, reduced)
    for part, output in zip(parts, op.outputs, strict=True):
        if part is not None:
            _gather_profile(builder, part, output)


def _gather_profile(builder: Builder, name: str, output: str | None) -> None:
    """Emit ``output``: a split row or column, gathered on every rank."""
    builder.compute(lambda tensor: torch.ops.aten.alias.default(tensor), (builder.whole(name),), (output,))


def _resized(split: Split, dim: int, size: int) -> Split:
    """Return the layout of strips with size ``size`` of their undivided dim ``dim``."""
    rows, columns = split.layout.rows, split.layout.columns
    layout = Layout((0, size), columns) if split.dims[0] == dim else Layout(rows, (0, size))
    return Split(layout, split.dims)


def extreme_along_space(builder: Builder, op: Operator) -> None:
    """``max`` and ``min`` along height or width, with indices: first of each part, then of the parts' results.

    The results of all parts are a small map with one line for each part, which every rank gathers. The first of equal
    extremes counts: in each part, then among parts in order, so it is the first of the whole row.
    """
    name = op.args[0].name
    split, shape = builder.splits[name].owned, builder.shape(name)
    dim = op.args[1] % len(shape)
    keepdim = bool(op.args[2]) if len(op.args) > 2 else bool(op.kwargs.get("keepdim", False))
    # Along an axis of one rank, rows are whole already.
    if not split.has_own_dims or (builder.grid[0] if dim == split.dims[0] else builder.grid[1]) == 1:
        along_space(builder, op, (dim,), keepdim)
        return
    layout, box = split.layout, split.layout.parts[builder.rank]
    start = box.y0 if dim == split.dims[0] else box.x0

    def of_part(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = op.target(tensor, dim, True)
        return values, indices + start

    rows, columns = layout.rows, layout.columns
    line_per_part = Layout(_counted(rows), columns) if dim == split.dims[0] else Layout(rows, _counted(columns))
    sides = list(shape)
    sides[split.dims[0]], sides[split.dims[1]] = line_per_part.map.shape
    best = builder.fresh(name, tuple(sides))
    where = builder.fresh(name, tuple(sides), torch.int64)
    builder.compute(of_part, (builder.part(name, split),), (best, where), Split(line_per_part, split.dims))

    def first(values: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        top, at = op.target(values, dim, True)
        # Of equal extremes, ``op.target`` returns that of the first part, which had chosen its first, too.
        places = indices.gather(dim, at)
        result = (top, places) if keepdim else (top.squeeze(dim), places.squeeze(dim))
        return tuple(item.clone() for item in result)

    builder.compute(first, (builder.whole(best), builder.whole(where)), op.outputs)


def _counted(cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the cuts of an axis with one value for each part that is not empty: (0, 4, 4, 7) gives (0, 1, 1, 2)."""
    result = [0]
    for start, stop in itertools.pairwise(cuts):
        # A part without pixels has no extreme.
        result.append(result[-1] + (stop > start))
    return tuple(result)
