"""The modelled cost of each operator of a captured program, from shapes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from hyfi_core.capture.program import Operator, Program
from hyfi_core.capture.stages import active_values
from hyfi_core.cost.machine import PRODUCTS, MachineModel
from hyfi_core.cost.machines.machine_file import reference_machine
from hyfi_core.rules.table import facts_of

_THIN = 16
"""With fewer input channels, a convolution leaves vector lanes idle."""


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Cost of one operator on the whole map.

    Attributes:
        kind: one of ``KINDS``, or ``view`` if nothing is computed.
        dtype: the dtype of the computation.
        flops: operations of its forward; 0 if it is bound by memory.
        touched_bytes: bytes that it reads and writes.
        output_bytes: bytes of its results.
        gradients: number of gradients in its backward: of the map, of weights.
        seconds: time of its forward on the machine that ``operator_costs`` was called with.
        weight_bytes: bytes of its weights, which are not divided with the map.
        forks: number of additions of cotangents of its results: n operators that use a result make n - 1.
        channels: the smaller of a convolution's input and output channels; 0: so many that it does not matter.
        of_weights: fraction of its backward that is left to the second part, if backwards have two parts; see
            ``lowering.weights_apart``.
    """

    kind: str
    dtype: str
    flops: float
    touched_bytes: int
    output_bytes: int
    gradients: int
    seconds: float
    weight_bytes: int = 0
    forks: int = 0
    channels: int = 0
    of_weights: float = 0.0

    def forward_s(self, machine: MachineModel, fraction: float, crowded: bool, kind: str | None = None) -> float:
        """Return the seconds of the forward on a part of the map.

        Args:
            machine: the machine model.
            fraction: size of the part, relative to the map.
            crowded: whether all devices of a node compute.
            kind: kind of operator to use instead of ``self.kind``.
        """
        if self.kind == "view":
            return 0.0
        kind = kind or self.kind
        flops, touched_bytes = self.flops * fraction, self.touched_bytes * fraction
        weights_s = machine.weights_s(self.weight_bytes, kind, crowded=crowded)  # kernels may rearrange weights first
        seconds = machine.operator_s(flops, touched_bytes, kind, self.dtype, crowded=crowded, channels=self.channels)
        return machine.call_s(kind) + seconds + weights_s

    def backward_s(self, machine: MachineModel, fraction: float, crowded: bool, kind: str | None = None) -> float:
        """Return the seconds of the backward on a part of the map; see ``forward_s``."""
        if self.kind == "view" or not self.gradients:
            return 0.0
        # A product computes each gradient by its own kernel, as large as the forward; others compute all in one pass.
        count = self.gradients if self.kind in PRODUCTS else 1
        flops, touched_bytes = count * self.flops * fraction, count * self.touched_bytes * fraction
        kind = kind or self.kind
        seconds = machine.operator_s(
            flops, touched_bytes, kind, self.dtype, backward=True, crowded=crowded, channels=self.channels
        )
        weights_s = machine.weights_s(self.weight_bytes, kind, backward=True, crowded=crowded)
        # Adding two cotangents reads both and writes their sum: three times the bytes of the result.
        added_s = machine.call_s("elementwise", backward=True) + machine.operator_s(
            0.0, 3 * self.output_bytes * fraction, "elementwise", self.dtype, backward=True, crowded=crowded
        )
        # Without ``overhead_s``, efficiencies were fitted to whole steps, and contain these additions.
        forks = self.forks if machine.overhead_s else 0
        return count * machine.call_s(kind, backward=True) + seconds + weights_s + forks * added_s


KnownCosts = dict[Hashable, OperatorCost]
"""Everything that the cost of an operator depends on -> its cost."""


def operator_costs(
    program: Program,
    machine: MachineModel | None = None,
    dtype: str | None = None,
    active: frozenset[str] | None = None,
    known: KnownCosts | None = None,
    sent: Iterable[str] = (),
) -> tuple[OperatorCost, ...]:
    """Return the cost of every operator, in order.

    Args:
        program: the captured model.
        machine: the machine model; None: the reference machine.
        dtype: of convolutions and matrix products under autocast; None: the dtype of their values.
        active: values that carry gradients; None: all between parameters and the program's outputs.
        known: cache of costs of the same model, machine and dtype; costs computed here are added.
        sent: values that other stages use, listed once for each such stage: each returns a cotangent, which is added.
    """
    machine = machine or reference_machine()
    if active is None:
        active = active_values(program, program.outputs, program.parameters)
    # Operators that add to a value's cotangent: those whose results carry gradients.
    users = Counter(name for op in program.operators if set(op.outputs) & active for name in set(op.inputs))
    users.update(sent)
    known = {} if known is None else known
    costs = []
    for op in program.operators:
        # -1 stands for a value without a cotangent.
        used = tuple(users.get(name, 0) if name in active else -1 for name in op.outputs if name is not None)
        # An operator's cost differs between stages by which of its values are used and carry gradients.
        key = op.name, op.outputs, op.inputs, used, tuple(name in active for name in op.inputs)
        if key not in known:
            known[key] = _cost(program, op, machine, active, dtype, users)
        costs.append(known[key])
    return tuple(costs)


