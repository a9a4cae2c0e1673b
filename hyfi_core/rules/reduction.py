"""Rules for reductions: sums, means, maxima, vector norms, variances.

over height and width     a partial result on every rank, one small all-reduce, a local finish
over one of them          whole rows or columns, see ``moves.strips``; sums and means: one all-reduce of the profile
over other dims           pointwise
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from hyfi_core.capture.program import Operator, ValueInfo
from hyfi_core.ops.constants import Constant
from hyfi_core.ops.norms.batch_norm import MOST_ROWS
from hyfi_core.ops.reduce import MaxOverSpace, SumOverRanks
from hyfi_core.rules.accepted_maps import one_map
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.calls import emit_on_part
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.moves.strips import along_space
from hyfi_core.rules.operator_facts import OperatorFacts


def accumulator(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which values of a tensor are summed: float32 or wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _reduced_dims(
    builder: Builder, op: Operator, dims_at: int = 1, keepdim_at: int = 2
) -> tuple[str, tuple[int, ...], bool]:
    """Return (name of the input, reduced dims, keepdim); ``dims_at`` and ``keepdim_at``: indices of the arguments."""
    name = op.args[0].name
    dim_count = len(builder.shape(name))
    argument = op.args[dims_at] if len(op.args) > dims_at else None
    dims = [argument] if isinstance(argument, int) else argument
    # As in PyTorch: no dims means all dims, but ``any(dim=())`` and ``all(dim=())`` reduce none.
    if dims is None or (not dims and not op.text.startswith(("aten.any", "aten.all"))):
        dims = range(dim_count)
    keepdim = op.args[keepdim_at] if len(op.args) > keepdim_at else op.kwargs.get("keepdim", False)
    return name, tuple(sorted(dim % dim_count for dim in dims)), bool(keepdim)


def _pointwise(builder: Builder, op: Operator, dims: tuple[int, ...], keepdim: bool) -> None:
    """Emit a reduction over dims other than height and width."""
    split = builder.splits[op.args[0].name]
    emit_on_part(builder, op, split, split if keepdim else _fewer(split, dims))


def _sum(builder: Builder, op: Operator, mean: bool) -> None:
    """Emit a sum or mean over any dims."""
    name, dims, keepdim = _reduced_dims(builder, op)
    space = builder.splits[name].dims
    output = op.outputs[0]
    if not set(space) & set(dims):
        _pointwise(builder, op, dims, keepdim)
    elif not set(space) <= set(dims):
        if not builder.splits[name].has_own_dims:
            builder.refuse(
                op, f"is over dims {dims}, which mix rows or columns with something else", "either height or width"
            )
        # One number for each row or each column: every rank has those of its part, at their place among zeros.
        placed = _placed_in_profile(builder, name, dims, keepdim)
        _sum_over_space(builder, name, output, dims, keepdim, mean, placed)
    else:
        _sum_over_space(builder, name, output, dims, keepdim, mean)


def _fewer(split: Split, gone: tuple[int, ...]) -> Split:
    """Return how a value is split after the dims ``gone``, which are neither height nor width, are removed."""
    y, x = (dim - sum(removed < dim for removed in gone) for dim in split.dims)
    return Split(split.layout, (y, x), map_counts=split.map_counts)


def _placed_in_profile(builder: Builder, name: str, dims: tuple[int, ...], keepdim: bool) -> Any:
    """Return a function that pads this rank's sums along one axis with zeros, to the length of the other axis.

    The sum over ranks is then the whole profile, of length H or W, on every rank.
    """
    split = builder.splits[name]
    box, map_box = split.layout.parts[builder.rank], split.layout.map
    along_y = split.dims[1] in dims
    kept_dim = split.dims[0] if along_y else split.dims[1]
    before, behind = (box.y0, map_box.height - box.y1) if along_y else (box.x0, map_box.width - box.x1)
    dim_count = len(builder.shape(name))
    if not keepdim:
        kept_dim -= sum(dim < kept_dim for dim in dims)
        dim_count -= len(dims)
    # ``F.pad`` counts dims from the last one.
    widths = (0, 0) * (dim_count - 1 - kept_dim) + (before, behind)
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
    """Emit a sum or a mean over both height and width.

    Args:
        builder: builder of the rank's program.
        name: name of the map.
        output: name of the result.
        dims: reduced dims, height and width among them.
        keepdim: whether they stay, with size 1.
        mean: whether to divide by the number of values.
        placed: function applied to this rank's sum before the sum over ranks; None: it is sent as it is.
    """
    shape = builder.shape(name)
    count = 1
    for dim in dims:
        count *= shape[dim]
    result = builder.values[output] if output is not None else ValueInfo((), torch.float32)
    dtype = result.dtype
    partial, summed = (builder.fresh(name, result.shape) for _ in range(2))

    def sums(tensor: torch.Tensor) -> torch.Tensor:
        keep = dtype == torch.float64 or not dtype.is_floating_point  # may be the argument dtype of sum
        wide = dtype if keep else accumulator(tensor)
        # Summed and sent wide; rounded once, at the end.
        own = tensor.sum(dims, keepdim=keepdim, dtype=wide)
        return own if placed is None else placed(own)

    def finish(tensor: torch.Tensor) -> torch.Tensor:
        # Divided after the sum, by the values of the whole map: parts may differ in size, or be empty.
        result = tensor / count if mean else tensor.clone()
        return result.to(dtype)

    builder.compute(sums, (builder.part(name, builder.splits[name]),), (partial,))
    builder.communicate(SumOverRanks(), (partial,), (summed,), "reduce")
    builder.compute(finish, (summed,), (output,))


def mean_over_space(builder: Builder, name: str, output: str | None, keepdim: bool) -> None:
    """Emit the mean over the whole map."""
    dims = tuple(sorted(set(builder.splits[name].dims)))
    _sum_over_space(builder, name, output, dims, keepdim, mean=True)


def mean(builder: Builder, op: Operator) -> None:
    """Mean over any dims."""
    _sum(builder, op, mean=True)


def total(builder: Builder, op: Operator) -> None:
    """Sum over any dims."""
    _sum(builder, op, mean=False)


def maximum(builder: Builder, op: Operator) -> None:
    """``amax``, ``amin``, and ``max`` and ``min`` over all dims; tied pixels have equal gradients, on any rank."""
    name, dims, keepdim = _reduced_dims(builder, op)
    space = set(builder.splits[name].dims)
    reduced = set(dims) & space
    if not reduced:
        _pointwise(builder, op, dims, keepdim)
    elif reduced != space:
        along_space(builder, op, dims, keepdim)
    else:
        part = builder.part(name, builder.splits[name])
        if "min" not in op.text:
            builder.communicate(MaxOverSpace(dims, keepdim), (part,), op.outputs, "reduce")
            return
        # The minimum is the inverted maximum of inverted values: floats are negated; of integers and booleans all
        # bits are inverted, because the negative of a byte wraps around.
        invert = torch.neg if builder.values[name].dtype.is_floating_point else torch.bitwise_not
        inverted, top = builder.fresh(name), builder.fresh(op.first_output)
        builder.compute(lambda tensor: invert(tensor), (part,), (inverted,), builder.splits[name])
        builder.communicate(MaxOverSpace(dims, keepdim), (inverted,), (top,), "reduce")
        builder.compute(lambda tensor: invert(tensor), (top,), op.outputs)


def truth(builder: Builder, op: Operator) -> None:
    """``any`` and ``all``: ranks count the values that are not zero, or that are zero."""
    name, dims, keepdim = _reduced_dims(builder, op)
    if not set(dims) & set(builder.splits[name].dims):
        _pointwise(builder, op, dims, keepdim)
        return
    if not set(builder.splits[name].dims) <= set(dims):
        along_space(builder, op, dims, keepdim)
        return
    every = op.text.startswith("aten.all")

    def count(tensor: torch.Tensor) -> torch.Tensor:
        # Ranks can sum counts, unlike booleans; ``all`` counts zeros.
        return ((tensor == 0) if every else (tensor != 0)).sum(dims, keepdim=keepdim)

    partial, total = (builder.fresh(op.first_output, dtype=torch.int64) for _ in range(2))
    builder.compute(count, (builder.part(name, builder.splits[name]),), (partial,))
    builder.communicate(SumOverRanks(), (partial,), (total,), "reduce")
    builder.compute(lambda hits: (hits == 0) if every else (hits > 0), (total,), op.outputs)


def vector_norm(builder: Builder, op: Operator) -> None:
    """The p-norm for p ≥ 1, and the maximum norm over height and width."""
    order = float(op.args[1]) if len(op.args) > 1 else 2.0
    name, dims, keepdim = _reduced_dims(builder, op, dims_at=2, keepdim_at=3)
    if _try_not_over_space(builder, op, dims, keepdim):
        return
    part, result_dtype = builder.part(name, builder.splits[name]), builder.values[op.first_output].dtype
    if order == math.inf and set(dims) == set(builder.splits[name].dims):
        magnitude = builder.fresh(name)
        builder.compute(lambda tensor: tensor.abs(), (part,), (magnitude,), builder.splits[name])
        top = builder.fresh(op.first_output, dtype=builder.values[name].dtype)
        builder.communicate(MaxOverSpace(dims, keepdim, nan_ties=True), (magnitude,), (top,), "reduce")
        builder.compute(lambda tensor: tensor.to(result_dtype, copy=True), (top,), op.outputs)
        return
    if not 1.0 <= order < math.inf:
        builder.refuse(
            op,
            f"is a norm of order {order} over dims {dims}",
            "orders of 1 or more, or inf over height and width only",
        )

    def powers(tensor: torch.Tensor) -> torch.Tensor:
        # The result's dtype may be wider: it is an argument of the operator.
        tensor = tensor.to(torch.promote_types(accumulator(tensor), result_dtype)).abs()
        return (tensor if order == 1 else tensor.pow(order)).sum(dims, keepdim=keepdim)

    def root(total: torch.Tensor) -> torch.Tensor:
        return (total if order == 1 else _rooted(total, order)).to(result_dtype)

    _through_sum(builder, part, op.outputs, powers, root)


def variance(builder: Builder, op: Operator) -> None:
    """``var``, ``std``, ``var_mean`` and ``std_mean``, with any correction."""
    is_deviation = op.text.startswith("aten.std")
    with_mean = "_mean." in op.text
    setting = op.kwargs.get("correction")
    correction = 1 if setting is None else setting
    if op.text.endswith(".dim"):
        correction = int(op.args[2]) if len(op.args) > 2 else 1  # ``unbiased``, a bool
    name, dims, keepdim = _reduced_dims(builder, op, dims_at=1, keepdim_at=3)
    if _try_not_over_space(builder, op, dims, keepdim):
        return
    count, dtype = math.prod(builder.shape(name)[dim] for dim in dims), builder.values[name].dtype
    if dtype.is_complex:
        builder.refuse(op, "is of complex numbers", "the sum of the variances of real and imaginary part")
    if count <= correction:
        builder.refuse(op, f"has {count} value(s), too few for correction={correction}", "a smaller correction")

    def finish(moments: torch.Tensor) -> Any:
        # The moments are biased, over all ranks. For equal values, ``std`` has gradient 0; that of sqrt would be NaN.
        corrected = moments[1] * (count / (count - correction))
        result = (_rooted(corrected, 2.0) if is_deviation else corrected).to(dtype)
        return (result, moments[0].to(dtype)) if with_mean else result

    builder.compute(finish, (moments_over_ranks(builder, name, dims, keepdim),), op.outputs)


def _rooted(sums: torch.Tensor, order: float) -> torch.Tensor:
    """Return ``sums ** (1 / order)``, whose gradient at 0 is 0, as in PyTorch's norms and deviations, not infinite."""
    zero = sums == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, sums).pow(1 / order))


