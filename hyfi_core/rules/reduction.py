"""Rules for reductions over space: sums, means, maxima, vector norms, variances.

Each is a partial result on every rank, one small all-reduce and a local finish. Over dims that are not space they are
pixel by pixel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from hyfi_core.capture.program import Operator
from hyfi_core.ops.batch_norm import MOST_ROWS
from hyfi_core.ops.reduce import MaxOverSpace, SumOverRanks
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import bound, renamed
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.moves.strips import along_space


def accumulator(tensor: torch.Tensor) -> torch.dtype:
    """Return the type in which values of a tensor are added up: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _over_space(builder: Builder, op: Operator) -> tuple[str, tuple[int, ...], bool]:
    """Return (input, dims, keepdim) of a reduction that takes at least both dims of space.

    Raises:
        RequestError: it leaves one of them.
    """
    name = op.args[0].name
    rank = len(builder.shape(name))
    given = op.args[1] if len(op.args) > 1 and op.args[1] is not None else range(rank)
    dims = tuple(sorted(dim % rank for dim in ([given] if isinstance(given, int) else given)))
    keepdim = bool(op.args[2]) if len(op.args) > 2 else bool(op.kwargs.get("keepdim", False))
    return name, dims, keepdim


def _reduction(builder: Builder, op: Operator, mean: bool) -> None:
    name, dims, keepdim = _over_space(builder, op)
    space = builder.splits[name].dims
    output = op.outputs[0]
    if not set(space) & set(dims):  # over channels: every pixel by itself
        split = builder.splits[name]
        if not keepdim:
            split = _fewer(split, dims)
        part = builder.part(name, builder.splits[name])
        function, inputs = bound(renamed(op, {name: part}))
        builder.compute(function, inputs, op.outputs, split)
    elif not set(space) <= set(dims):
        if not builder.splits[name].plain:
            builder.refuse(
                op, f"is over dims {dims}, which mix rows or columns with something else", "either height or width"
            )
        _sum_over_space(builder, name, output, dims, keepdim, mean, _rest_of_whole(builder, name, dims, keepdim))
    else:
        _sum_over_space(builder, name, output, dims, keepdim, mean)


def _fewer(split: Split, gone: tuple[int, ...]) -> Split:
    """Return how a value is split once dims that are not space are gone."""
    y, x = (dim - sum(one < dim for one in gone) for dim in split.dims)
    return Split(split.layout, (y, x), leads=split.leads)


def _rest_of_whole(builder: Builder, name: str, dims: tuple[int, ...], keepdim: bool) -> Any:
    """Return what puts this rank's sums along one dim of space into the whole profile along the other, zero elsewhere.

    Profiles are small (H or W long), so every rank holds them whole from there on.
    """
    split = builder.splits[name]
    box, whole = split.layout.parts[builder.rank], split.layout.map
    along_y = split.dims[1] in dims
    left = split.dims[0] if along_y else split.dims[1]
    before, behind = (box.y0, whole.height - box.y1) if along_y else (box.x0, whole.width - box.x1)
    rank = len(builder.shape(name))
    if not keepdim:
        left -= sum(dim < left for dim in dims)
        rank -= len(dims)
    widths = (0, 0) * (rank - 1 - left) + (before, behind)
    return lambda sums: F.pad(sums, widths)


