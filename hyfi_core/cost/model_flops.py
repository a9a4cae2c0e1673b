"""The arithmetic of a model, counted from the shapes of its captured operators."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hyfi_core.capture.program import Operator, Program, Ref
from hyfi_core.capture.stages import active_values

_FACTOR_DIMS = 2
"""Least dims of a factor: PyTorch's counter knows no products with a vector."""


def training_flops(program: Program, trained: Collection[str]) -> float:
    """Return the operations of convolutions and matrix products in one forward and backward of a micro-batch.

    A multiply-add counts as two, as in ``torch.utils.flop_counter``. Each gradient of a product (of a map, of the
    weights) counts as much as its forward. Operations that parallel training adds do not count: halos and activations
    that are computed twice.

    Args:
        program: the captured model.
        trained: names, in the user's module, of parameters that get a gradient.
    """
    sources = [value for value, name in program.parameters.items() if name in trained]
    active = active_values(program, program.outputs, sources)
    return sum(_gradients(program, op, active) * flops for op in program.operators if (flops := _forward(program, op)))


def _gradients(program: Program, op: Operator, active: frozenset[str]) -> int:
    """Return how many products an operator takes in a step: one forward, one for the gradient of each factor."""
    if not any(name in active for name in op.outputs):
        return 1
    carried = [name for name in op.inputs if name in active]  # x twice in x · x
    weights = any(name in program.parameters for name in carried)
    maps = sum(name not in program.parameters for name in carried)
    # A product has two factors.
    return 1 + min(2, maps + weights)


def _forward(program: Program, op: Operator) -> float:
    """Return the operations of an operator's forward, from a call on tensors without data."""
    values = [program.values[name] for name in op.inputs if name in program.values]
    if sum(len(value.shape) >= _FACTOR_DIMS and value.dtype.is_floating_point for value in values) < 2:
        return 0.0  # no product of two values
    args, kwargs = _without_data(program, op.args), _without_data(program, op.kwargs)
    # On the meta device operators compute shapes only, which is all that formulas of FLOPs read.
    with torch.no_grad(), _ProductCount() as count:
        try:
            op.target(*args, **kwargs)
        except (RuntimeError, TypeError):  # no kernel for tensors without data
            return 0.0
    return float(count.flops)


def _without_data(program: Program, value: Any) -> Any:
    """Return an operator's argument, nested or not, with each value replaced by a tensor on the meta device."""
    if isinstance(value, Ref):
        info = program.values[value.name]
        return torch.empty(info.shape, dtype=info.dtype, device="meta")
    if isinstance(value, Mapping):
        return {key: _without_data(program, item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_data(program, item) for item in value]
    return value


class _ProductCount(TorchDispatchMode):
    """Adds up the operations of the products that are called inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result
