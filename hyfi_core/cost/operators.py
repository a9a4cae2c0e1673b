"""Cost of a captured program by operator, from shapes: time and output size."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from hyfi_core.capture.program import Operator, Program
from hyfi_core.cost.machine import DEFAULT_MACHINE, MachineModel

_PRODUCTS = ("aten.conv", "aten.convolution", "aten.linear", "aten.mm", "aten.addmm", "aten.matmul", "aten.bmm")


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Cost of one operator on the whole map.

    Attributes:
        seconds: of its forward.
        output_bytes: of its outputs.
    """

    seconds: float
    output_bytes: int


def operator_costs(program: Program, machine: MachineModel = DEFAULT_MACHINE) -> tuple[OperatorCost, ...]:
    """Return the cost of every operator, in order: of products by flops or bytes, of others by bytes."""
    return tuple(_cost(program, op, machine) for op in program.operators)


def value_bytes(program: Program, name: str) -> int:
    """Return the bytes of a whole value."""
    info = program.values[name]
    return prod(info.shape) * info.dtype.itemsize


def _cost(program: Program, op: Operator, machine: MachineModel) -> OperatorCost:
    made = [name for name in op.outputs if name is not None]
    made_bytes = sum(value_bytes(program, name) for name in made)
    touched = made_bytes + sum(value_bytes(program, name) for name in op.inputs if name in program.values)
    flops = _flops(program, op, made[0]) if op.text.startswith(_PRODUCTS) and made else 0.0
    return OperatorCost(machine.operator_s(flops, touched), made_bytes)


def _flops(program: Program, op: Operator, output: str) -> float:
    """Return 2 x outputs x summands of each output (the weight's size over its output channels)."""
    weights = [
        program.values[n].shape for n in op.inputs if n in program.parameters and len(program.values[n].shape) > 1
    ]
    shape = weights[0] if weights else program.values[op.inputs[-1]].shape
    return 2.0 * prod(program.values[output].shape) * prod(shape) / max(1, shape[0])