def value_bytes(program: Program, name: str) -> int:
    """Return the bytes of a whole value."""
    info = program.values[name]
    return prod(info.shape) * info.dtype.itemsize


def _cost(
    program: Program,
    op: Operator,
    machine: MachineModel,
    active: frozenset[str],
    dtype: str | None,
    users: Mapping[str, int],
) -> OperatorCost:
    """Return the cost of an operator; see ``operator_costs``.

    Args:
        program: the captured model.
        op: the operator.
        machine: the machine model.
        active: values that carry gradients.
        dtype: of products under autocast; None: the dtype of their values.
        users: value -> number of operators that add to its cotangent.
    """
    outputs = [name for name in op.outputs if name is not None and name in program.values]
    made_bytes = sum(value_bytes(program, name) for name in outputs)
    inputs = [name for name in op.inputs if name in program.values]
    kind = _kind(program, op) if outputs else "view"
    touched = 0 if kind == "view" else made_bytes + sum(value_bytes(program, name) for name in inputs)
    flops = _flops(program, op, outputs[0]) if kind in PRODUCTS else 0.0
    own = str(program.values[outputs[0]].dtype).removeprefix("torch.") if outputs else "float32"
    computed = dtype if dtype is not None and kind in PRODUCTS else own
    # Machines have no rate for integers and booleans, which are moved, not multiplied.
    if computed not in machine.peak_flops_per_s:
        computed = "float32"
    carried = {name for name in inputs if name in active}
    maps, weights = carried - set(program.parameters), carried & set(program.parameters)
    gradients = bool(maps) + bool(weights) if any(name in active for name in outputs) else 0
    channels = _channels(program, op, kind)
    seconds = 0.0 if kind == "view" else machine.operator_s(flops, touched, kind, computed, channels=channels)
    # Of n users, n - 1 add their cotangent to another one.
    forks = sum(max(0, users.get(name, 0) - 1) for name in outputs if name in active)
    weight_bytes = sum(value_bytes(program, name) for name in inputs if name in program.parameters)
    # A bias has one dim; its gradient is computed with that of the map.
    apart = gradients and kind in PRODUCTS and any(len(program.values[name].shape) > 1 for name in weights)
    return OperatorCost(
        kind=kind,
        dtype=computed,
        flops=flops,
        touched_bytes=touched,
        output_bytes=made_bytes,
        gradients=gradients,
        seconds=seconds,
        weight_bytes=weight_bytes,
        forks=forks,
        channels=channels,
        of_weights=1.0 / gradients if apart else 0.0,
    )


def _kind(program: Program, op: Operator) -> str:
    """Return the kind of an operator whose rates give its cost: one of ``KINDS``, or ``view``."""
    kind = facts_of(op).kind
    if kind in ("convolution", "transposed_convolution"):
        channels = program.values[op.args[0].name].shape[1]
        weight = program.values[op.args[1].name].shape
        if weight[1] != channels:
            return "grouped_convolution"
        if prod(weight[2:]) == 1:
            return "pointwise_convolution"
        return "thin_convolution" if channels < _THIN else "convolution"
    return "product" if kind in ("linear", "matmul") else kind


def _channels(program: Program, op: Operator, kind: str) -> int:
    """Return the smaller of a convolution's input and output channels; of a thin one, its output channels."""
    if kind not in ("convolution", "pointwise_convolution", "thin_convolution"):
        return 0
    inputs, outputs = (program.values[name].shape[1] for name in (op.args[0].name, op.first_output))
    return int(outputs if kind == "thin_convolution" else min(inputs, outputs))


def _flops(program: Program, op: Operator, output: str) -> float:
    """Return the operations of a product: 2 x numbers in its output x multiply-adds for each of them.

    A transposed convolution has 2 x numbers in its input x multiply-adds for each of them. Plain arithmetic, because
    planning calls this thousands of times; ``model_flops`` counts any product by calling it.
    """
    kind = facts_of(op).kind
    factor = program.values[op.args[-1 if kind == "matmul" else 1].name].shape  # addmm has its two factors last
    if kind == "transposed_convolution":
        return 2.0 * prod(program.values[op.args[0].name].shape) * prod(factor[1:])
    if kind == "matmul":
        return 2.0 * prod(program.values[output].shape) * factor[-2 if len(factor) > 1 else -1]
    return 2.0 * prod(program.values[output].shape) * prod(factor[1:])
