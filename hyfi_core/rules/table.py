"""The table of rules: which rule lowers which operator on split maps. A new operator needs one entry.

A rule determines how the output is split and which box of the input each rank needs for its part, and emits the local
call. If it takes the layout of its output from ``builder.same_pixels`` or ``builder.computed``, the operator can be
part of a fused run, in which ranks compute margins. Other operators end a run; their inputs are owned parts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

from hyfi_core.capture.program import Operator, Ref, refs_in
from hyfi_core.rules import batch_norm as rules_batch_norm
from hyfi_core.rules import channel as rules_channel
from hyfi_core.rules import entries as rules_entries
from hyfi_core.rules import norm as rules_norm
from hyfi_core.rules import product as rules_product
from hyfi_core.rules import reduction as rules_reduction
from hyfi_core.rules import shape as rules_shape
from hyfi_core.rules import softmax as rules_softmax
from hyfi_core.rules import window as rules_window
from hyfi_core.rules.builder import Builder, Rule
from hyfi_core.rules.calls import renamed
from hyfi_core.rules.moves import interpolate as rules_interpolate
from hyfi_core.rules.moves import line_windows as rules_line_windows
from hyfi_core.rules.moves import patches as rules_patches
from hyfi_core.rules.moves import place as rules_place
from hyfi_core.rules.moves import resize as rules_resize
from hyfi_core.rules.moves import slices as rules_slices
from hyfi_core.rules.moves import strips as rules_strips
from hyfi_core.rules.pointwise import copy, pointwise
from hyfi_core.rules.random import RANDOM

_POINTWISE = """
relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh sigmoid tanh softplus exp
log sqrt rsqrt abs neg reciprocal clamp clamp_min clamp_max square pow.Tensor_Scalar sin cos erf floor log1p
expm1 add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar rsub.Scalar
rsub.Tensor maximum minimum _prelu_kernel where.self eq.Scalar eq.Tensor gt.Scalar gt.Tensor lt.Scalar
lt.Tensor ge.Scalar le.Scalar clone alias detach contiguous _to_copy to.dtype lerp.Tensor lerp.Scalar addcmul
logical_not zeros_like ones_like empty_like full_like sign sgn log_sigmoid threshold hardshrink softshrink
where.ScalarSelf where.ScalarOther where.Scalar ne.Scalar logical_and logical_or isnan trunc ceil round frac
pow.Tensor_Tensor pow.Scalar log2 log10 exp2 tan atan asin acos sinh cosh addcdiv erfc fmod.Scalar remainder.Scalar
le.Tensor ge.Tensor ne.Tensor masked_fill.Scalar fill.Scalar type_as bitwise_not __and__.Tensor __and__.Scalar
__or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor
bitwise_or.Scalar bitwise_xor.Tensor bitwise_xor.Scalar logical_xor isfinite isinf nan_to_num clamp.Tensor
clamp_min.Tensor clamp_max.Tensor masked_fill.Tensor fill.Tensor fmod.Tensor remainder.Tensor floor_divide
floor_divide.Scalar div.Tensor_mode div.Scalar_mode atan2 hypot xlogy.Tensor logaddexp fmax fmin sinc positive
"""


def channelwise(builder: Builder, op: Operator) -> None:
    """An operator along one dim (cat, split, slice, softmax): pointwise, unless that dim is height or width."""
    name = next(name for name in op.inputs if name in builder.splits)
    dims, rank = builder.splits[name].dims, len(builder.shape(name))
    operator = op.text.removeprefix("aten.").removesuffix(".default")
    at = _DIM_ARGUMENT[operator]
    dim = (op.args[at] if len(op.args) > at else op.kwargs.get("dim", 0)) % rank
    if dim not in dims:
        pointwise(builder, op)
    elif operator == "cat":
        rules_place.cat_of_space(builder, op, dim)
    elif operator in ("split.Tensor", "split_with_sizes", "chunk") and builder.splits[name].plain:
        rules_place.split_of_space(builder, op, dim)
    elif operator not in _WHOLE_ROWS:
        builder.refuse(
            op,
            f"works along dim {dim}, which is height or width",
            "a dim other than height and width, such as channels (1)",
        )
    elif "softmax" in operator and dims[0] == dims[1]:
        rules_softmax.softmax(builder, op)
    else:
        rules_strips.along_space(builder, op, (dim,), None)


_WHOLE_ROWS = ("cumsum", "softmax.int", "_softmax", "log_softmax.int", "_log_softmax")
"""Operators that are computed on whole rows or columns if they work along height or width."""
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
    """Adaptive average pooling: to one pixel, a mean over the map; to the current size, the identity."""
    size, name = tuple(op.args[1]), op.args[0].name
    if size == (1, 1):
        rules_reduction.mean_over_space(builder, name, op.outputs[0], keepdim=True)
    elif size == builder.shape(name)[-2:]:
        split = builder.splits[name]
        builder.compute(lambda tensor: tensor.clone(), (builder.part(name, split),), op.outputs, split)
    else:
        rules_resize.adaptive_avg_pool2d(builder, op)


def one_map(rule: Rule) -> Rule:
    """Return a rule that refuses maps in arguments other than the first, for rules that do not expect them."""

    @wraps(rule)
    def checked(builder: Builder, op: Operator) -> None:
        for argument in (*op.args[1:], *op.kwargs.values()):
            if any(name in builder.splits for name in refs_in(argument)):
                builder.refuse(op, "takes a map as a weight", "a map as first argument only")
        rule(builder, op)

    return checked


def on_maps(rule: Rule) -> Rule:
    """Return a rule that refuses anything but one map ``(B, C, H, W)``, as the first argument."""
    rule = one_map(rule)

    @wraps(rule)
    def checked(builder: Builder, op: Operator) -> None:
        split = builder.split_of(op.args[0])
        if split is not None and (not split.plain or split.dims != (2, 3) or len(builder.shape(op.args[0].name)) != 4):
            shape = builder.shape(op.args[0].name)
            builder.refuse(
                op,
                f"takes {shape} whose height and width are dims {split.dims}",
                "(B, C, H, W), with height and width in dims (2, 3)",
            )
        rule(builder, op)

    return checked


def on_maps_or_flat(rule: Rule) -> Rule:
    """Return the rule of ``on_maps``, also for a flat map ``(B, C, H · W)``, which is then computed as a map."""
    rule = on_maps(rule)

    @wraps(rule)
    def checked(builder: Builder, op: Operator) -> None:
        name, output = op.args[0].name, op.outputs[0]
        here = builder.split_of(op.args[0])
        if here is None or here.dims != (2, 2) or here.leads != (1, 1) or output is None:
            rule(builder, op)
            return
        opened = builder.opened(builder.part(name, here.owned))
        result = builder.fresh(output, builder.shape(opened))
        rule(builder, replace(renamed(op, {name: opened}), outputs=(result, *op.outputs[1:])))
        shape = here.owned.local_shape(builder.shape(output), builder.rank)
        part = builder.part(result, builder.splits[opened])
        builder.compute(lambda tensor: tensor.reshape(shape).clone(), (part,), (output,), here.owned)

    return checked


def sliced(builder: Builder, op: Operator) -> None:
    """``slice``: along height or width, pixels are redistributed."""
    name = op.args[0].name
    dim = (op.args[1] if len(op.args) > 1 else 0) % len(builder.shape(name))
    if dim in builder.splits[name].dims and not builder.splits[name].plain:
        builder.refuse(op, "slices a dim in which height and width are flattened", "a slice of either height or width")
    if dim in builder.splits[name].dims:
        rules_place.slice_of_space(builder, op, dim)
    else:
        channelwise(builder, op)


def _text(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


RULES: dict[str, Rule] = {_text(name): pointwise for name in _POINTWISE.split()}
RULES["hyfi.pointwise_function.default"] = pointwise  # of the user's; see capture.functions
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
            "upsample_bicubic2d.vec": rules_interpolate.upsample_bicubic,
            "_upsample_bilinear2d_aa.vec": rules_interpolate.upsample_bilinear_antialiased,
            "_upsample_bicubic2d_aa.vec": rules_interpolate.upsample_bicubic_antialiased,
            "im2col": rules_patches.unfold,
            "pixel_shuffle": rules_place.pixel_shuffle,
            "pixel_unshuffle": rules_place.pixel_unshuffle,
            "channel_shuffle": rules_channel.per_pixel,
        }.items()
    }
)
RULES.update(
    {
        _text(name): on_maps_or_flat(rule)
        for name, rule in {
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
            "conv1d": rules_line_windows.conv1d,
            "conv1d.padding": rules_line_windows.conv1d,
            "max_pool1d": rules_line_windows.max_pool1d,
            "avg_pool1d": rules_line_windows.avg_pool1d,
            "adaptive_avg_pool1d": rules_line_windows.adaptive_pool1d,
            "adaptive_max_pool1d": rules_line_windows.adaptive_pool1d,
            "slice.Tensor": sliced,
            "roll": rules_slices.roll,
            "col2im": rules_patches.fold,
            "unfold": rules_patches.unfold_along,
            "flip": rules_slices.flip,
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
            "max.dim": rules_channel.extreme,
            "min.dim": rules_channel.extreme,
            "argmax": rules_channel.along(1, 2, None),
            "argmin": rules_channel.along(1, 2, None),
            "median.dim": rules_channel.along(1, 2),
            "prod.dim_int": rules_channel.along(1, 2),
            "any.dim": rules_channel.along(1, 2),
            "all.dim": rules_channel.along(1, 2),
            "sort": rules_channel.along(1, None),
            "sort.stable": rules_channel.along(2, None),
            "argsort": rules_channel.along(1, None),
            "topk": rules_channel.along(2, None),
            "cumprod": rules_channel.along(1, None),
            "cummax": rules_channel.along(1, None),
            "cummin": rules_channel.along(1, None),
            "index_select": rules_channel.along(1, None, 0),
            "repeat_interleave.self_int": rules_channel.along(2, None, None),
            "one_hot": rules_channel.per_pixel,
            "avg_pool3d": rules_channel.response_norm,
            "index.Tensor": rules_entries.index,
            "repeat": rules_entries.repeat,
            "tile": rules_entries.repeat,
            "diagonal": rules_entries.diagonal,
            "mean": rules_reduction.mean,
            "mean.dim": rules_reduction.mean,
            "sum": rules_reduction.total,
            "sum.dim_IntList": rules_reduction.total,
            "amax": rules_reduction.maximum,
            "amin": rules_reduction.maximum,
            "max": rules_reduction.maximum,
            "min": rules_reduction.maximum,
            "any": rules_reduction.truth,
            "any.dims": rules_reduction.truth,
            "all": rules_reduction.truth,
            "all.dims": rules_reduction.truth,
            "linalg_vector_norm": rules_reduction.vector_norm,
            "var.dim": rules_reduction.variance,
            "var.correction": rules_reduction.variance,
            "std.dim": rules_reduction.variance,
            "std.correction": rules_reduction.variance,
            "var_mean.dim": rules_reduction.variance,
            "var_mean.correction": rules_reduction.variance,
            "std_mean.dim": rules_reduction.variance,
            "std_mean.correction": rules_reduction.variance,
            **{f"new_{kind}": rules_shape.new_like for kind in ("zeros", "ones", "empty", "full")},
        }.items()
    }
)
RULES.update(RANDOM)
RULES.update(
    {
        _text(name): rules_entries.by_map
        for name in (
            *("gather", "scatter.src", "scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_add"),
            "scatter_reduce.two",
        )
    }
)
RULES.update(
    {
        _text(name): rule
        for name, rule in {
            "copy": copy,
            "index_put": rules_entries.index_put,
            "slice_scatter": rules_entries.slice_scatter,
            "cosine_similarity": rules_channel.cosine_similarity,
        }.items()
    }
)
RULES.update({_text(name): rules_product.matmul for name in ("matmul", "bmm", "mm")})
RULES.update({_text("einsum"): rules_product.einsum, _text("scaled_dot_product_attention"): rules_softmax.attention})

__all__ = ["RULES", "Ref", "pointwise"]
