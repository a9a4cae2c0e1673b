"""Rules for operators on the channels of each pixel: norms over channels, linear layers, PReLU, reductions.

Height and width may be any dims: (B, C, H, W), or (B, H, W, C) as in ConvNeXt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.rules.accepted_maps import on_maps, one_map
from hyfi_core.rules.builder import Builder, Rule
from hyfi_core.rules.calls import arguments, emit, emit_on_part
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.moves.place import cat_of_space, split_of_space
from hyfi_core.rules.moves.strips import along_space, extreme_along_space
from hyfi_core.rules.norm import normalise
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.pointwise import operands, pointwise
from hyfi_core.rules.positions import extreme as extreme_over_positions
from hyfi_core.rules.positions import gather, over_positions, topk
from hyfi_core.rules.reduction import moments_over_ranks
from hyfi_core.rules.softmax import softmax

AlongSpace = Callable[[Builder, Operator, int], None]
"""Lowers an operator along height or width: takes builder, operator and the dim."""


def _split_of_map(builder: Builder, op: Operator) -> Split:
    """Return how results that have the pixels of the first argument, a map, are split; the caller checks dims."""
    return builder.same_pixels(op, op.args[0].name)


def _per_pixel(builder: Builder, op: Operator, split: Split) -> None:
    """Emit an operator whose output pixels depend on the same pixels of its only map."""
    emit_on_part(builder, op, _split_of_map(builder, op), split)


def channel_norm(builder: Builder, op: Operator) -> None:
    """Layer norm and RMS norm over trailing dims without height and width; layer norm also over (C, H, W)."""
    name, normalised = op.args[0].name, op.args[1]
    split, dim_count = builder.splits[name], len(builder.shape(name))
    over = set(range(dim_count - len(normalised), dim_count))
    if not over & set(split.dims):
        _per_pixel(builder, op, _split_of_map(builder, op))
    elif op.text == "aten.layer_norm.default" and over == {1, 2, 3} and split.dims == (2, 3) and dim_count == 4:
        _layer_norm_of_maps(builder, op, name)
    else:
        builder.refuse(
            op,
            f"normalises dims {sorted(over)} of a map whose height and width are dims {split.dims}",
            "normalisation of channels only",
        )


def _layer_norm_of_maps(builder: Builder, op: Operator, name: str) -> None:
    """Layer norm over (C, H, W): statistics of each image over the whole map; weight and bias are maps, too."""
    weight, bias, eps = arguments(op.args, (None, None, 1e-5), 2)[2:5]
    split = builder.splits[name]
    part = builder.part(name, split)
    # One group: mean and variance of each image over (C, H, W).
    moments = moments_over_ranks(builder, part, (2,), keepdim=False, groups=1)
    box = split.layout.parts[builder.rank]
    result_dtype = builder.values[op.first_output].dtype
    plain = normalise(
        eps, has_weight=False, has_bias=False, result_dtype=torch.promote_types(result_dtype, torch.float32)
    )

    def call(x: torch.Tensor, moments: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        # Weight and bias are replicated maps: each rank applies its part of them.
        own = [factor[:, box.y0 : box.y1, box.x0 : box.x1] for factor in affine]
        result: torch.Tensor = plain(x, moments)
        if weight is not None:
            result = result * own[0]
        return (result + own[-1] if bias is not None else result).to(result_dtype)

    affine = tuple(item.name for item in (weight, bias) if item is not None)
    builder.compute(call, (part, moments, *affine), op.outputs, split)


def linear(builder: Builder, op: Operator) -> None:
    """A linear layer over the last dim, which must be neither height nor width."""
    split, dim_count = _split_of_map(builder, op), len(builder.shape(op.args[0].name))
    if dim_count - 1 in split.dims:
        builder.refuse(op, "mixes the pixels of a row", "a linear layer over channels in the last dim, (B, H, W, C)")
    _per_pixel(builder, op, split)


def prelu(builder: Builder, op: Operator) -> None:
    """PReLU, with one slope for all values, or one for each channel in dim 1."""
    split, slopes = _split_of_map(builder, op), builder.shape(op.args[1].name)
    # PyTorch applies slopes along dim 1, whatever that dim is in the model.
    if 1 in split.dims and slopes not in ((), (1,)):
        builder.refuse(
            op, "has one slope for each row or column", "slopes for channels in dim 1, or a single slope, PReLU()"
        )
    _per_pixel(builder, op, split)


def along(dim_at: int, keepdim_at: int | None, default: int | None = -1, positions: Rule | None = None) -> Rule:
    """Return the rule of an operator that works along one dim.

    Args:
        dim_at: index of its argument ``dim``.
        keepdim_at: index of its argument ``keepdim``; None if it does not reduce.
        default: default of ``dim``; None: by default it works on the flattened tensor, which is refused.
        positions: rule along the positions of a flat map, if there is one.
    """

    def rule(builder: Builder, op: Operator) -> None:
        """An operator along one dim; along height or width, it is computed on whole rows or columns."""
        split, dims = _split_of_map(builder, op), len(builder.shape(op.args[0].name))
        dim = op.args[dim_at] if len(op.args) > dim_at else op.kwargs.get("dim", default)
        if not isinstance(dim, int):
            builder.refuse(op, "works on the flattened tensor, across all dims", "an explicit dim")
        keepdim = None if keepdim_at is None else _keepdim(op, keepdim_at)  # None: the operator does not reduce
        # A flat map (B, C, H · W) first: the rule for positions sends the few results of each part, not whole rows.
        if positions is not None and over_positions(builder, op, dim):
            positions(builder, op)
        elif dim % dims in split.dims:
            along_space(builder, op, (dim % dims,), keepdim)
        else:
            _per_pixel(builder, op, split if keepdim is None else _reduced(split, dim % dims, keepdim))

    return rule


def _keepdim(op: Operator, at: int) -> bool:
    """Return an operator's ``keepdim``, its argument ``at``."""
    return bool(op.args[at] if len(op.args) > at else op.kwargs.get("keepdim", False))


