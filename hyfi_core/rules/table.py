"""Rules: what each operator does to a map that is split over ranks. A new operator is one entry more.

A rule says how the output is laid out, which box of the input each rank needs for its part of it, and what to call
locally.
Rules for windows and for statistics stand in files of their own; all are collected in ``RULES``.
A rule that lays its output out by ``builder.seen`` (the same pixels) or ``builder.computed`` may stand inside a fused
run, where ranks compute more than they own; before any other the run ends, and it is given what ranks own.
"""

from __future__ import annotations

from dataclasses import replace

from hyfi_core.capture.program import Operator, Ref, refs_in
from hyfi_core.rules import batch_norm as rules_batch_norm
from hyfi_core.rules import channel as rules_channel
from hyfi_core.rules import norm as rules_norm
from hyfi_core.rules import place as rules_place
from hyfi_core.rules import product as rules_product
from hyfi_core.rules import reduction as rules_reduction
from hyfi_core.rules import resize as rules_resize
from hyfi_core.rules import shape as rules_shape
from hyfi_core.rules import softmax as rules_softmax
from hyfi_core.rules import window as rules_window
from hyfi_core.rules.builder import Builder, Rule
from hyfi_core.rules.calls import bound, renamed
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.random import RANDOM
from hyfi_core.rules.replicated import cut_of_whole

_POINTWISE = """
relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh sigmoid tanh softplus exp
log sqrt rsqrt abs neg reciprocal clamp clamp_min clamp_max square pow.Tensor_Scalar sin cos erf floor log1p
expm1 add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar rsub.Scalar
rsub.Tensor maximum minimum _prelu_kernel where.self eq.Scalar eq.Tensor gt.Scalar gt.Tensor lt.Scalar
lt.Tensor ge.Scalar le.Scalar clone alias detach contiguous _to_copy to.dtype lerp.Tensor lerp.Scalar addcmul
logical_not zeros_like ones_like empty_like full_like sign sgn log_sigmoid threshold hardshrink softshrink
where.ScalarSelf where.ScalarOther where.Scalar ne.Scalar logical_and logical_or isnan trunc ceil round frac
pow.Tensor_Tensor pow.Scalar log2 log10 exp2 tan atan asin acos sinh cosh addcdiv erfc fmod.Scalar remainder.Scalar
le.Tensor ge.Tensor ne.Tensor masked_fill.Scalar fill.Scalar type_as bitwise_not
"""


def pointwise(builder: Builder, op: Operator) -> None:
    """Each output pixel comes from the input pixels at the same place; replicated operands broadcast over space."""
    names = {}
    full = len(builder.shape(op.first_output))
    maps = {name: _from_right(builder, name, full) for name in dict.fromkeys(op.inputs) if name in builder.splits}
    anchor = builder.computed(op, next(iter(maps.values())))
    for name in dict.fromkeys(op.inputs):
        if name in maps:
            split = maps[name]
            if split.dims != anchor.dims or split.layout.map != anchor.layout.map:
                builder.refuse(
                    op,
                    f"mixes a map of {split.layout.map.shape} in dims {split.dims} with one of "
                    f"{anchor.layout.map.shape} in dims {anchor.dims}",
                    "equal sizes in equal dims",
                )
            names[name] = builder.part(name, replace(anchor, dims=builder.splits[name].dims))
        elif _reaches_space(builder.shape(name), builder.shape(op.first_output), anchor):
            names[name] = _cut_out(builder, name, anchor, len(builder.shape(op.first_output)))
    function, inputs = bound(renamed(op, names))
    builder.compute(function, inputs, op.outputs, anchor, op)


def _from_right(builder: Builder, name: str, rank: int) -> Split:
    """Return how a map is split, its dims counted as broadcasting to ``rank`` dims counts them."""
    split = builder.splits[name]
    more = rank - len(builder.shape(name))
    return Split(split.layout, (split.dims[0] + more, split.dims[1] + more))


