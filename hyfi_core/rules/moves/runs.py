"""Rules for operators that send a part's pixels to a few other places: roll, flip, circular padding, repeats.

    roll by 1, columns 0 … 7 on two ranks

    rank 0 needs   7 │ 0 1 2        two runs of neighbouring pixels, each one box: an exchange for the first runs
    rank 1 needs   3   4 5 6        of all ranks, one for the second ones, and every rank joins what it got

Most of the boxes are what the rank has, so next to nothing travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.plan.box import Box
from hyfi_core.plan.layout import Layout
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import bound, renamed
from hyfi_core.rules.instructions import Split

_NOTHING = Box(0, 0, 0, 0)
Run = tuple[int, int, int]
"""(start, stop, step): neighbouring inputs, upwards or, for a step of -1, downwards from stop - 1."""


def roll(builder: Builder, op: Operator) -> None:
    """``roll`` along space, along other dims, or both."""
    name = op.args[0].name
    here, shape = builder.splits[name], builder.shape(name)
    shifts = op.args[1] if isinstance(op.args[1], (list, tuple)) else [op.args[1]]
    given = op.args[2] if len(op.args) > 2 else op.kwargs.get("dims", [])
    dims = [dim % len(shape) for dim in ([given] if isinstance(given, int) else given)]
    if not dims:
        builder.refuse(
            op, "rolls the flattened tensor, across all dims", "explicit dims, torch.roll(y, (1, 2), (2, 3))"
        )
    by = dict.fromkeys(range(len(shape)), 0)
    for shift, dim in zip(shifts, dims, strict=True):
        by[dim] += shift
    rest = [(shift, dim) for dim, shift in by.items() if shift and dim not in here.dims]
    if not set(dims) & set(here.dims):
        _alone(builder, op, name)
        return
    if not here.plain:
        builder.refuse(
            op, f"rolls dims {dims}, which mix rows or columns with something else", "either height or width"
        )
    tables = [[(at - by[dim]) % shape[dim] for at in range(shape[dim])] for dim in here.dims]
    amounts, others = [shift for shift, _ in rest], [dim for _, dim in rest]
    by_runs(builder, op, tables, here.layout, (lambda y: torch.roll(y, amounts, others)) if rest else None)


def flip(builder: Builder, op: Operator) -> None:
    """``flip`` along space, along other dims, or both."""
    name = op.args[0].name
    here, shape = builder.splits[name], builder.shape(name)
    dims = [dim % len(shape) for dim in op.args[1]]
    if not set(dims) & set(here.dims):
        _alone(builder, op, name)
        return
    if not here.plain:
        builder.refuse(
            op, f"flips dims {dims}, which mix rows or columns with something else", "either height or width"
        )
    tables = [list(range(shape[dim]))[:: -1 if dim in dims else 1] for dim in here.dims]
    rest = [dim for dim in dims if dim not in here.dims]
    by_runs(builder, op, tables, here.layout, (lambda y: y.flip(rest)) if rest else None)


def _alone(builder: Builder, op: Operator, name: str) -> None:
    """Emit an operator that leaves every pixel where it is."""
    here = builder.seen(op, name)
    function, inputs = bound(renamed(op, {name: builder.part(name, here)}))
    builder.compute(function, inputs, op.outputs, here)


def pad_circular(builder: Builder, op: Operator, space: Sequence[tuple[int, int]]) -> None:
    """Circular padding of height and width by (before, after) each."""
    here = builder.splits[op.args[0].name]
    tables = [
        [at % size for at in range(-before, size + after)]
        for size, (before, after) in zip(here.layout.map.shape, space, strict=True)
    ]
    layout = Layout(_grown(here.layout.rows, space[0]), _grown(here.layout.columns, space[1]))
    by_runs(builder, op, tables, layout)


def _grown(cuts: tuple[int, ...], pair: tuple[int, int]) -> tuple[int, ...]:
    """Return cuts of the same pixels with some before and some behind them."""
    return (0, *(cut + pair[0] for cut in cuts[1:-1]), cuts[-1] + sum(pair))


def repeat_space(builder: Builder, op: Operator, times: tuple[int, int]) -> None:
    """``repeat`` of whole maps, (y, x) times beside each other."""
    here = builder.splits[op.args[0].name]
    sides = here.layout.map.shape
    tables = [[at % size for at in range(size * count)] for size, count in zip(sides, times, strict=True)]
    layout = Layout.even(sides[0] * times[0], sides[1] * times[1], builder.grid)
    by_runs(builder, op, tables, layout)


def by_runs(
    builder: Builder,
    op: Operator,
    tables: Sequence[Sequence[int]],
    layout: Layout,
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Emit the operator whose output pixel (y, x) is input pixel (tables[0][y], tables[1][x]).

    Args:
        builder: of the rank's program.
        op: its first argument is the map.
        tables: for height and for width.
        layout: of the result.
        finish: what else it does to each part.
    """
    name = op.args[0].name
    dims = builder.splits[name].dims
    runs = [
        [_runs(table[start:stop]) for start, stop in pairwise(cuts)]
        for table, cuts in zip(tables, (layout.rows, layout.columns), strict=True)
    ]
    most = [max(len(found) for found in along) for along in runs]
    columns = len(layout.columns) - 1
    own = runs[0][builder.rank // columns], runs[1][builder.rank % columns]
    pieces = []
    for i in range(most[0]):
        for j in range(most[1]):
            need = [_box(runs[0][rank // columns], i, runs[1][rank % columns], j) for rank in range(len(layout.parts))]
            pieces.append(builder.moved(name, need))

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        bands = []
        for i, (_, _, down) in enumerate(own[0]):
            row = [
                tensors[i * most[1] + j].flip([dim for dim, step in zip(dims, (down, left), strict=True) if step < 0])
                if min(down, left) < 0
                else tensors[i * most[1] + j]
                for j, (_, _, left) in enumerate(own[1])
            ]
            bands.append(row[0] if len(row) == 1 else torch.cat(row, dims[1]))
        result = bands[0] if len(bands) == 1 else torch.cat(bands, dims[0])
        return result.clone() if finish is None else finish(result)

    builder.compute(call, tuple(pieces), op.outputs, Split(layout, dims))


def _runs(table: Sequence[int]) -> list[Run]:
    """Return a table as runs of neighbours, upwards or downwards."""
    result: list[Run] = []
    at = 0
    while at < len(table):
        step = table[at + 1] - table[at] if at + 1 < len(table) else 1
        step = step if step in (1, -1) else 1
        end = at + 1
        while end < len(table) and table[end] - table[end - 1] == step:
            end += 1
        low, high = min(table[at], table[end - 1]), max(table[at], table[end - 1])
        result.append((low, high + 1, step))
        at = end
    return result


def _box(rows: list[Run], i: int, columns: list[Run], j: int) -> Box:
    """Return the box of the ``i``th run of rows and the ``j``th of columns; empty where there are fewer."""
    return Box(*rows[i][:2], *columns[j][:2]) if i < len(rows) and j < len(columns) else _NOTHING
