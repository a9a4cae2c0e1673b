"""Rules for norms and spreads over space: vector norms (global response norm), variance and standard deviation.

Over dims that are not space they are pixel by pixel; over space they are sums of parts, one all-reduce, a local finish.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hyfi_core.capture.program import Operator, ValueInfo
from hyfi_core.lowering.lower import Lowering, bound, renamed
from hyfi_core.ops.reduce import MaxOverSpace, SumOverRanks
from hyfi_core.rules.instructions import Split
from hyfi_core.rules.norm import _accumulator


def vector_norm(lowering: Lowering, op: Operator) -> None:
    """The p-norm for p ≥ 1 and the maximum norm."""
    order = float(op.args[1]) if len(op.args) > 1 else 2.0
    name, dims, keepdim = _dims(lowering, op, op.args[2] if len(op.args) > 2 else None, 3)
    if _channels_only(lowering, op, dims, keepdim):
        return
    part = lowering.part(name, lowering.splits[name])
    if order == math.inf and dims == lowering.splits[name].dims:
        size = lowering.fresh(name)
        lowering.compute(lambda tensor: tensor.abs(), (part,), (size,), lowering.splits[name])
        lowering.communicate(MaxOverSpace((dims[0], dims[1]), keepdim), (size,), op.outputs, "reduce")
        return
    if not 1.0 <= order < math.inf:
        lowering.refuse(op, f"is a norm of order {order} over dims {dims}", "orders from 1, or inf over space alone")

    def powers(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(_accumulator(tensor)).abs()
        return (tensor if order == 1 else tensor.pow(order)).sum(dims, keepdim=keepdim)

    def root(total: torch.Tensor) -> torch.Tensor:
        # At zero the slope of the root is infinite; PyTorch's norm says zero, and so must this.
        nothing = total == 0
        return total if order == 1 else torch.where(nothing, 0.0, torch.where(nothing, 1.0, total).pow(1 / order))

    _through_sum(lowering, part, op.outputs, powers, root)


def variance(lowering: Lowering, op: Operator) -> None:
    """``var`` and ``std`` with any correction."""
    rooted = op.text.startswith("aten.std")
    correction = op.kwargs.get("correction", 1)
    if op.text.endswith(".dim"):
        correction = int(op.args[2]) if len(op.args) > 2 else 1
    name, dims, keepdim = _dims(lowering, op, op.args[1] if len(op.args) > 1 else None, 3)
    if _channels_only(lowering, op, dims, keepdim):
        return
    shape = lowering.shape(name)
    count = math.prod(shape[dim] for dim in dims)
    part = lowering.part(name, lowering.splits[name])

    def moments(tensor: torch.Tensor) -> torch.Tensor:
        own = math.prod(tensor.shape[dim] for dim in dims)
        if not own:
            kept = tensor.sum(dims, keepdim=keepdim)
            return torch.stack([kept, kept]).double()
        spread, mean = torch.var_mean(tensor.to(_accumulator(tensor)), dims, correction=0, keepdim=keepdim)
        spread, mean = spread.double(), mean.double()
        return torch.stack([mean, spread + mean * mean]) * own

    kind = lowering.values[name].dtype

    def finish(sums: torch.Tensor) -> torch.Tensor:
        mean = sums[0] / count
        spread = (sums[1] / count - mean * mean).clamp(min=0.0) * (count / max(count - correction, 0))
        result: torch.Tensor = (spread.sqrt() if rooted else spread).to(kind)
        return result

    if count <= correction:
        lowering.refuse(op, f"has {count} values and a correction of {correction}", "a smaller correction")
    _through_sum(lowering, part, op.outputs, moments, finish)


def _dims(lowering: Lowering, op: Operator, given: Any, keepdim_at: int) -> tuple[str, tuple[int, ...], bool]:
    """Return (input, dims that are reduced, whether they stay)."""
    name = op.args[0].name
    rank = len(lowering.shape(name))
    asked = range(rank) if given is None else [given] if isinstance(given, int) else given
    keepdim = op.args[keepdim_at] if len(op.args) > keepdim_at else op.kwargs.get("keepdim", False)
    return name, tuple(sorted(dim % rank for dim in asked)), bool(keepdim)


def _channels_only(lowering: Lowering, op: Operator, dims: tuple[int, ...], keepdim: bool) -> bool:
    """Emit a reduction that leaves space alone; whether it was one.

    Raises:
        RequestError: it takes one dim of space and leaves the other.
    """
    name = op.args[0].name
    here = lowering.splits[name]
    taken = set(here.dims) & set(dims)
    if len(taken) == 1:
        lowering.refuse(
            op, f"reduces dims {dims} of a map whose space is {here.dims}", "both dims of space, or neither"
        )
    if taken:
        return False
    split = here
    if not keepdim:
        split = Split(here.layout, tuple(d - sum(r < d for r in dims) for d in here.dims))  # type: ignore[arg-type]
    function, inputs = bound(renamed(op, {name: lowering.part(name, here)}))
    lowering.compute(function, inputs, op.outputs, split)
    return True


def _through_sum(lowering: Lowering, part: str, outputs: tuple[str | None, ...], local: Any, finish: Any) -> None:
    """Emit a local reduction, the sum over ranks, and what makes the answer of it."""
    partial, summed = lowering.fresh(part), lowering.fresh(part)
    lowering.values[partial] = lowering.values[summed] = ValueInfo((), torch.float64)
    lowering.compute(local, (part,), (partial,))
    lowering.communicate(SumOverRanks(), (partial,), (summed,), "reduce")
    lowering.compute(finish, (summed,), outputs)