def _reaches_space(shape: tuple[int, ...], full: tuple[int, ...], split: Split) -> bool:
    """Whether a replicated operand has more than one pixel, so that each rank needs its cut-out of it."""
    missing = len(full) - len(shape)
    return any(dim >= missing and shape[dim - missing] > 1 for dim in split.dims)


def _cut_out(builder: Builder, name: str, split: Split, rank_dims: int) -> str:
    """Return this rank's cut-out of a replicated map (a positional table, say)."""
    missing = rank_dims - len(builder.shape(name))
    dims = (split.dims[0] - missing, split.dims[1] - missing)
    result = builder.fresh(name)
    builder.compute(cut_of_whole(replace(split, dims=dims), builder.rank, builder.shape(name)), (name,), (result,))
    return result


def channelwise(builder: Builder, op: Operator) -> None:
    """Works along a dim that is not space (cat, split, slice, softmax over channels): like a pointwise operator."""
    dims = next(split.dims for name in op.inputs if (split := builder.splits.get(name)) is not None)
    rank = len(builder.shape(next(name for name in op.inputs if name in builder.splits)))
    at = _DIM_ARGUMENT[op.text.removeprefix("aten.").removesuffix(".default")]
    dim = op.args[at] if len(op.args) > at else op.kwargs.get("dim", 0)
    if dim % rank in dims:
        if "softmax" in op.text:
            rules_softmax.softmax(builder, op)
            return
        builder.refuse(op, f"works along dim {dim}, which is space", "a dim that is not space, such as channels (1)")
    pointwise(builder, op)


# Operators along one dim, and which argument names it.
_DIM_ARGUMENT = {
    "cat": 1,
    "split.Tensor": 2,
    "split_with_sizes": 2,
    "chunk": 2,
    "slice.Tensor": 1,
    "cumsum": 1,
    "softmax.int": 1,
    "_softmax": 1,
    "log_softmax.int": 1,
    "_log_softmax": 1,
}


def adaptive_avg_pool(builder: Builder, op: Operator) -> None:
    """Adaptive pooling to one pixel is a mean over space; to the size that is there it does nothing."""
    size, name = tuple(op.args[1]), op.args[0].name
    if size == (1, 1):
        rules_reduction.mean_over_space(builder, name, op.outputs[0], keepdim=True)
    elif size == builder.shape(name)[-2:]:
        split = builder.splits[name]
        builder.compute(lambda tensor: tensor.clone(), (builder.part(name, split),), op.outputs, split)
    else:
        rules_resize.adaptive_avg_pool2d(builder, op)


def one_map(rule: Rule) -> Rule:
    """Return the rule for a map as first argument and none as any other: a rule looks at the first alone."""

    def checked(builder: Builder, op: Operator) -> None:
        for argument in (*op.args[1:], *op.kwargs.values()):
            if any(name in builder.splits for name in refs_in(argument)):
                builder.refuse(op, "takes a map where a weight belongs", "a map as its first argument alone")
        rule(builder, op)

    return checked


def on_maps(rule: Rule) -> Rule:
    """Return the rule for one map, laid out as ``(B, C, H, W)`` and no other way."""
    rule = one_map(rule)

    def checked(builder: Builder, op: Operator) -> None:
        split = builder.split_of(op.args[0])
        if split is not None and (split.dims != (2, 3) or len(builder.shape(op.args[0].name)) != 4):
            shape = builder.shape(op.args[0].name)
            builder.refuse(op, f"takes {shape} with space in dims {split.dims}", "(B, C, H, W), space in dims (2, 3)")
        rule(builder, op)

    return checked


def sliced(builder: Builder, op: Operator) -> None:
    """A slice along space moves pixels; along another dim it does not."""
    name = op.args[0].name
    dim = (op.args[1] if len(op.args) > 1 else 0) % len(builder.shape(name))
    if dim in builder.splits[name].dims and builder.splits[name].flat:
        builder.refuse(op, "takes a slice of pixels in one dim", "a slice of height or of width")
    if dim in builder.splits[name].dims:
        rules_place.slice_of_space(builder, op, dim)
    else:
        channelwise(builder, op)


