"""The rule of pointwise operators, and the redistribution of operands that broadcast against each other.

(B, C, H, W) * (B, C, H, W)      equal maps: every rank has what it needs
(B, C, H, W) * (B, C, H, 1)      a map and a column: each rank receives its rows of the column
(B, C, H, 1) + (B, C, 1, W)      a column and a row: the result is divided evenly
(B, C, H, W) + (C, H, W)         a map and a replicated value: each rank cuts its part out of the latter
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.plan.layout import Layout
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import emit
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.replicated import cut_of_whole


def pointwise(builder: Builder, op: Operator) -> None:
    """An operator whose output pixels depend on the same pixels of its operands, which may broadcast."""
    names, anchor = operands(builder, op, builder.shape(op.first_output))
    emit(builder, op, names, anchor, op)


def copy(builder: Builder, op: Operator) -> None:
    """``y[:] = z`` in functional form: the second value with the shape and dtype of the first."""
    names, anchor = operands(builder, op, builder.shape(op.first_output))
    first, second = (names.get(item.name, item.name) for item in op.args[:2])

    def call(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        # A copy: expanded memory cannot be written to by later operators.
        return source.to(tensor.dtype).expand(tensor.shape).clone()

    builder.compute(call, (first, second), op.outputs, anchor)


def operands(builder: Builder, op: Operator, sizes: Sequence[int]) -> tuple[dict[str, str], Split]:
    """Redistribute an operator's values so that each rank has the same pixels of all of them.

    Args:
        builder: builder of the rank's program.
        op: the operator; at least one of its values is split.
        sizes: shape to which its values broadcast; only height, width and the number of dims are used.

    Returns:
        (value -> name of its part to use instead, where they differ; layout of the result, with dims of ``sizes``).

    Raises:
        RequestError: the maps have height and width in different dims, or sizes that do not broadcast.
    """
    maps = {name: _from_right(builder, name, len(sizes)) for name in dict.fromkeys(op.inputs) if name in builder.splits}
    anchor = _common(builder, op, list(maps.values()), sizes)
    names = {}
    for name in dict.fromkeys(op.inputs):
        if name in maps:
            names[name] = _aligned(builder, name, maps[name], anchor)
        elif _reaches_space(builder.shape(name), sizes, anchor):
            names[name] = _own_part(builder, name, anchor, len(sizes))
    return names, anchor


def _from_right(builder: Builder, name: str, dim_count: int) -> Split:
    """Return how a map is split, with its dims numbered as after broadcasting to ``dim_count`` dims."""
    split = builder.splits[name]
    more = dim_count - len(builder.shape(name))
    if not more and split.boxes is None:
        return split
    return replace(split, dims=(split.dims[0] + more, split.dims[1] + more), boxes=None)


def _common(builder: Builder, op: Operator, maps: list[Split], sizes: Sequence[int]) -> Split:
    """Return how the result is split: like the first map of the same size, or evenly if there is none."""
    first = maps[0]
    # The usual case: all maps have the same pixels. In a fused run, the result may be computed with margins.
    if all(split is first or _same_pixels(split, first) for split in maps) and _fits(first, sizes):
        return builder.with_margins(op, first)
    y, x = first.dims
    of_result_size = next((split for split in maps if _fits(split, sizes)), None)
    elsewhere = next(
        (split for split in maps if set(split.dims) != {y, x} or split.flat or split.map_counts != (1, 1)), None
    )
    if elsewhere is not None or not all(_broadcasts(split, sizes) for split in maps):
        unfit = elsewhere or next(split for split in maps if not _broadcasts(split, sizes))
        builder.refuse(
            op,
            f"combines a map of {first.layout.map.shape} pixels in dims {first.dims} with one of "
            f"{unfit.layout.map.shape} pixels in dims {unfit.dims}",
            "maps of equal size, or of size 1, in the same dims",
        )
    if of_result_size is not None:
        return of_result_size.owned
    # A row and a column broadcast: use the rows of one and the columns of the other, if these give the whole grid.
    rows = next((split.layout.rows for split in maps if split.dims == (y, x) and split.layout.height == sizes[y]), None)
    columns = next(
        (split.layout.columns for split in maps if split.dims == (y, x) and split.layout.width == sizes[x]), None
    )
    if rows and columns and (len(rows) - 1) * (len(columns) - 1) == len(first.layout.parts):
        return Split(Layout(rows, columns), (y, x))
    return Split(Layout.even(sizes[y], sizes[x], builder.grid), (y, x))


def _same_pixels(split: Split, other: Split) -> bool:
    """Whether two maps have the same pixels in the same dims."""
    return split.dims == other.dims and split.pixels == other.pixels


def _fits(split: Split, sizes: Sequence[int]) -> bool:
    """Whether a map has the height and width of the result."""
    return split.sides == tuple(sizes[dim] for dim in split.dims)


def _broadcasts(split: Split, sizes: Sequence[int]) -> bool:
    """Whether a map's height and width are those of the result, or 1."""
    return all(side in (1, sizes[dim]) for side, dim in zip(split.layout.map.shape, split.dims, strict=True))


