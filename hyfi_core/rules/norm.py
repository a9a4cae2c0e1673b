"""Rules for statistics and reductions over space: partial sums on every rank, one small all-reduce, a local finish."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyfi_core.capture.program import Operator, ValueInfo
from hyfi_core.lowering.lower import Lowering, bound, renamed
from hyfi_core.ops.fused_norm import FusedBatchNorm
from hyfi_core.ops.reduce import BatchNorm, MaxOverSpace, SumOverRanks
from hyfi_core.plan.box import Box
from hyfi_core.rules.features import batch_norm_alone, cumulative_count, native_batch_norm
from hyfi_core.rules.instructions import Split


def _accumulator(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _over_space(lowering: Lowering, op: Operator) -> tuple[str, tuple[int, ...], bool]:
    """Return (input, dims, keepdim) of a reduction that takes at least both dims of space.

    Raises:
        RequestError: it leaves one of them.
    """
    name = op.args[0].name
    rank = len(lowering.shape(name))
    given = op.args[1] if len(op.args) > 1 and op.args[1] is not None else range(rank)
    dims = tuple(sorted(dim % rank for dim in ([given] if isinstance(given, int) else given)))
    keepdim = bool(op.args[2]) if len(op.args) > 2 else bool(op.kwargs.get("keepdim", False))
    return name, dims, keepdim


def _reduction(lowering: Lowering, op: Operator, mean: bool) -> None:
    name, dims, keepdim = _over_space(lowering, op)
    space = lowering.splits[name].dims
    output = op.outputs[0]
    if not set(space) & set(dims):  # over channels: every pixel by itself
        split = lowering.splits[name]
        if not keepdim:
            split = Split(split.layout, tuple(d - sum(r < d for r in dims) for d in space))  # type: ignore[arg-type]
        part = lowering.part(name, lowering.splits[name])
        function, inputs = bound(renamed(op, {name: part}))
        lowering.compute(function, inputs, op.outputs, split)
    elif not set(space) <= set(dims):
        _sum_over_space(lowering, name, output, dims, keepdim, mean, _rest_of_whole(lowering, name, dims, keepdim))
    else:
        _sum_over_space(lowering, name, output, dims, keepdim, mean)


def _rest_of_whole(lowering: Lowering, name: str, dims: tuple[int, ...], keepdim: bool) -> Any:
    """Return what puts this rank's sums along one dim of space into the whole profile along the other, zero elsewhere.

    Profiles are small (H or W long), so every rank holds them whole from there on.
    """
    split = lowering.splits[name]
    box, whole = split.layout.parts[lowering.rank], split.layout.map
    along_y = split.dims[1] in dims
    left = split.dims[0] if along_y else split.dims[1]
    before, behind = (box.y0, whole.height - box.y1) if along_y else (box.x0, whole.width - box.x1)
    rank = len(lowering.shape(name))
    if not keepdim:
        left -= sum(dim < left for dim in dims)
        rank -= len(dims)
    widths = (0, 0) * (rank - 1 - left) + (before, behind)
    return lambda sums: F.pad(sums, widths)


def _sum_over_space(
    lowering: Lowering,
    name: str,
    output: str | None,
    dims: tuple[int, ...],
    keepdim: bool,
    mean: bool,
    placed: Any = None,
) -> None:
    shape = lowering.shape(name)
    count = 1
    for dim in dims:
        count *= shape[dim]
    partial, summed = lowering.fresh(name), lowering.fresh(name)
    kind = lowering.values[output].dtype if output is not None else torch.float32

    def sums(tensor: torch.Tensor) -> torch.Tensor:
        wide = kind if kind == torch.float64 else _accumulator(tensor)  # sum(dims, dtype=torch.float64)
        own = tensor.sum(dims, keepdim=keepdim, dtype=wide)
        return own if placed is None else placed(own)

    def finish(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor / count if mean else tensor.clone()
        return result.to(kind) if kind in (torch.bfloat16, torch.float16) else result

    lowering.compute(sums, (lowering.part(name, lowering.splits[name]),), (partial,))
    lowering.communicate(SumOverRanks(), (partial,), (summed,), "reduce")
    lowering.compute(finish, (summed,), (output,))


def mean_over_space(lowering: Lowering, name: str, output: str | None, keepdim: bool) -> None:
    """Emit the mean over the whole map."""
    _sum_over_space(lowering, name, output, lowering.splits[name].dims, keepdim, mean=True)


def mean(lowering: Lowering, op: Operator) -> None:
    """Mean over space (and other dims), or over channels alone."""
    _reduction(lowering, op, mean=True)


def total(lowering: Lowering, op: Operator) -> None:
    """Sum over space (and other dims), or over channels alone."""
    _reduction(lowering, op, mean=False)


def maximum(lowering: Lowering, op: Operator) -> None:
    """Maximum over space; ties share the gradient wherever they are."""
    name, dims, keepdim = _over_space(lowering, op)
    if not set(dims) & set(lowering.splits[name].dims):
        _reduction(lowering, op, mean=False)  # over channels: the operator itself, pixel by pixel
        return
    if dims != lowering.splits[name].dims:
        lowering.refuse(
            op, f"takes the maximum over dims {dims}", f"exactly the dims of space {lowering.splits[name].dims}"
        )
    part = lowering.part(name, lowering.splits[name])
    lowering.communicate(MaxOverSpace((dims[0], dims[1]), keepdim), (part,), op.outputs, "reduce")


def _pixels(lowering: Lowering, name: str) -> int:
    """Return the pixels that statistics of a map are taken over, in all replicas that take them together."""
    batch, _, height, width = lowering.shape(name)
    return int(batch * height * width * lowering.replicas)


def batch_norm_training(lowering: Lowering, op: Operator) -> None:
    """Batch norm with statistics of the whole map; one rank alone uses the native kernel."""
    x, weight, bias, running_mean, running_var, _, momentum, eps = op.args
    batches = cumulative_count(lowering.program, op, momentum)
    split = lowering.seen(op, x.name)
    part = lowering.part(x.name, split)
    normalised, _, _, new_mean, new_var = (*op.outputs, None, None)[:5]
    affine = tuple(item.name if item is not None else None for item in (weight, bias))
    if lowering.grid == (1, 1) and lowering.replicas == 1:
        names = (part, running_mean.name, running_var.name, *affine, batches)
        inputs = tuple(name for name in names if name is not None)
        native = native_batch_norm(weight is not None, bias is not None, momentum, eps)
        lowering.compute(native, inputs, op.outputs, operator=op)
        if normalised is not None:
            lowering.splits[normalised] = split
        return
    count = _pixels(lowering, x.name)
    batch_mean, batch_var = lowering.fresh(running_mean.name), lowering.fresh(running_var.name)
    norm = _batch_norm(lowering, split, count, eps)
    outputs = (normalised, batch_mean, batch_var)
    lowering.communicate(norm, (part, *affine), outputs, "reduce", copies=lowering.replicas > 1)
    if normalised is not None:
        lowering.splits[normalised] = split
    unbias = count / max(count - 1, 1)
    for running, batch, new, factor in (
        (running_mean.name, batch_mean, new_mean, 1.0),
        (running_var.name, batch_var, new_var, unbias),
    ):
        if new is not None:
            inputs = (running, batch) if batches is None else (running, batch, batches)
            lowering.compute(_running(momentum, factor), inputs, (new,))


def _batch_norm(lowering: Lowering, split: Split, count: int, eps: float) -> BatchNorm:
    """Return the collective for what ranks own, or, in a fused run, for what they compute."""
    if split.boxes is None:
        return BatchNorm(count, eps)
    owned, held = split.layout.parts[lowering.rank], split.held[lowering.rank]
    return FusedBatchNorm(count, eps, Box(0, 0, 0, 0) if owned.empty else owned.relative_to(held))


def _running(momentum: float, factor: float) -> Any:
    def call(running: torch.Tensor, batch: torch.Tensor, *batches: torch.Tensor) -> torch.Tensor:
        share = 1.0 / float(batches[0]) if batches else momentum
        return running * (1.0 - share) + batch.to(running.dtype) * (share * factor)

    return call


def batch_norm_without_statistics(lowering: Lowering, op: Operator) -> None:
    """Batch norm on statistics of the whole map that are not kept."""
    x, weight, bias, _, _, eps = op.args
    split = lowering.seen(op, x.name)
    part = lowering.part(x.name, split)
    affine = tuple(item.name if item is not None else None for item in (weight, bias))
    if lowering.grid == (1, 1) and lowering.replicas == 1:
        function, inputs = batch_norm_alone(op)
        names = tuple(part if name == x.name else name for name in inputs)
        lowering.compute(function, names, op.outputs[:1], split)
        return
    norm = _batch_norm(lowering, split, _pixels(lowering, x.name), eps)
    lowering.communicate(norm, (part, *affine), op.outputs[:1], "reduce", copies=lowering.replicas > 1)
    for output in op.outputs[:1]:
        if output is not None:
            lowering.splits[output] = split


def batch_norm_evaluation(lowering: Lowering, op: Operator) -> None:
    """Batch norm on running statistics: pixel by pixel, nothing to exchange."""
    x = op.args[0]
    split = lowering.seen(op, x.name)
    function, inputs = bound(renamed(op, {x.name: lowering.part(x.name, split)}))
    lowering.compute(lambda *tensors: function(*tensors)[0], inputs, op.outputs[:1], split, op)


def batch_norm(lowering: Lowering, op: Operator) -> None:
    """``batch_norm`` as evaluation mode leaves it in the graph."""
    x, training = op.args[0], op.args[5]
    if training:
        lowering.refuse(op, "is in training mode and not functional", "a model exported by this engine")
    split = lowering.seen(op, x.name)
    function, inputs = bound(renamed(op, {x.name: lowering.part(x.name, split)}))
    lowering.compute(function, inputs, op.outputs, split, op)


def group_norm(lowering: Lowering, op: Operator) -> None:
    """Group norm: statistics of each image and group over the whole map."""
    x, groups, weight, bias, eps = (*op.args, None, None, 1e-5)[:5] if len(op.args) < 5 else op.args[:5]
    _grouped(lowering, op, x.name, groups, weight, bias, eps)


def instance_norm(lowering: Lowering, op: Operator) -> None:
    """Instance norm is group norm with one channel a group."""
    x, weight, bias, running_mean, _, use_input_stats = op.args[:6]
    if running_mean is not None or not use_input_stats:
        lowering.refuse(op, "keeps running statistics", "track_running_stats=False, or nn.GroupNorm")
    _grouped(lowering, op, x.name, lowering.shape(x.name)[1], weight, bias, op.args[7])


def _grouped(lowering: Lowering, op: Operator, name: str, groups: int, weight: Any, bias: Any, eps: float) -> None:
    batch, channels, height, width = lowering.shape(name)
    count = channels // groups * height * width
    split = lowering.seen(op, name)
    part = lowering.part(name, split)
    partial, summed = lowering.fresh(name), lowering.fresh(name)
    lowering.values[partial] = lowering.values[summed] = ValueInfo((2, batch, groups), torch.float64)
    # In a fused run, too, every pixel counts once; autograd then adds up what all computed copies owe to the sums.
    lowering.compute(_group_sums(batch, groups), (lowering.part(part, split.owned),), (partial,))
    lowering.communicate(SumOverRanks(), (partial,), (summed,), "reduce")
    affine = tuple(item.name for item in (weight, bias) if item is not None)
    lowering.compute(
        _normalise(count, eps, weight is not None, bias is not None), (part, summed, *affine), op.outputs, split
    )


def _group_sums(batch: int, groups: int) -> Any:
    """Return this part's Σx and Σx² for every image and group, through its own mean so that nothing cancels."""

    def call(x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            return x.new_zeros((2, batch, groups), dtype=torch.float64)
        grouped = x.reshape(batch, groups, -1)
        grouped = grouped.to(_accumulator(x))
        variance, mean = torch.var_mean(grouped, dim=2, correction=0)
        variance, mean = variance.double(), mean.double()
        return torch.stack([mean, variance + mean * mean]) * grouped.shape[2]

    return call


def _normalise(count: int, eps: float, has_weight: bool, has_bias: bool) -> Any:
    def call(x: torch.Tensor, sums: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        batch, channels = x.shape[:2]
        mean = sums[0] / count
        inverse = (sums[1] / count - mean * mean).clamp(min=0.0).add(eps).rsqrt()
        spread = channels // mean.shape[1]
        mean, scale = mean.repeat_interleave(spread, 1), inverse.repeat_interleave(spread, 1)
        if has_weight:
            scale = scale * affine[0]
        kind = _accumulator(x)
        shape = (batch, channels, 1, 1)
        result = (x - mean.to(kind).view(shape)) * scale.to(kind).view(shape)
        if has_bias:
            result = result + affine[-1].view(1, channels, 1, 1)
        return result.to(x.dtype)

    return call