def _text(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


RULES: dict[str, Rule] = {_text(name): pointwise for name in _POINTWISE.split()}
RULES.update({_text(name): channelwise for name in _DIM_ARGUMENT})
RULES.update(
    {
        _text(name): on_maps(rule)
        for name, rule in {
            "conv2d": rules_window.conv2d,
            "conv2d.padding": rules_window.conv2d,
            "conv_transpose2d.input": rules_resize.conv_transpose2d,
            "max_pool2d": rules_window.max_pool2d,
            "avg_pool2d": rules_window.avg_pool2d,
            "adaptive_avg_pool2d": adaptive_avg_pool,
            "adaptive_max_pool2d": rules_resize.adaptive_max_pool2d,
            "upsample_nearest2d.vec": rules_place.upsample_nearest,
            "_upsample_nearest_exact2d.vec": rules_place.upsample_nearest,
            "upsample_bilinear2d.vec": rules_resize.upsample_bilinear,
            "pixel_shuffle": rules_place.pixel_shuffle,
            "pixel_unshuffle": rules_place.pixel_unshuffle,
            "batch_norm": rules_batch_norm.batch_norm,
            "_native_batch_norm_legit_functional": rules_batch_norm.batch_norm_training,
            "_native_batch_norm_legit.no_stats": rules_batch_norm.batch_norm_without_statistics,
            "_native_batch_norm_legit_no_training": rules_batch_norm.batch_norm_evaluation,
            "group_norm": rules_norm.group_norm,
            "instance_norm": rules_norm.instance_norm,
        }.items()
    }
)
RULES.update(
    {
        _text(name): one_map(rule)
        for name, rule in {
            "slice.Tensor": sliced,
            "pad": rules_place.pad,
            "constant_pad_nd": rules_place.pad,
            "view": rules_shape.view,
            "_unsafe_view": rules_shape.view,
            "reshape": rules_shape.view,
            "permute": rules_shape.permute,
            "transpose.int": rules_shape.permute,
            "unsqueeze": rules_shape.unsqueeze,
            "squeeze": rules_shape.squeeze,
            "squeeze.dim": rules_shape.squeeze,
            "squeeze.dims": rules_shape.squeeze,
            "select.int": rules_shape.select,
            "unbind.int": rules_shape.select,
            "stack": rules_shape.stack,
            "expand": rules_shape.expand,
            "layer_norm": rules_channel.channel_norm,
            "rms_norm": rules_channel.channel_norm,
            "linear": rules_channel.linear,
            "logsumexp": rules_softmax.logsumexp,
            "prelu": rules_channel.prelu,
            "glu": rules_channel.along(1, None),
            "max.dim": rules_channel.along(1, 2),
            "min.dim": rules_channel.along(1, 2),
            "argmax": rules_channel.along(1, 2),
            "mean": rules_reduction.mean,
            "mean.dim": rules_reduction.mean,
            "sum": rules_reduction.total,
            "sum.dim_IntList": rules_reduction.total,
            "amax": rules_reduction.maximum,
            "linalg_vector_norm": rules_reduction.vector_norm,
            "var.dim": rules_reduction.variance,
            "var.correction": rules_reduction.variance,
            "std.dim": rules_reduction.variance,
            "std.correction": rules_reduction.variance,
            **{f"new_{kind}": rules_shape.new_like for kind in ("zeros", "ones", "empty", "full")},
        }.items()
    }
)
RULES.update(RANDOM)
RULES.update({_text(name): rules_product.matmul for name in ("matmul", "bmm", "mm")})
RULES.update({_text("einsum"): rules_product.einsum, _text("scaled_dot_product_attention"): rules_softmax.attention})

__all__ = ["RULES", "Ref", "pointwise"]
