"""Rules for group and instance norm: statistics of each image and group over the whole map."""

from __future__ import annotations

from typing import Any

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.rules.accepted_maps import on_maps_or_flat, on_tiles, one_map
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import arguments, emit_on_part
from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.reduction import accumulator, moments_over_ranks


def group_norm(builder: Builder, op: Operator) -> None:
    """Group norm: statistics of each image and group over the whole map."""
    x, groups, weight, bias, eps = arguments(op.args, (None, None, 1e-5), 2)[:5]
    _grouped(builder, op, x.name, groups, weight, bias, eps)


def instance_norm(builder: Builder, op: Operator) -> None:
    """Instance norm: group norm with one channel per group."""
    x, weight, bias, running_mean, _, use_input_stats = op.args[:6]
    if running_mean is not None or not use_input_stats:
        # Modules and ``F.instance_norm`` do not reach this: capture traces them as arithmetic (``guards``).
        builder.refuse(op, "keeps running statistics", "nn.InstanceNorm2d(track_running_stats=True), or nn.GroupNorm")
    _grouped(builder, op, x.name, builder.shape(x.name)[1], weight, bias, op.args[7])


def _instance_norm_of_tiles(builder: Builder, op: Operator) -> None:
    """Instance norm of tiles, each by its own statistics; running statistics, which are over all tiles, are refused."""
    if op.args[3] is not None or not op.args[5]:
        builder.refuse(op, "keeps running statistics", "nn.InstanceNorm2d without them, or nn.GroupNorm")
    on_tiles(builder, op)


def _grouped(builder: Builder, op: Operator, name: str, groups: int, weight: Any, bias: Any, eps: float) -> None:
    """Emit a norm over groups of channels and the whole map; instance norm has a group for each channel."""
    split = builder.same_pixels(op, name)
    part = builder.part(name, split)
    # In a fused run, too, every pixel counts once; autograd adds the gradients of all computed copies.
    moments = moments_over_ranks(builder, part, (2,), keepdim=False, groups=groups)  # dim 2 of (B, groups, rest)
    affine = tuple(item.name for item in (weight, bias) if item is not None)
    call = normalise(eps, weight is not None, bias is not None, builder.values[op.first_output].dtype)
    builder.compute(call, (part, moments, *affine), op.outputs, split)


def normalise(eps: float, has_weight: bool, has_bias: bool, result_dtype: torch.dtype) -> Any:
    """Return a function that normalises a part by mean and variance of each image and group.

    The function takes the part, (mean, variance) stacked and, if they exist, weight and bias.
    """

    def call(x: torch.Tensor, moments: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        """Return ``x`` ``(B, C, h, w)`` normalised by ``moments`` ``(2, B, groups)``."""
        batch, channels = x.shape[:2]
        # In float64, as they arrive: eps and root before anything is rounded.
        mean, inverse = moments[0], moments[1].add(eps).rsqrt()
        per_group = channels // mean.shape[1]
        mean, scale = mean.repeat_interleave(per_group, 1), inverse.repeat_interleave(per_group, 1)
        if has_weight:
            scale = scale * affine[0]
        dtype = accumulator(x)
        shape = (batch, channels, 1, 1)
        # The mean is subtracted first: x · scale - mean · scale would cancel if the mean is far from zero.
        result = (x - mean.to(dtype).view(shape)) * scale.to(dtype).view(shape)
        if has_bias:
            result = result + affine[-1].view(1, channels, 1, 1)
        return result.to(result_dtype)  # autocast returns float32 on GPUs

    return call


def response_norm(builder: Builder, op: Operator) -> None:
    """``avg_pool3d`` of (B, 1, C, H, W) over channels only, as in local response normalisation."""
    split = builder.same_pixels(op, op.args[0].name)
    kernel, stride, padding = (list(setting) for setting in arguments(op.args[:4], ([], [0, 0, 0]), 2)[1:])
    # An empty stride is that of the kernel.
    channels_only = kernel[1:] == [1, 1] and (not stride or stride[1:] == [1, 1]) and not any(padding[1:])
    of_tiles = split.in_batch and len(builder.shape(op.args[0].name)) == 5
    if not of_tiles and (split.dims != (3, 4) or not channels_only):
        builder.refuse(
            op,
            f"pools with kernel {kernel} over a map whose height and width are dims {split.dims}",
            "nn.LocalResponseNorm on (B, C, H, W)",
        )
    emit_on_part(builder, op, split, split)


FACTS = {
    "group_norm": OperatorFacts(on_maps_or_flat(group_norm), "norm"),
    "instance_norm": OperatorFacts(on_maps_or_flat(instance_norm, _instance_norm_of_tiles), "norm"),
    "avg_pool3d": OperatorFacts(one_map(response_norm), "pool"),
    **dict.fromkeys(("native_group_norm", "native_layer_norm"), OperatorFacts(None, "norm")),
}
