"""Rules for operators that work on each pixel's channels: norms over channels, linear layers, slopes, reductions.

Spatial dims may be anywhere: (B, C, H, W), or (B, H, W, C) as in ConvNeXt.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.rules.builder import Builder, Rule
from hyfi_core.rules.calls import bound, renamed
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.moves.strips import along_space, first_extreme
from hyfi_core.rules.norm import normalise
from hyfi_core.rules.pointwise import operands
from hyfi_core.rules.reduction import moments_over_ranks


def _here(builder: Builder, op: Operator) -> Split:
    return builder.seen(op, op.args[0].name)


def _per_pixel(builder: Builder, op: Operator, split: Split) -> None:
    """Emit the operator on this rank's part, pixel by pixel."""
    name = op.args[0].name
    function, inputs = bound(renamed(op, {name: builder.part(name, _here(builder, op))}))
    builder.compute(function, inputs, op.outputs, split)


def channel_norm(builder: Builder, op: Operator) -> None:
    """Layer norm and RMS norm: over trailing dims that are not space; layer norm also over channels and space."""
    name, normalised = op.args[0].name, op.args[1]
    here, rank = builder.splits[name], len(builder.shape(name))
    over = set(range(rank - len(normalised), rank))
    if not over & set(here.dims):
        _per_pixel(builder, op, _here(builder, op))
    elif op.text == "aten.layer_norm.default" and over == {1, 2, 3} and here.dims == (2, 3) and rank == 4:
        _layer_norm_of_maps(builder, op, name)
    else:
        builder.refuse(
            op,
            f"normalises dims {sorted(over)} of a map whose height and width are dims {here.dims}",
            "normalisation of channels only",
        )


def _layer_norm_of_maps(builder: Builder, op: Operator, name: str) -> None:
    """Layer norm over (C, H, W): statistics of each image over the whole map, and an affine with a value per pixel."""
    weight, bias = (item.name if item is not None else None for item in (*op.args[2:4], None, None)[:2])
    eps = op.args[4] if len(op.args) > 4 else 1e-5
    split = builder.splits[name]
    part = builder.part(name, split)
    moments = moments_over_ranks(builder, part, (2,), False, 1)
    box = split.layout.parts[builder.rank]
    plain = normalise(eps, False, False)

    def call(x: torch.Tensor, moments: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        own = [table[:, box.y0 : box.y1, box.x0 : box.x1] for table in affine]
        result = plain(x, moments)
        if weight is not None:
            result = result * own[0]
        return result + own[-1] if bias is not None else result  # type: ignore[no-any-return]

    inputs = tuple(item for item in (part, moments, weight, bias) if item is not None)
    builder.compute(call, inputs, op.outputs, split)


def linear(builder: Builder, op: Operator) -> None:
    """A linear layer over the last dim, which must be channels."""
    here, rank = _here(builder, op), len(builder.shape(op.args[0].name))
    if rank - 1 in here.dims:
        builder.refuse(op, "mixes the pixels of a row", "a linear layer over channels in the last dim, (B, H, W, C)")
    _per_pixel(builder, op, here)


def prelu(builder: Builder, op: Operator) -> None:
    """PReLU: its slopes are one for each channel of dim 1, or one for all; they are no map, however many they are."""
    here, slopes = _here(builder, op), builder.shape(op.args[1].name)
    if 1 in here.dims and slopes not in ((), (1,)):
        builder.refuse(
            op, "has one slope for each row or column", "slopes for channels in dim 1, or a single slope, PReLU()"
        )
    _per_pixel(builder, op, here)


def along(at: int, keepdim_at: int | None, default: int | None = -1) -> Rule:
    """Return the rule of an operator that works along one dim.

    Args:
        at: which argument names the dim.
        keepdim_at: which says whether a reduced dim stays with size 1; None where the operator does not reduce.
        default: the dim where none is given; None: all of them as if they were one, which is refused.
    """

    def rule(builder: Builder, op: Operator) -> None:
        here, rank = _here(builder, op), len(builder.shape(op.args[0].name))
        dim = op.args[at] if len(op.args) > at else op.kwargs.get("dim", default)
        if not isinstance(dim, int):
            builder.refuse(op, "works on the flattened tensor, across all dims", "an explicit dim")
        reduced = None if keepdim_at is None else _keeps(op, keepdim_at)
        if dim % rank in here.dims:
            along_space(builder, op, (dim % rank,), reduced)
        else:
            _per_pixel(builder, op, here if reduced is None else _reduced(here, dim % rank, reduced))

    return rule


def _keeps(op: Operator, at: int) -> bool:
    return bool(op.args[at] if len(op.args) > at else op.kwargs.get("keepdim", False))


def extreme(builder: Builder, op: Operator) -> None:
    """``max`` and ``min`` along one dim, with indices."""
    name = op.args[0].name
    if op.args[1] % len(builder.shape(name)) in builder.splits[name].dims:
        first_extreme(builder, op)
    else:
        along(1, 2)(builder, op)


def _reduced(here: Split, dim: int, keep: bool) -> Split:
    if keep:
        return here
    return replace(here, dims=(here.dims[0] - (dim < here.dims[0]), here.dims[1] - (dim < here.dims[1])))


def per_pixel(builder: Builder, op: Operator) -> None:
    """An operator that leaves every pixel where it is, and may add dims behind."""
    _per_pixel(builder, op, _here(builder, op))


def response_norm(builder: Builder, op: Operator) -> None:
    """``avg_pool3d`` over normalisation of channels only, as local response norm has it: (B, 1, C, H, W)."""
    here = _here(builder, op)
    settings = [list(given) for given in op.args[1:4]]
    alone = all(given[1:] == [1, 1] for given in settings[:2] if given) and not any(
        settings[2][1:] if len(settings) > 2 else ()
    )
    if here.dims != (3, 4) or not alone:
        builder.refuse(
            op,
            f"pools with kernel {settings[0]} over a map whose height and width are dims {here.dims}",
            "nn.LocalResponseNorm on (B, C, H, W)",
        )
    _per_pixel(builder, op, here)


def cosine_similarity(builder: Builder, op: Operator) -> None:
    """Cosine of two maps, or of a map and a vector, along a dim that is not space."""
    first, second = (builder.shape(item.name) for item in op.args[:2])
    sizes = torch.broadcast_shapes(first, second)
    dim = (op.args[2] if len(op.args) > 2 else op.kwargs.get("dim", 1)) % len(sizes)
    names, here = operands(builder, op, sizes)
    if dim in here.dims:
        builder.refuse(
            op,
            f"is along dim {dim}, which is height or width",
            "a dim other than height and width, such as channels (1)",
        )
    function, inputs = bound(renamed(op, names))
    builder.compute(function, inputs, op.outputs, _reduced(here, dim, keep=False))
