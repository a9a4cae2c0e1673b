"""What a captured program costs, operator by operator, as far as shapes tell: time, and memory to fit."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from hyfi_core.capture.program import Operator, Program
from hyfi_core.capture.stages import active_values
from hyfi_core.cost.machine import DEFAULT_MACHINE, PRODUCTS, MachineModel

_PRODUCTS = ("aten.conv", "aten.convolution", "aten.linear", "aten.mm", "aten.addmm", "aten.matmul", "aten.bmm")
_VIEWS = tuple(
    f"aten.{name}."
    for name in (
        *("view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose"),
        *("t", "expand", "slice", "select", "split", "split_with_sizes", "chunk", "alias", "detach"),
    )
)
_THIN = 16
"""With fewer input channels than this a convolution leaves lanes idle."""


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Cost of one operator on the whole map.

    Attributes:
        kind: one of ``KINDS``, or ``view`` where nothing is computed.
        dtype: that it computes in.
        flops: of its forward; 0 where only memory counts.
        touched_bytes: that it reads and writes.
        output_bytes: of what it makes.
        gradients: how many it computes, each as costly as its forward: of its map, of its weights.
        seconds: of its forward, on the machine that was asked for.
    """

    kind: str
    dtype: str
    flops: float
    touched_bytes: int
    output_bytes: int
    gradients: int
    seconds: float

    def forward_s(self, machine: MachineModel, share: float, crowded: bool, kind: str | None = None) -> float:
        """Return the seconds of the forward on a part of the map.

        Args:
            machine: what things cost.
            share: of the map.
            crowded: whether all devices of a node compute.
            kind: instead of the operator's own.
        """
        if self.kind == "view":
            return 0.0
        work = self.flops * share, self.touched_bytes * share
        return machine.kernel_s + machine.operator_s(*work, kind or self.kind, self.dtype, crowded=crowded)

    def backward_s(self, machine: MachineModel, share: float, crowded: bool, kind: str | None = None) -> float:
        """Return the seconds of the backward; as for ``forward_s``."""
        if self.kind == "view" or not self.gradients:
            return 0.0
        count = self.gradients if self.kind in PRODUCTS else 1
        work = count * self.flops * share, count * self.touched_bytes * share
        seconds = machine.operator_s(*work, kind or self.kind, self.dtype, backward=True, crowded=crowded)
        return count * machine.kernel_s + seconds


def operator_costs(
    program: Program,
    machine: MachineModel = DEFAULT_MACHINE,
    dtype: str | None = None,
    active: frozenset[str] | None = None,
) -> tuple[OperatorCost, ...]:
    """Return the cost of every operator, in order: products by flops or bytes, all else by the bytes they touch.

    Args:
        program: the captured model.
        machine: what things cost.
        dtype: that products compute in, where autocast casts; None: that of their values.
        active: the values that carry gradients; None: all between the parameters and the program's outputs.
    """
    if active is None:
        active = active_values(program, program.outputs, program.parameters)
    return tuple(_cost(program, op, machine, active, dtype) for op in program.operators)


def value_bytes(program: Program, name: str) -> int:
    """Return the bytes of a whole value."""
    info = program.values[name]
    return prod(info.shape) * info.dtype.itemsize


def _cost(
    program: Program, op: Operator, machine: MachineModel, active: frozenset[str], dtype: str | None
) -> OperatorCost:
    made = [name for name in op.outputs if name is not None and name in program.values]
    made_bytes = sum(value_bytes(program, name) for name in made)
    taken = [name for name in op.inputs if name in program.values]
    kind = _kind(program, op) if made else "view"
    touched = 0 if kind == "view" else made_bytes + sum(value_bytes(program, name) for name in taken)
    flops = _flops(program, op, made[0]) if kind in PRODUCTS else 0.0
    own = str(program.values[made[0]].dtype).removeprefix("torch.") if made else "float32"
    computed = dtype if dtype is not None and kind in PRODUCTS else own
    if computed not in machine.peak_flops_per_s:
        computed = "float32"  # whole numbers and truth values
    carried = {name for name in taken if name in active}
    maps, weights = carried - set(program.parameters), carried & set(program.parameters)
    gradients = bool(maps) + bool(weights) if any(name in active for name in made) else 0
    seconds = 0.0 if kind == "view" else machine.operator_s(flops, touched, kind, computed)
    return OperatorCost(kind, computed, flops, touched, made_bytes, gradients, seconds)


def _kind(program: Program, op: Operator) -> str:
    if op.text.startswith(_VIEWS):
        return "view"
    if op.text.startswith("aten.conv"):
        channels = program.values[op.args[0].name].shape[1]
        weight = program.values[op.args[1].name].shape
        if weight[1] != channels:
            return "grouped_convolution"
        if prod(weight[2:]) == 1:
            return "pointwise_convolution"
        return "thin_convolution" if channels < _THIN else "convolution"
    if op.text.startswith(_PRODUCTS):
        return "product"
    return next((kind for kind in ("norm", "pool") if kind in op.text), "elementwise")


def _flops(program: Program, op: Operator, output: str) -> float:
    """Return 2 x outputs x summands of each output (the weight's size over its output channels)."""
    weights = [
        program.values[n].shape for n in op.inputs if n in program.parameters and len(program.values[n].shape) > 1
    ]
    shape = weights[0] if weights else program.values[op.inputs[-1]].shape
    return 2.0 * prod(program.values[output].shape) * prod(shape) / max(1, shape[0])
