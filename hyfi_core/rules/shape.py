"""Rules for operators that rename dims: permute, view, expand and their like.

view (B, 8, H, W) -> (B, 2, 4, H, W)      channels regroup, space survives: dims (2, 3) become (3, 4)
view (B, 8, H, W) -> (B, 8 · H · W)       space is gone: a small map is gathered, a large one refused
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from hyfi_core.capture.program import Operator
from hyfi_core.lowering.lower import Lowering, bound, lower_replicated, renamed
from hyfi_core.rules.instructions import Split

_GATHERED_PX = 4096
"""The largest map that is gathered on every rank where an operator leaves no space; a head's 7 × 7 is far below."""


def view(lowering: Lowering, op: Operator) -> None:
    """``view`` and ``reshape``: height and width must come out as dims of their own, in the order they had."""
    name, sizes = op.args[0].name, _result(lowering, op)
    shape, dims = lowering.shape(name), lowering.splits[name].dims
    found = tuple(_survivor(shape, dim, sizes) for dim in dims)
    if None in found or found[0] == found[1]:
        _without_space(lowering, op, f"turns shape {shape} into {sizes}, which mixes height and width with other dims")
        return
    here = lowering.seen(op, name)
    split = replace(here, dims=found)  # type: ignore[arg-type]
    local = split.local_shape(sizes, lowering.rank)
    part = lowering.part(name, here)
    lowering.compute(lambda tensor: tensor.reshape(local), (part,), op.outputs, split)


def _survivor(shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> int | None:
    """Return the dim of ``sizes`` that is dim ``dim`` of ``shape``: as long, with as much before it."""
    ahead = prod(shape[:dim])
    hits = [at for at, size in enumerate(sizes) if size == shape[dim] and prod(sizes[:at]) == ahead]
    # Where the side is 1, dims of size 1 beside it look the same; count from the end, where space usually is.
    return min(hits, key=lambda at: abs((len(sizes) - at) - (len(shape) - dim))) if hits else None


def permute(lowering: Lowering, op: Operator) -> None:
    """``permute`` and ``transpose``."""
    name = op.args[0].name
    count = len(lowering.shape(name))
    order = list(range(count))
    if op.text == "aten.permute.default":
        order = [dim % count for dim in op.args[1]]
    else:
        first, second = (dim % count for dim in op.args[1:3])
        order[first], order[second] = second, first
    here = lowering.seen(op, name)
    _rename(lowering, op, replace(here, dims=(order.index(here.dims[0]), order.index(here.dims[1]))))


def unsqueeze(lowering: Lowering, op: Operator) -> None:
    """A new dim of size 1 anywhere."""
    name = op.args[0].name
    at = op.args[1] % (len(lowering.shape(name)) + 1)
    _rename(lowering, op, _renumbered(lowering.seen(op, name), lambda dim: dim + (dim >= at)))


def squeeze(lowering: Lowering, op: Operator) -> None:
    """Dims of size 1 vanish; where a map of one row or column loses space so, it is gathered."""
    name = op.args[0].name
    shape, here = lowering.shape(name), lowering.seen(op, name)
    given = op.args[1] if len(op.args) > 1 else range(len(shape))
    asked = [given] if isinstance(given, int) else given
    gone = [dim % len(shape) for dim in asked if shape[dim] == 1]
    if set(gone) & set(here.dims):
        _without_space(lowering, op, f"squeezes dims of space {here.dims}")
    else:
        _rename(lowering, op, _renumbered(here, lambda dim: dim - sum(at < dim for at in gone)))


def select(lowering: Lowering, op: Operator) -> None:
    """One index of a dim that is not space (``select``), or all of them one by one (``unbind``)."""
    name = op.args[0].name
    here = lowering.seen(op, name)
    dim = (op.args[1] if len(op.args) > 1 else 0) % len(lowering.shape(name))
    if dim in here.dims:
        _without_space(lowering, op, f"takes dim {dim}, which is space, apart")
    else:
        _rename(lowering, op, _renumbered(here, lambda at: at - (dim < at)))


def stack(lowering: Lowering, op: Operator) -> None:
    """Equal maps along a new dim."""
    names = [item.name for item in op.args[0]]
    here = next(lowering.seen(op, name) for name in names if name in lowering.splits)
    if not all(name in lowering.splits for name in names):
        lowering.refuse(op, "stacks maps on values that are not maps", "maps of equal size")
    at = (op.args[1] if len(op.args) > 1 else 0) % (len(lowering.shape(names[0])) + 1)
    parts = {name: lowering.part(name, here) for name in names}
    function, inputs = bound(renamed(op, parts))
    lowering.compute(function, inputs, op.outputs, _renumbered(here, lambda dim: dim + (dim >= at)))


def expand(lowering: Lowering, op: Operator) -> None:
    """``expand`` along dims other than space."""
    name, sizes = op.args[0].name, _result(lowering, op)
    here = lowering.seen(op, name)
    more = len(sizes) - len(lowering.shape(name))
    split = _renumbered(here, lambda dim: dim + more)
    if (sizes[split.dims[0]], sizes[split.dims[1]]) != here.layout.map.shape:
        _without_space(lowering, op, f"repeats pixels of a {here.layout.map.shape} map to make {sizes}")
        return
    local = split.local_shape(sizes, lowering.rank)
    lowering.compute(lambda tensor: tensor.expand(local), (lowering.part(name, here),), op.outputs, split)


def _result(lowering: Lowering, op: Operator) -> tuple[int, ...]:
    return lowering.shape(op.first_output)


def _renumbered(split: Split, number: Any) -> Split:
    return replace(split, dims=(number(split.dims[0]), number(split.dims[1])))


def _rename(lowering: Lowering, op: Operator, split: Split) -> None:
    """Emit the operator on this rank's part; only the numbers of its dims change."""
    name = op.args[0].name
    function, inputs = bound(renamed(op, {name: lowering.part(name, lowering.seen(op, name))}))
    lowering.compute(function, inputs, op.outputs, split)


def _without_space(lowering: Lowering, op: Operator, what: str) -> None:
    """Gather a small map on every rank and go on without space; refuse a large one."""
    for name in op.inputs:
        split = lowering.splits.get(name)
        if split is not None and lowering.grid != (1, 1) and split.layout.map.area > _GATHERED_PX:
            lowering.refuse(
                op,
                f"{what}; every rank would hold the whole {split.layout.map.shape} map",
                f"shapes that keep height and width, reducing over both at once, or maps up to {_GATHERED_PX} px",
            )
    lower_replicated(lowering, renamed(op, {name: lowering.whole(name) for name in op.inputs}))


def new_like(lowering: Lowering, op: Operator) -> None:
    """``new_zeros``, ``new_empty`` and their like: as large as the map, or without space."""
    name, sizes = op.args[0].name, _result(lowering, op)
    here = lowering.splits[name]
    if sizes == lowering.shape(name):
        local = here.local_shape(sizes, lowering.rank)
        part = lowering.part(name, here)
        function, inputs = bound(_sized(renamed(op, {name: part}), list(local)))
        lowering.compute(function, inputs, op.outputs, here)
    elif sizes[-2:] == (1, 1) or len(sizes) < 3:
        function, inputs = bound(renamed(op, {name: lowering.part(name, here)}))
        lowering.compute(function, inputs, op.outputs)
    else:
        lowering.refuse(op, f"makes a {sizes} tensor beside a map", "the map's own shape, or one without space")


def _sized(op: Operator, sizes: list[int]) -> Operator:
    return Operator(op.name, op.target, (op.args[0], sizes, *op.args[2:]), op.kwargs, op.outputs, op.module)
