"""Views that divide height and width into blocks, merge blocks, or merge other dims with them.

    H             -> (H/4, 4)           blocks: ranks share the H/4, each block is on one rank. Parts are cut at
                                        multiples of 4; if the map is too small for this, some ranks own nothing
    (H/4, 4)      -> H                  the inverse
    (B, H/4, W/4) -> B · H/4 · W/4      the windows of all images: flat, with map counts (B, 1)
    H             -> (4, H/4)           a grid: rows with the distance H/4 belong together; ranks share the H/4

Of the factors of H, ranks share the one that counts windows, if this can be determined (see ``moves.ahead``); else the
first or, of two, the larger one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod

from hyfi_core.capture.program import Operator
from hyfi_core.plan.layout import Layout
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.moves.ahead import windows_first
from hyfi_core.rules.moves.strips import strips


@dataclass(frozen=True)
class _Factor:
    """A common factor of the sizes before and after a view.

    Attributes:
        size: size of the factor.
        before: the dim that contains it before the view.
        after: the dim that contains it after the view.
    """

    size: int
    before: int
    after: int


def try_view_of_blocks(builder: Builder, op: Operator) -> bool:
    """Emit a view that divides height and width into blocks, or merges them; return whether it is supported.

    For example (B, C, 8, 12) -> (B, C, 2, 4, 3, 4)::

        factors           B  C  2  4  3  4        common factors of both shapes
        axis_factors            └y─┘  └x─┘        those of height and of width: [[2, 3], [4, 5]]
        carriers                2     3           of each, the factor that ranks share, with indices 2 and 4
        blocks                     4     4        rows and columns of a block; parts are cut at multiples of it
        coarse            layout of the 2 x 3 blocks
    """
    name, sizes = op.args[0].name, builder.shape(op.first_output)
    input_split = builder.splits[name].owned
    shape, dims = input_split.opened(builder.shape(name))
    factors = _factors(shape, sizes)
    if factors is None:
        return False
    axis_factors = [[at for at, factor in enumerate(factors) if factor.before == dim] for dim in dims]
    if not any(axis_factors):
        return False
    second_is_shared = _where_second_is_shared(builder, op, factors, axis_factors)  # for (y, x)
    factors, axis_factors = _with_unit(factors, axis_factors, second_is_shared, dims)
    carriers, blocks = [], []
    for members, is_second in zip(axis_factors, second_is_shared, strict=True):
        carriers.append(members[-1] if is_second else members[0])
        blocks.append(1 if is_second else prod(factors[at].size for at in members[1:]))
    value = name
    if any(second_is_shared):  # a grid: ranks first exchange whole rows or columns
        value = builder.opened(builder.part(name, input_split))
        for axis in (axis for axis in (0, 1) if second_is_shared[axis]):
            value = _gridded(builder, value, axis, factors[carriers[axis]].size)
    value_split = builder.splits[value]
    layout = Layout.even(*value_split.layout.map.shape, builder.grid) if any(second_is_shared) else value_split.layout
    # Blocks must not be divided: cuts move to the nearest border of a block.
    rows, columns = _aligned(layout.rows, blocks[0]), _aligned(layout.columns, blocks[1])
    coarse = Layout(tuple(cut // blocks[0] for cut in rows), tuple(cut // blocks[1] for cut in columns))
    split = _folded(coarse, factors, (carriers[0], carriers[1]))
    if split is None:
        return False
    part = builder.part(value, Split(Layout(rows, columns), value_split.dims, map_counts=value_split.map_counts))
    local = split.local_shape(sizes, builder.rank)
    # Otherwise height and width each share a dim with a dim before it: whole rows and columns are needed to merge.
    if split.flat or 1 in split.map_counts:
        builder.compute(lambda tensor: tensor.reshape(local), (part,), op.outputs, split)
        return True
    folded = builder.fresh(op.first_output)
    builder.compute(lambda tensor: tensor.reshape(local), (part,), (folded,), split)
    _ungridded(builder, folded, op.first_output)
    return True


def _with_unit(
    factors: list[_Factor], axis_factors: list[list[int]], second_is_shared: list[bool], dims: tuple[int, int]
) -> tuple[list[_Factor], list[list[int]]]:
    """Return (factors, axis_factors) with a factor of size 1 for an axis, height or width, that has none.

    The common factors of two shapes do not include a side of 1. The new factor is put beside the factor of the other
    axis that ranks share, so that the map is flat.

    Args:
        factors: all factors of the view, in order.
        axis_factors: the indices in ``factors`` of the factors of height, and of the factors of width.
        second_is_shared: for height and for width, whether ranks share the second of its two factors.
        dims: dims of height and width before the view.
    """
    unit_axis = next((axis for axis in (0, 1) if not axis_factors[axis]), None)
    if unit_axis is None:
        return factors, axis_factors
    other_axis = 1 - unit_axis
    shared = axis_factors[other_axis][-1 if second_is_shared[other_axis] else 0]
    at = shared + unit_axis  # in row-major order: a height goes before the shared width, a width behind the height
    unit = _Factor(1, dims[unit_axis], factors[shared].after)
    renumbered = [factor + (factor >= at) for factor in axis_factors[other_axis]]  # factors after the new one
    of_axes = {unit_axis: [at], other_axis: renumbered}
    return [*factors[:at], unit, *factors[at:]], [of_axes[0], of_axes[1]]


def _where_second_is_shared(
    builder: Builder, op: Operator, factors: list[_Factor], axis_factors: list[list[int]]
) -> list[bool]:
    """Return, for height and for width, whether it has two factors of which ranks share the second.

    Args:
        builder: builder of the rank's program.
        op: the view.
        factors: all factors of the view, in order.
        axis_factors: the indices in ``factors`` of the factors of height, and of the factors of width.
    """
    sizes = [factor.size for factor in factors]
    if all(len(members) == 2 for members in axis_factors):
        dims = range(len(builder.shape(op.first_output)))
        groups = [tuple(at for at, factor in enumerate(factors) if factor.after == dim) for dim in dims]
        pairs = [(axis_factors[0][factor], axis_factors[1][factor]) for factor in (0, 1)]
        # Factors of dim 0.
        batch = [at for at, factor in enumerate(factors) if not factor.before]
        builder.ahead.add(op.name)  # noted, since the split then depends on the operators that follow
        first = windows_first(builder.program, op, groups, sizes, pairs, batch)
        if first is not None:
            return [first == 1] * 2
    # Otherwise the larger one, which can be divided among more ranks.
    return [len(members) == 2 and sizes[members[1]] > sizes[members[0]] for members in axis_factors]


def _gridded(builder: Builder, name: str, axis: int, inner: int) -> str:
    """Return the name of the map with height or width viewed as two dims (n, ``inner``); ranks share ``inner``.

    For example 8 rows on two ranks, with ``inner`` 4. Rows 0 and 4 belong together, so every rank first gets all rows,
    of some columns (``strips``), and views them as (2, 4); then ``Builder.part`` may cut the second dim::

        rows 0 1 2 3 │ 4 5 6 7  ──▶  0 1 2 3 4 5 6 7  ──▶  0 1 2 3  ──▶     0 1 │ 2 3
                     │                                     4 5 6 7          4 5 │ 6 7
        rank 0       │ rank 1        each rank, some columns             rank 0 │ rank 1
    """
    split = builder.splits[name]
    dim, shape = split.dims[axis], builder.shape(name)
    strip = builder.part(name, strips(builder, split, dim))
    cuts = [builder.splits[strip].layout.rows, builder.splits[strip].layout.columns]
    cuts[axis] = (0, inner)
    dims = tuple(at + (at >= dim) for at in split.dims)
    return _reshaped(builder, strip, (*shape[:dim], shape[dim] // inner, inner, *shape[dim + 1 :]), cuts, dims)


def _ungridded(builder: Builder, name: str, output: str) -> None:
    """Emit ``output``: the same tensor, split as one map instead of several in one dim; the inverse of ``_gridded``.

    ``name`` is (n · h, m · w): ranks share h and w, and each has its part of each of the n · m maps. Opened, it is
    (n, h, m, w). Each rank gets all of w, of some rows, and merges (m, w), then all of h, and merges (n, h).
    """
    split = builder.splits[name]
    value = builder.opened(name)
    for axis in (1, 0):
        value_split = builder.splits[value]
        dim, shape = value_split.dims[axis], builder.shape(value)
        strip = builder.part(value, strips(builder, value_split, dim))
        size = shape[dim - 1] * shape[dim]
        cuts = [builder.splits[strip].layout.rows, builder.splits[strip].layout.columns]
        cuts[axis] = (0, size)
        dims = tuple(at - (at >= dim) for at in value_split.dims)
        value = _reshaped(builder, strip, (*shape[: dim - 1], size, *shape[dim + 1 :]), cuts, dims)
    assert builder.shape(value) == builder.shape(name)
    even_split = Split(Layout.even(*split.sides, builder.grid), split.dims)
    builder.compute(lambda tensor: tensor, (builder.part(value, even_split),), (output,), even_split)


def _reshaped(
    builder: Builder, name: str, shape: tuple[int, ...], cuts: list[tuple[int, ...]], dims: tuple[int, ...]
) -> str:
    """Return the name of a new value: ``name`` with each rank's part reshaped.

    Args:
        builder: builder of the rank's program.
        name: a split value.
        shape: global shape of the result.
        cuts: cuts of the result's rows and columns.
        dims: dims of the result's height and width.
    """
    split = Split(Layout(cuts[0], cuts[1]), (dims[0], dims[1]))
    local, result = split.local_shape(shape, builder.rank), builder.fresh(name, shape)
    builder.compute(lambda tensor: tensor.reshape(local), (name,), (result,), split)
    return result


def _factors(before: tuple[int, ...], after: tuple[int, ...]) -> list[_Factor] | None:
    """Return the common factors of two shapes with equal products, in order; None if they have none.

    (8, 12) and (2, 4, 12) have the factors 2, 4, 12.
    """
    cuts = sorted({*_products(before), *_products(after)})
    # Two dims that overlap without one dividing the other have no common factors.
    if any(high % low for low, high in itertools.pairwise(cuts)):
        return None
    return [_Factor(high // low, _holding(before, low), _holding(after, low)) for low, high in itertools.pairwise(cuts)]


def _products(shape: tuple[int, ...]) -> list[int]:
    return [prod(shape[:at]) for at in range(len(shape) + 1)]


def _holding(shape: tuple[int, ...], ahead: int) -> int:
    """Return the dim that contains the factor after a product of factors of ``ahead``."""
    return next(at for at in range(len(shape)) if prod(shape[: at + 1]) > ahead)


def _aligned(cuts: tuple[int, ...], block: int) -> tuple[int, ...]:
    """Return the multiples of ``block`` that are nearest to the cuts."""
    # Half a block up, then down to a multiple: the nearest one.
    return tuple((cut + block // 2) // block * block for cut in cuts)


def _folded(layout: Layout, factors: list[_Factor], carriers: tuple[int, int]) -> Split | None:
    """Return how the result of a view into blocks is split; None if that is not possible.

    Args:
        layout: layout of the blocks; its rows and columns are the two factors that ranks share.
        factors: factors of the view.
        carriers: index of the shared factor of height, and of width.
    """
    y, x = carriers
    dims = factors[y].after, factors[x].after
    members = [[at for at, factor in enumerate(factors) if factor.after == dim] for dim in dims]
    if dims[0] == dims[1]:
        # Row-major positions need the two factors beside each other.
        if x != y + 1:
            return None
        behind = prod(factors[at].size for at in members[0] if at > x)
        ahead = prod(factors[at].size for at in members[0] if at < y)
        return Split(Layout(layout.rows, _times(layout.columns, behind)), dims, map_counts=(ahead, 1))
    ahead_y, ahead_x = (
        prod(factors[at].size for at in dims if at < own) for dims, own in zip(members, carriers, strict=True)
    )
    behind_y, behind_x = (
        prod(factors[at].size for at in dims if at > own) for dims, own in zip(members, carriers, strict=True)
    )
    folded = Layout(_times(layout.rows, behind_y), _times(layout.columns, behind_x))
    return Split(folded, dims, map_counts=(ahead_y, ahead_x))


def _times(cuts: tuple[int, ...], factor: int) -> tuple[int, ...]:
    return tuple(cut * factor for cut in cuts)