def moments_over_ranks(builder: Builder, name: str, dims: tuple[int, ...], keepdim: bool, groups: int = 0) -> str:
    """Emit mean and biased variance over a whole map; return the name of the two stacked, in float64.

    Up to ``MOST_ROWS`` ranks send rows of their own, without cancellation; more sum Σ x and Σ x², a short message.

    Args:
        builder: builder of the rank's program.
        name: a map; margins of a fused run do not count.
        dims: the reduced dims, including height and width.
        keepdim: whether they are kept as size 1.
        groups: number of channel groups; if not 0, the map is reshaped to (B, groups, rest) and ``dims`` must be (2,).
    """
    split = builder.splits[name].owned
    part, ranks, rank = builder.part(name, split), len(split.layout.parts), builder.rank
    separate_rows = ranks <= MOST_ROWS

    def folded(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], groups, math.prod(shape[1:]) // groups) if groups else shape

    def counted(shape: tuple[int, ...]) -> int:
        return math.prod(folded(shape)[dim] for dim in dims)

    own_shape, count = folded(split.local_shape(builder.shape(name), rank)), counted(builder.shape(name))
    own_count = math.prod(own_shape[dim] for dim in dims)
    counts = [counted(split.local_shape(builder.shape(name), rank)) for rank in range(ranks)] if separate_rows else []
    rank_fractions = Constant(torch.tensor(counts, dtype=torch.float64).div_(count))

    def moments(tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's term of the sum over ranks: its sums, or its row among rows of zeros."""
        tensor = tensor.to(accumulator(tensor))
        # Empty sums, 0, connect the result to the input, so that all ranks have the same backward.
        if not own_count:
            zeros = tensor.reshape(own_shape).sum(dims, keepdim=keepdim).double()
            row = torch.stack([zeros, zeros])
        else:
            variance, mean = torch.var_mean(tensor.reshape(own_shape), dims, correction=0, keepdim=keepdim)
            variance, mean = variance.double(), mean.double()  # for the sum over ranks
            row = torch.stack([mean, variance if separate_rows else variance + mean * mean])
            row = row if separate_rows else row * own_count
        if not separate_rows:
            return row
        before, behind = row.new_zeros((rank, *row.shape)), row.new_zeros((ranks - 1 - rank, *row.shape))
        return torch.cat([before, row[None], behind])

    def moments_of_all(rows: torch.Tensor) -> torch.Tensor:
        """Return (mean, biased variance) of the whole map, from what all ranks have sent."""
        if not separate_rows:
            mean = rows[0] / count
            return torch.stack([mean, (rows[1] / count - mean * mean).clamp(min=0.0)])  # may round below 0
        weights = rank_fractions.like(rows).view(-1, *[1] * (rows.dim() - 2))
        means, variances = rows.unbind(1)
        first = means[0]  # means are averaged as differences from one of them
        mean = first + ((means - first) * weights).sum(0)
        return torch.stack([mean, ((variances + (means - mean).square()) * weights).sum(0)])

    rows, summed, moments_name = (builder.fresh(part, (), torch.float64) for _ in range(3))  # no rule reads the shape
    builder.compute(moments, (part,), (rows,))
    builder.communicate(SumOverRanks(), (rows,), (summed,), "reduce")
    builder.compute(moments_of_all, (summed,), (moments_name,))
    return moments_name


def _try_not_over_space(builder: Builder, op: Operator, dims: tuple[int, ...], keepdim: bool) -> bool:
    """Emit a reduction unless it is over both height and width; return whether it was emitted."""
    space = set(builder.splits[op.args[0].name].dims)
    reduced = space & set(dims)
    if reduced == space:
        return False
    if reduced:
        along_space(builder, op, dims, keepdim)
    else:
        _pointwise(builder, op, dims, keepdim)
    return True


def _through_sum(builder: Builder, part: str, outputs: tuple[str | None, ...], local: Any, finish: Any) -> None:
    """Emit a local reduction, the sum over ranks, and a local finish."""
    partial, summed = (builder.fresh(part, (), torch.float64) for _ in range(2))
    builder.compute(local, (part,), (partial,))
    builder.communicate(SumOverRanks(), (partial,), (summed,), "reduce")
    builder.compute(finish, (summed,), outputs)


_MOMENTS = "var.dim var.correction std.dim std.correction var_mean.dim var_mean.correction std_mean.dim"

FACTS = {
    **dict.fromkeys(("mean", "mean.dim"), OperatorFacts(one_map(mean), keeps="nothing")),
    **dict.fromkeys(("sum", "sum.dim_IntList"), OperatorFacts(one_map(total), keeps="nothing")),
    **dict.fromkeys(("amax", "amin", "max", "min"), OperatorFacts(one_map(maximum))),
    **dict.fromkeys(("any", "any.dims", "all", "all.dims"), OperatorFacts(one_map(truth))),
    "linalg_vector_norm": OperatorFacts(one_map(vector_norm)),
    "linalg_matrix_norm.str_ord": OperatorFacts(
        None, instead="torch.linalg.vector_norm(y, dim=(2, 3)), which is the Frobenius norm"
    ),
    **dict.fromkeys((*_MOMENTS.split(), "std_mean.correction"), OperatorFacts(one_map(variance))),
}