def _aligned(builder: Builder, name: str, split: Split, anchor: Split) -> str:
    """Return the name of a value with the pixels of ``name`` that each rank's part of the result needs.

    Args:
        builder: builder of the rank's program.
        name: an operand.
        split: how it is split, with dims numbered as in the result.
        anchor: how the result is split.
    """
    if split is anchor or _same_pixels(split, anchor):
        dims = builder.splits[name].dims
        return builder.part(name, anchor if dims == anchor.dims else replace(anchor, dims=dims))
    map_box, turned = split.layout.map, split.dims != anchor.dims
    # The boxes of the result, in the operand's order of height and width.
    need = anchor.held.transposed() if turned else anchor.held
    # A side of 1 broadcasts: every rank with pixels needs it.
    need = need.each(
        lambda y0, y1: (0, int(y0 < y1)) if map_box.height == 1 else (y0, y1),
        lambda x0, x1: (0, int(x0 < x1)) if map_box.width == 1 else (x0, x1),
    )
    return builder.moved(name, need)


def _reaches_space(shape: Sequence[int], full: Sequence[int], split: Split) -> bool:
    """Whether a replicated operand has a height or width above 1, so that each rank needs its part of it.

    Args:
        shape: shape of the operand.
        full: shape of the result.
        split: split of the result.
    """
    # Dims are aligned at their ends, as in broadcasting.
    missing = len(full) - len(shape)
    return any(dim >= missing and shape[dim - missing] > 1 for dim in split.dims)


def _own_part(builder: Builder, name: str, split: Split, dim_count: int) -> str:
    """Return the name of this rank's part of a replicated map, such as a positional embedding.

    ``split``: of the operator's result, which has ``dim_count`` dims; the map may have fewer, aligned at the end.
    """
    missing = dim_count - len(builder.shape(name))
    dims = (split.dims[0] - missing, split.dims[1] - missing)
    result = builder.fresh(name)
    builder.compute(cut_of_whole(replace(split, dims=dims), builder.rank, builder.shape(name)), (name,), (result,))
    return result


_OTHERS = """
relu6 selu celu mish softplus log abs reciprocal clamp_min clamp_max square pow.Tensor_Scalar sin cos erf floor log1p
expm1 maximum minimum _prelu_kernel where.self eq.Scalar eq.Tensor gt.Scalar gt.Tensor lt.Scalar lt.Tensor ge.Scalar
le.Scalar lerp.Tensor lerp.Scalar addcmul logical_not zeros_like ones_like empty_like full_like sign sgn log_sigmoid
threshold hardshrink softshrink where.ScalarSelf where.ScalarOther where.Scalar ne.Scalar logical_and logical_or isnan
trunc ceil round frac pow.Tensor_Tensor pow.Scalar log2 log10 exp2 tan atan asin acos sinh cosh addcdiv erfc fmod.Scalar
remainder.Scalar le.Tensor ge.Tensor ne.Tensor masked_fill.Scalar fill.Scalar type_as bitwise_not __and__.Tensor
__and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar bitwise_and.Tensor bitwise_and.Scalar
bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar logical_xor isfinite isinf nan_to_num
clamp.Tensor clamp_min.Tensor clamp_max.Tensor masked_fill.Tensor fill.Tensor fmod.Tensor remainder.Tensor floor_divide
floor_divide.Scalar div.Tensor_mode div.Scalar_mode atan2 hypot xlogy.Tensor logaddexp fmax fmin sinc positive
"""
_RENAMED = OperatorFacts(pointwise, "view", keeps="nothing")

FACTS = {
    **dict.fromkeys(_OTHERS.split(), OperatorFacts(pointwise)),
    "hyfi.pointwise_function.default": OperatorFacts(pointwise),  # a function of the user; see capture.functions
    "add.Tensor": OperatorFacts(pointwise, keeps="nothing", gradient="same", fresh=True, in_place=True, cheap=True),
    "relu": OperatorFacts(pointwise, keeps="outputs", gradient="new", in_place=True, cheap=True),
    "add.Scalar": OperatorFacts(pointwise, keeps="nothing", gradient="same", cheap=True),
    **dict.fromkeys(
        ("sub.Tensor", "sub.Scalar", "mul.Scalar", "div.Scalar", "neg", "to.dtype", "_to_copy"),
        OperatorFacts(pointwise, keeps="nothing", cheap=True),
    ),
    **dict.fromkeys(("rsub.Tensor", "rsub.Scalar", "clone", "contiguous"), OperatorFacts(pointwise, keeps="nothing")),
    **dict.fromkeys(("alias", "detach"), _RENAMED),
    **dict.fromkeys(("exp", "sqrt", "rsqrt"), OperatorFacts(pointwise, keeps="outputs")),
    "sigmoid": OperatorFacts(pointwise, keeps="outputs", gradient="new", cheap=True),
    "tanh": OperatorFacts(pointwise, keeps="outputs", cheap=True),
    "mul.Tensor": OperatorFacts(pointwise, keeps="other factors", gradient="new", cheap=True),
    **dict.fromkeys(("silu", "gelu", "hardswish", "hardsigmoid"), OperatorFacts(pointwise, gradient="new", cheap=True)),
    **dict.fromkeys(("div.Tensor", "hardtanh", "leaky_relu", "elu", "clamp"), OperatorFacts(pointwise, cheap=True)),
    "copy": OperatorFacts(copy),
    "rrelu": OperatorFacts(None, instead="F.leaky_relu"),
}
