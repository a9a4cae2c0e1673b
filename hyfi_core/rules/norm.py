"""Rules for group and instance norm: statistics of each image and group over the whole map."""

from __future__ import annotations

from typing import Any

import torch

from hyfi_core.capture.program import Operator
from hyfi_core.ops.reduce import SumOverRanks
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.reduction import accumulator


def group_norm(builder: Builder, op: Operator) -> None:
    """Group norm: statistics of each image and group over the whole map."""
    x, groups, weight, bias, eps = (*op.args, None, None, 1e-5)[:5] if len(op.args) < 5 else op.args[:5]
    _grouped(builder, op, x.name, groups, weight, bias, eps)


def instance_norm(builder: Builder, op: Operator) -> None:
    """Instance norm is group norm with one channel a group."""
    x, weight, bias, running_mean, _, use_input_stats = op.args[:6]
    if running_mean is not None or not use_input_stats:
        builder.refuse(op, "keeps running statistics", "track_running_stats=False, or nn.GroupNorm")
    _grouped(builder, op, x.name, builder.shape(x.name)[1], weight, bias, op.args[7])


def _grouped(builder: Builder, op: Operator, name: str, groups: int, weight: Any, bias: Any, eps: float) -> None:
    batch, channels, height, width = builder.shape(name)
    count = channels // groups * height * width
    split = builder.seen(op, name)
    part = builder.part(name, split)
    partial, summed = (builder.fresh(name, (2, batch, groups), torch.float64) for _ in range(2))
    # In a fused run, too, every pixel counts once; autograd then adds up what all computed copies owe to the sums.
    builder.compute(group_sums(batch, groups), (builder.part(part, split.owned),), (partial,))
    builder.communicate(SumOverRanks(), (partial,), (summed,), "reduce")
    affine = tuple(item.name for item in (weight, bias) if item is not None)
    builder.compute(
        normalise(count, eps, weight is not None, bias is not None), (part, summed, *affine), op.outputs, split
    )


def group_sums(batch: int, groups: int) -> Any:
    """Return this part's Σx and Σx² for every image and group, through its own mean so that nothing cancels."""

    def call(x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return x.new_zeros((2, batch, groups), dtype=torch.float64)
        grouped = x.reshape(batch, groups, -1)
        grouped = grouped.to(accumulator(x))
        variance, mean = torch.var_mean(grouped, dim=2, correction=0)
        variance, mean = variance.double(), mean.double()
        return torch.stack([mean, variance + mean * mean]) * grouped.shape[2]

    return call


def normalise(count: int, eps: float, has_weight: bool, has_bias: bool) -> Any:
    """Return what normalises a part by Σx and Σx² of every image and group."""

    def call(x: torch.Tensor, sums: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        batch, channels = x.shape[:2]
        mean = sums[0] / count
        inverse = (sums[1] / count - mean * mean).clamp(min=0.0).add(eps).rsqrt()
        spread = channels // mean.shape[1]
        mean, scale = mean.repeat_interleave(spread, 1), inverse.repeat_interleave(spread, 1)
        if has_weight:
            scale = scale * affine[0]
        kind = accumulator(x)
        shape = (batch, channels, 1, 1)
        result = (x - mean.to(kind).view(shape)) * scale.to(kind).view(shape)
        if has_bias:
            result = result + affine[-1].view(1, channels, 1, 1)
        return result.to(x.dtype)

    return call
