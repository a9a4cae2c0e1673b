"""Batch norm by the native kernel: on features that every rank holds, and on maps that one rank holds whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from hyfi_core.capture.program import Operator, Program


def batch_norm_on_features(program: Program, op: Operator) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return batch norm in training mode as a call that autograd can differentiate; the functional operator is not."""
    x, weight, bias, running_mean, running_var, _, momentum, eps = op.args
    names = tuple(item.name for item in (x, running_mean, running_var, weight, bias) if item is not None)
    batches = cumulative_count(program, op, momentum)
    names = names if batches is None else (*names, batches)
    return native_batch_norm(weight is not None, bias is not None, momentum, eps), names


def native_batch_norm(has_weight: bool, has_bias: bool, momentum: float, eps: float) -> Callable[..., Any]:
    """Return the outputs of the functional batch norm, by the native kernel on copies of the running statistics.

    The function takes map, running mean, running variance and, where there are, weight, bias, and number of batches
    (for the cumulative average that ``momentum=None`` asks for).
    """

    def call(x: Any, mean: Any, variance: Any, *rest: Any) -> tuple[Any, ...]:
        weight = rest[0] if has_weight else None
        bias = rest[has_weight] if has_bias else None
        count = rest[has_weight + has_bias :]
        mean, variance = mean.clone(), variance.clone()
        share = 1.0 / float(count[0]) if count else momentum
        result = F.batch_norm(x, mean, variance, weight, bias, True, share, eps)
        return result, None, None, mean, variance

    return call


def batch_norm_alone(op: Operator) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Return batch norm that keeps no statistics as a call on (map, weight, bias)."""
    x, weight, bias, _, _, eps = op.args
    names = tuple(item.name for item in (x, weight, bias) if item is not None)

    def call(x: Any, *affine: Any) -> Any:
        first = affine[0] if weight is not None else None
        return F.batch_norm(x, None, None, first, affine[-1] if bias is not None else None, True, 0.0, eps)

    return call, names


def cumulative_count(program: Program, op: Operator, momentum: float) -> str | None:
    """Return the value that counts a batch norm's batches where ``momentum=None`` (captured as nan) asks for it."""
    if not math.isnan(momentum):
        return None
    counts = [
        other.outputs[0]
        for other in program.operators[: program.operators.index(op)]
        if other.module == op.module and other.text == "aten.add.Tensor"
    ]
    return counts[-1]
