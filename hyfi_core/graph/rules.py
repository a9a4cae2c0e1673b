"""Rules: what each operator does to a map that is split over ranks. A new operator is one entry more.

A rule says how the output is laid out, which box of the input each rank needs for its part of it, and what to call
locally.
Rules for windows and for statistics stand in files of their own; all are collected in ``RULES``.
"""

from __future__ import annotations

from typing import Any

from hyfi_core.graph import rules_norm, rules_window
from hyfi_core.graph.instructions import Split
from hyfi_core.graph.lowering import Lowering, Rule, bound, renamed
from hyfi_core.graph.program import Operator, Ref

_POINTWISE = """
relu relu6 leaky_relu elu selu celu gelu silu mish hardswish hardsigmoid hardtanh sigmoid tanh softplus exp
log sqrt rsqrt abs neg reciprocal clamp clamp_min clamp_max square pow.Tensor_Scalar sin cos erf floor log1p
expm1 add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar rsub.Scalar
rsub.Tensor maximum minimum prelu _prelu_kernel where.self eq.Scalar eq.Tensor gt.Scalar gt.Tensor lt.Scalar
lt.Tensor ge.Scalar le.Scalar clone alias detach contiguous _to_copy to.dtype lerp.Tensor lerp.Scalar addcmul
logical_not zeros_like ones_like
"""


def pointwise(lowering: Lowering, op: Operator) -> None:
    """Each output pixel comes from the input pixels at the same place; replicated operands broadcast over space."""
    names = {}
    anchor = next(split for name in op.inputs if (split := lowering.splits.get(name)) is not None)
    for name in dict.fromkeys(op.inputs):
        split = lowering.splits.get(name)
        if split is not None:
            if split.dims != anchor.dims or split.layout.map != anchor.layout.map:
                lowering.refuse(
                    op, f"mixes maps of sizes {split.layout.map.shape} and {anchor.layout.map.shape}", "equal sizes"
                )
            names[name] = lowering.part(name, anchor)
        elif _reaches_space(lowering.shape(name), lowering.shape(_first_output(op)), anchor):
            names[name] = _cut_out(lowering, name, anchor, len(lowering.shape(_first_output(op))))
    function, inputs = bound(renamed(op, names))
    lowering.compute(function, inputs, op.outputs, anchor)


def _first_output(op: Operator) -> str:
    return next(output for output in op.outputs if output is not None)


def _reaches_space(shape: tuple[int, ...], full: tuple[int, ...], split: Split) -> bool:
    """Whether a replicated operand has more than one pixel, so that each rank needs its cut-out of it."""
    missing = len(full) - len(shape)
    return any(dim >= missing and shape[dim - missing] > 1 for dim in split.dims)


def _cut_out(lowering: Lowering, name: str, split: Split, rank_dims: int) -> str:
    """Return this rank's cut-out of a replicated map (a positional table, say)."""
    box = split.layout.parts[lowering.rank]
    missing = rank_dims - len(lowering.shape(name))

    def cut(tensor: Any) -> Any:
        for dim, start, length in ((split.dims[0], box.y0, box.height), (split.dims[1], box.x0, box.width)):
            if dim >= missing and tensor.shape[dim - missing] > 1:
                tensor = tensor.narrow(dim - missing, start, length)
        return tensor

    result = lowering.fresh(name)
    lowering.compute(cut, (name,), (result,))
    return result


def channelwise(lowering: Lowering, op: Operator) -> None:
    """Works along a dim that is not space (cat, split, slice, softmax over channels): like a pointwise operator."""
    dims = next(split.dims for name in op.inputs if (split := lowering.splits.get(name)) is not None)
    rank = len(lowering.shape(next(name for name in op.inputs if name in lowering.splits)))
    at = _DIM_ARGUMENT[op.text.removeprefix("aten.").removesuffix(".default")]
    dim = op.args[at] if len(op.args) > at else op.kwargs.get("dim", 0)
    if dim % rank in dims:
        lowering.refuse(op, f"works along dim {dim}, which is space", "a dim that is not space, such as channels (1)")
    pointwise(lowering, op)


# Operators along one dim, and which argument names it.
_DIM_ARGUMENT = {
    "cat": 1,
    "split.Tensor": 2,
    "split_with_sizes": 2,
    "chunk": 2,
    "slice.Tensor": 1,
    "softmax.int": 1,
    "_softmax": 1,
    "log_softmax.int": 1,
    "_log_softmax": 1,
}


def identity_pool(lowering: Lowering, op: Operator) -> None:
    """Adaptive pooling to one pixel is a mean over space; to the size that is there it does nothing."""
    size = op.args[1]
    name = op.args[0].name
    if tuple(size) == (1, 1):
        rules_norm.mean_over_space(lowering, name, op.outputs[0], keepdim=True)
    elif tuple(size) == lowering.shape(name)[-2:]:
        split = lowering.splits[name]
        lowering.compute(lambda tensor: tensor.clone(), (lowering.part(name, split),), op.outputs, split)
    else:
        lowering.refuse(op, f"pools to {tuple(size)}", "pooling to 1 x 1, or a pool with kernel and stride")


def dropout(lowering: Lowering, op: Operator) -> None:
    """Dropout that drops nothing passes; one that does is refused, since ranks would draw differently."""
    probability, train = op.args[1], op.args[2]
    if train and probability != 0.0:
        lowering.refuse(op, f"drops with p={probability} in training mode", "p=0, or evaluation mode")
    split = lowering.split_of(op.args[0])
    assert split is not None
    lowering.compute(lambda tensor: tensor.clone(), (lowering.part(op.args[0].name, split),), op.outputs[:1], split)


def _text(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


RULES: dict[str, Rule] = {_text(name): pointwise for name in _POINTWISE.split()}
RULES.update({_text(name): channelwise for name in _DIM_ARGUMENT})
RULES.update(
    {
        "aten.conv2d.default": rules_window.conv2d,
        "aten.conv2d.padding": rules_window.conv2d,
        "aten.max_pool2d.default": rules_window.max_pool2d,
        "aten.avg_pool2d.default": rules_window.avg_pool2d,
        "aten.adaptive_avg_pool2d.default": identity_pool,
        "aten.native_dropout.default": dropout,
        "aten.mean.dim": rules_norm.mean,
        "aten.sum.dim_IntList": rules_norm.total,
        "aten.amax.default": rules_norm.maximum,
        "aten.batch_norm.default": rules_norm.batch_norm,
        "aten._native_batch_norm_legit_functional.default": rules_norm.batch_norm_training,
        "aten._native_batch_norm_legit_no_training.default": rules_norm.batch_norm_evaluation,
        "aten.group_norm.default": rules_norm.group_norm,
        "aten.instance_norm.default": rules_norm.instance_norm,
    }
)

__all__ = ["RULES", "Ref", "pointwise"]