def extreme(builder: Builder, op: Operator) -> None:
    """``max`` and ``min`` along one dim, with indices."""
    name = op.args[0].name
    if over_positions(builder, op, op.args[1]):
        extreme_over_positions(builder, op)
    elif op.args[1] % len(builder.shape(name)) in builder.splits[name].dims:
        extreme_along_space(builder, op)
    else:
        along(dim_at=1, keepdim_at=2)(builder, op)


def _reduced(split: Split, dim: int, keep: bool) -> Split:
    """Return how a value is split after ``dim`` is reduced; ``keep``: the dim stays, with size 1."""
    if keep:
        return split
    # Removing a dim before height or width moves these by one.
    return replace(split, dims=(split.dims[0] - (dim < split.dims[0]), split.dims[1] - (dim < split.dims[1])))


def per_pixel(builder: Builder, op: Operator) -> None:
    """An operator that computes each pixel from the same pixel, and may append dims."""
    _per_pixel(builder, op, _split_of_map(builder, op))


def cosine_similarity(builder: Builder, op: Operator) -> None:
    """Cosine of two maps, or of a map and a vector, along a dim other than height and width."""
    first, second = (builder.shape(item.name) for item in op.args[:2])
    sizes = torch.broadcast_shapes(first, second)
    dim = (op.args[2] if len(op.args) > 2 else op.kwargs.get("dim", 1)) % len(sizes)
    names, split = operands(builder, op, sizes)
    if dim in split.dims:
        builder.refuse(
            op,
            f"is along dim {dim}, which is height or width",
            "a dim other than height and width, such as channels (1)",
        )
    emit(builder, op, names, _reduced(split, dim, keep=False))


def channelwise(dim_at: int, over_space: AlongSpace) -> Rule:
    """Return the rule of an operator that is pointwise, unless its dim is height or width.

    Args:
        dim_at: index of its argument ``dim``, 0 by default.
        over_space: lowers the operator along height or width.
    """

    def rule(builder: Builder, op: Operator) -> None:
        """An operator along one dim (cat, split, slice, softmax): pointwise, unless that dim is height or width."""
        name = next(name for name in op.inputs if name in builder.splits)
        dims, dim_count = builder.splits[name].dims, len(builder.shape(name))
        dim = (op.args[dim_at] if len(op.args) > dim_at else op.kwargs.get("dim", 0)) % dim_count
        if dim in dims:
            over_space(builder, op, dim)
        else:
            pointwise(builder, op)

    return rule


def _split_over_space(builder: Builder, op: Operator, dim: int) -> None:
    """``split`` or ``chunk`` along height, width, or the entries of the batch that are divided among ranks."""
    split = builder.splits[op.args[0].name]
    if not split.in_batch and not split.has_own_dims:
        builder.refuse(op, "splits a dim in which height and width are flattened", "a split of either height or width")
    split_of_space(builder, op, dim)


def _softmax_over_space(builder: Builder, op: Operator, dim: int) -> None:
    first, second = builder.splits[op.args[0].name].dims
    if first == second:
        softmax(builder, op)
    else:
        along_space(builder, op, (dim,), None)


_SPLIT = OperatorFacts(channelwise(2, _split_over_space), "view", keeps="nothing")
_SOFTMAX = OperatorFacts(channelwise(1, _softmax_over_space), keeps="outputs")
_AT_1, _AT_2 = (OperatorFacts(one_map(along(at, None))) for at in (1, 2))

FACTS = {
    "cat": OperatorFacts(channelwise(1, cat_of_space), keeps="nothing", cheap=True),
    **dict.fromkeys(("split.Tensor", "split_with_sizes", "chunk"), _SPLIT),
    "cumsum": OperatorFacts(channelwise(1, lambda builder, op, dim: along_space(builder, op, (dim,), None))),
    **dict.fromkeys(("softmax.int", "_softmax", "log_softmax.int", "_log_softmax"), _SOFTMAX),
    "layer_norm": OperatorFacts(one_map(channel_norm), "norm"),
    "rms_norm": OperatorFacts(one_map(channel_norm), "norm"),
    "linear": OperatorFacts(one_map(linear), "linear"),
    "prelu": OperatorFacts(one_map(prelu)),
    **dict.fromkeys(("glu", "cumprod", "cummax", "cummin", "sort", "argsort"), _AT_1),
    "sort.stable": _AT_2,
    **dict.fromkeys(("max.dim", "min.dim"), OperatorFacts(one_map(extreme))),
    **dict.fromkeys(("argmax", "argmin"), OperatorFacts(one_map(along(1, 2, None, positions=extreme_over_positions)))),
    **dict.fromkeys(("median.dim", "prod.dim_int", "any.dim", "all.dim"), OperatorFacts(one_map(along(1, 2)))),
    "topk": OperatorFacts(one_map(along(2, None, positions=topk))),
    "index_select": OperatorFacts(one_map(along(1, None, 0, positions=gather))),
    "repeat_interleave.self_int": OperatorFacts(one_map(along(2, None, None))),
    "one_hot": OperatorFacts(one_map(per_pixel)),
    "channel_shuffle": OperatorFacts(on_maps(per_pixel)),
    "cosine_similarity": OperatorFacts(cosine_similarity),
}