def _sum_over_space(
    builder: Builder,
    name: str,
    output: str | None,
    dims: tuple[int, ...],
    keepdim: bool,
    mean: bool,
    placed: Any = None,
) -> None:
    shape = builder.shape(name)
    count = 1
    for dim in dims:
        count *= shape[dim]
    partial, summed = builder.fresh(name), builder.fresh(name)
    kind = builder.values[output].dtype if output is not None else torch.float32

    def sums(tensor: torch.Tensor) -> torch.Tensor:
        wide = kind if kind == torch.float64 or not kind.is_floating_point else accumulator(tensor)  # sum's dtype=
        own = tensor.sum(dims, keepdim=keepdim, dtype=wide)
        return own if placed is None else placed(own)

    def finish(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor / count if mean else tensor.clone()
        return result.to(kind) if kind in (torch.bfloat16, torch.float16) else result

    builder.compute(sums, (builder.part(name, builder.splits[name]),), (partial,))
    builder.communicate(SumOverRanks(), (partial,), (summed,), "reduce")
    builder.compute(finish, (summed,), (output,))


def mean_over_space(builder: Builder, name: str, output: str | None, keepdim: bool) -> None:
    """Emit the mean over the whole map."""
    _sum_over_space(builder, name, output, builder.splits[name].dims, keepdim, mean=True)


def mean(builder: Builder, op: Operator) -> None:
    """Mean over space (and other dims), or over channels alone."""
    _reduction(builder, op, mean=True)


def total(builder: Builder, op: Operator) -> None:
    """Sum over space (and other dims), or over channels alone."""
    _reduction(builder, op, mean=False)


def maximum(builder: Builder, op: Operator) -> None:
    """``amax``, ``amin``, and ``max`` and ``min`` of everything; ties share the gradient wherever they are."""
    name, dims, keepdim = _over_space(builder, op)
    space = set(builder.splits[name].dims)
    taken = set(dims) & space
    if not taken:
        _reduction(builder, op, mean=False)  # over channels: the operator itself, pixel by pixel
    elif taken != space:
        along_space(builder, op, dims, keepdim)
    else:
        part = builder.part(name, builder.splits[name])
        if "min" not in op.text:
            builder.communicate(MaxOverSpace(dims, keepdim), (part,), op.outputs, "reduce")
            return
        turned, top = builder.fresh(name), builder.fresh(op.first_output)
        builder.compute(lambda tensor: -tensor, (part,), (turned,), builder.splits[name])
        builder.communicate(MaxOverSpace(dims, keepdim), (turned,), (top,), "reduce")
        builder.compute(lambda tensor: -tensor, (top,), op.outputs)


def truth(builder: Builder, op: Operator) -> None:
    """``any`` and ``all``."""
    name, dims, keepdim = _over_space(builder, op)
    if not set(dims) & set(builder.splits[name].dims):
        _reduction(builder, op, mean=False)
        return
    if not set(builder.splits[name].dims) <= set(dims):
        along_space(builder, op, dims, keepdim)
        return
    every = op.text.startswith("aten.all")

    def count(tensor: torch.Tensor) -> torch.Tensor:
        return ((tensor == 0) if every else (tensor != 0)).sum(dims, keepdim=keepdim)

    partial, total = (builder.fresh(op.first_output, dtype=torch.int64) for _ in range(2))
    builder.compute(count, (builder.part(name, builder.splits[name]),), (partial,))
    builder.communicate(SumOverRanks(), (partial,), (total,), "reduce")
    builder.compute(lambda hits: (hits == 0) if every else (hits > 0), (total,), op.outputs)


def vector_norm(builder: Builder, op: Operator) -> None:
    """The p-norm for p ≥ 1 and the maximum norm."""
    order = float(op.args[1]) if len(op.args) > 1 else 2.0
    name, dims, keepdim = _dims(builder, op, op.args[2] if len(op.args) > 2 else None, 3)
    if _channels_only(builder, op, dims, keepdim):
        return
    part = builder.part(name, builder.splits[name])
    if order == math.inf and set(dims) == set(builder.splits[name].dims):
        size = builder.fresh(name)
        builder.compute(lambda tensor: tensor.abs(), (part,), (size,), builder.splits[name])
        builder.communicate(MaxOverSpace(dims, keepdim, nan_ties=True), (size,), op.outputs, "reduce")
        return
    if not 1.0 <= order < math.inf:
        builder.refuse(
            op,
            f"is a norm of order {order} over dims {dims}",
            "orders of 1 or more, or inf over height and width only",
        )

    def powers(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(accumulator(tensor)).abs()
        return (tensor if order == 1 else tensor.pow(order)).sum(dims, keepdim=keepdim)

    def root(total: torch.Tensor) -> torch.Tensor:
        # At zero the slope of the root is infinite; PyTorch's norm says zero, and so must this.
        nothing = total == 0
        return total if order == 1 else torch.where(nothing, 0.0, torch.where(nothing, 1.0, total).pow(1 / order))

    _through_sum(builder, part, op.outputs, powers, root)


def variance(builder: Builder, op: Operator) -> None:
    """``var`` and ``std`` with any correction, and these with the mean (``var_mean``)."""
    rooted = op.text.startswith("aten.std")
    with_mean = "_mean." in op.text
    given = op.kwargs.get("correction")
    correction = 1 if given is None else given
    if op.text.endswith(".dim"):
        correction = int(op.args[2]) if len(op.args) > 2 else 1
    name, dims, keepdim = _dims(builder, op, op.args[1] if len(op.args) > 1 else None, 3)
    if _channels_only(builder, op, dims, keepdim):
        return
    count = math.prod(builder.shape(name)[dim] for dim in dims)
    if count <= correction:
        builder.refuse(op, f"has {count} value(s), too few for correction={correction}", "a smaller correction")
    kind = builder.values[name].dtype

    def finish(moments: torch.Tensor) -> Any:
        spread = moments[1] * (count / (count - correction))
        result: torch.Tensor = (spread.sqrt() if rooted else spread).to(kind)
        return (result, moments[0].to(kind)) if with_mean else result

    builder.compute(finish, (moments_over_ranks(builder, name, dims, keepdim),), op.outputs)


def moments_over_ranks(builder: Builder, name: str, dims: tuple[int, ...], keepdim: bool, groups: int = 0) -> str:
    """Emit mean and biased variance over a whole map; return the name of both, stacked, in float64.

    One message. Each of few ranks gives its own mean and variance in a row of its own, so that nothing cancels however
    far the mean is from zero. A row for each of many would make the message long: they add up Σ x and Σ x².

    Args:
        builder: of the rank's program.
        name: a map; of a wider box that a fused run holds only what the rank owns counts.
        dims: over which; all of space is among them.
        keepdim: whether they stay, with size 1.
        groups: if not 0, dim 1 is first cut into so many groups and all behind it made one: ``dims`` is then (2,).
    """
    split = builder.splits[name].owned
    part, ranks, rank = builder.part(name, split), len(split.layout.parts), builder.rank
    shapes = [split.local_shape(builder.shape(name), other) for other in range(ranks)]
    if groups:
        shapes = [(shape[0], groups, math.prod(shape[1:]) // groups) for shape in shapes]
    counts = [math.prod(shape[dim] for dim in dims) for shape in shapes]
    count, apart = sum(counts), ranks <= MOST_ROWS

    def moments(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(accumulator(tensor))
        if not counts[rank]:
            nothing = tensor.reshape(shapes[rank]).sum(dims, keepdim=keepdim).double()
            row = torch.stack([nothing, nothing])
        else:
            spread, mean = torch.var_mean(tensor.reshape(shapes[rank]), dims, correction=0, keepdim=keepdim)
            spread, mean = spread.double(), mean.double()
            row = torch.stack([mean, spread]) if apart else torch.stack([mean, spread + mean * mean]) * counts[rank]
        if not apart:
            return row
        before, behind = row.new_zeros((rank, *row.shape)), row.new_zeros((ranks - 1 - rank, *row.shape))
        return torch.cat([before, row[None], behind])

    def together(rows: torch.Tensor) -> torch.Tensor:
        if not apart:
            mean = rows[0] / count
            return torch.stack([mean, (rows[1] / count - mean * mean).clamp(min=0.0)])
        weights = rows.new_tensor(counts).div_(count).view(-1, *[1] * (rows.dim() - 2))
        means, spreads = rows.unbind(1)
        first = means[0]  # means are averaged as differences from one of them
        mean = first + ((means - first) * weights).sum(0)
        return torch.stack([mean, ((spreads + (means - mean).square()) * weights).sum(0)])

    rows, summed, both = (builder.fresh(part, (), torch.float64) for _ in range(3))
    builder.compute(moments, (part,), (rows,))
    builder.communicate(SumOverRanks(), (rows,), (summed,), "reduce")
    builder.compute(together, (summed,), (both,))
    return both


def _dims(builder: Builder, op: Operator, given: Any, keepdim_at: int) -> tuple[str, tuple[int, ...], bool]:
    """Return (input, dims that are reduced, whether they stay)."""
    name = op.args[0].name
    rank = len(builder.shape(name))
    asked = range(rank) if given is None else [given] if isinstance(given, int) else given
    keepdim = op.args[keepdim_at] if len(op.args) > keepdim_at else op.kwargs.get("keepdim", False)
    return name, tuple(sorted(dim % rank for dim in asked)), bool(keepdim)


def _channels_only(builder: Builder, op: Operator, dims: tuple[int, ...], keepdim: bool) -> bool:
    """Emit a reduction that leaves space alone; whether it was one.

    Raises:
        RequestError: it takes one dim of space and leaves the other.
    """
    name = op.args[0].name
    here = builder.splits[name]
    taken = set(here.dims) & set(dims)
    if 0 < len(taken) < len(set(here.dims)):
        along_space(builder, op, dims, keepdim)
        return True
    if taken:
        return False
    split = here
    if not keepdim:
        split = _fewer(here, dims)
    function, inputs = bound(renamed(op, {name: builder.part(name, here)}))
    builder.compute(function, inputs, op.outputs, split)
    return True


def _through_sum(builder: Builder, part: str, outputs: tuple[str | None, ...], local: Any, finish: Any) -> None:
    """Emit a local reduction, the sum over ranks, and a local finish."""
    partial, summed = (builder.fresh(part, (), torch.float64) for _ in range(2))
    builder.compute(local, (part,), (partial,))
    builder.communicate(SumOverRanks(), (partial,), (summed,), "reduce")
    builder.compute(finish, (summed,), outputs)
