"""What a captured program costs, operator by operator, as far as shapes tell: time to cut stages by, memory to fit."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from hyfi_core.capture.program import Operator, Program

FLOPS_PER_S = 50e9
"""Multiply-adds count two. Only its ratio to the next two matters for a cut; these are of a few CPU cores."""
BYTES_PER_S = 10e9
LINK_BYTES_PER_S = 5e9

_PRODUCTS = ("aten.conv", "aten.convolution", "aten.linear", "aten.mm", "aten.addmm", "aten.matmul", "aten.bmm")


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """What one operator costs on the whole map.

    Attributes:
        seconds: of its forward.
        output_bytes: of what it makes.
    """

    seconds: float
    output_bytes: int


def operator_costs(program: Program) -> tuple[OperatorCost, ...]:
    """Return the cost of every operator, in order: products by their flops, all else by the bytes they touch."""
    return tuple(_cost(program, op) for op in program.operators)


def value_bytes(program: Program, name: str) -> int:
    """Return the bytes of a whole value."""
    info = program.values[name]
    return prod(info.shape) * info.dtype.itemsize


def _cost(program: Program, op: Operator) -> OperatorCost:
    made = [name for name in op.outputs if name is not None]
    made_bytes = sum(value_bytes(program, name) for name in made)
    touched = made_bytes + sum(value_bytes(program, name) for name in op.inputs if name in program.values)
    seconds = touched / BYTES_PER_S
    if op.text.startswith(_PRODUCTS) and made:
        seconds += _flops(program, op, made[0]) / FLOPS_PER_S
    return OperatorCost(seconds, made_bytes)


def _flops(program: Program, op: Operator, output: str) -> float:
    """Return 2 x outputs x the numbers that each is summed over: the weight's size over its output channels."""
    weights = [
        program.values[n].shape for n in op.inputs if n in program.parameters and len(program.values[n].shape) > 1
    ]
    shape = weights[0] if weights else program.values[op.inputs[-1]].shape
    return 2.0 * prod(program.values[output].shape) * prod(shape) / max(1, shape[0])
