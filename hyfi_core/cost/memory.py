"""Forecast of the memory of a training step on each rank, from shapes alone.

It counts a stage's weights with their gradients and optimizer state, activations saved for backward, and the working
set of the largest operator. Measured on ResNets of 6 to 50 layers at 512 to 1024 px in float32, a step's real peak is
0.75 to 1.15 times the sum; `at_least_bytes`, the first two alone, never exceeded the measured peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hyfi_core.capture.program import Operator, Program
from hyfi_core.capture.stages import Stage, cut_program
from hyfi_core.cost.operators import value_bytes
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement

STATE_COPIES = 3
"""Tensors of a weight's size in addition to it: its gradient and two moments of the optimizer."""

FORECAST_OFF = 1.15
"""A step's real peak is at most so many times the forecast."""

PAGES = 2
"""Times the inputs and outputs of a cell's largest step: its pages, and those being transferred."""
WORKSPACE = 3
"""Times the same: for operators (kernels reorder maps), messages, allocators."""
WEIGHT_COPIES = 4
"""Of a step's weights, in cells: their gradient, and both in the kernels' own order."""
LIBRARY_BYTES = 64 << 20
"""That kernels need from their first run on: code, and buffers of matrix products."""
STEP_BYTES = {True: 8 << 10, False: 1 << 10}
"""For each operator of a cell, with and without backward: objects of Python and autograd, sums; measured 6 KB with."""
BORDERS = 1.25
"""Factor for halos and unequal parts of cells."""

_SAVE_INPUTS = (
    *("aten.conv", "aten.batch_norm", "aten._native_batch_norm", "aten.group_norm", "aten.instance_norm"),
    *("aten.native_layer_norm", "aten.layer_norm", "aten.linear", "aten.addmm", "aten.mm", "aten.bmm", "aten.matmul"),
    *("aten.gelu", "aten.silu", "aten.hardswish", "aten.leaky_relu", "aten.mul", "aten.div", "aten.pow"),
)
_SAVE_OUTPUTS = ("aten.relu", "aten.sigmoid", "aten.tanh", "aten.softmax", "aten._softmax", "aten.max_pool2d")


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Memory of one rank of a stage in training.

    Attributes:
        state_bytes: weights, gradients and optimizer state of the stage.
        saved_bytes: activations kept for backward, of all micro-batches in flight.
        working_bytes: inputs, outputs and gradients of the largest operator.
        start_bytes: all weights, which a rank holds at start, before it releases those of other stages.
        largest_weight_bytes: weights of the operator that has most of them.
        operators: their number.
    """

    state_bytes: int
    saved_bytes: int
    working_bytes: int
    start_bytes: int = 0
    largest_weight_bytes: int = 0
    operators: int = 0

    @property
    def total_bytes(self) -> int:
        """Expected peak, in addition to the process's memory before the first step."""
        return self.state_bytes + self.saved_bytes + self.working_bytes

    @property
    def weight_bytes(self) -> int:
        """Weights of the stage."""
        return self.state_bytes // (1 + STATE_COPIES)

    @property
    def written_bytes(self) -> int:
        """What a checkpoint has of the stage: weights and optimizer state."""
        return self.weight_bytes * STATE_COPIES

    @property
    def at_least_bytes(self) -> int:
        """Lower bound: with less, the run cannot work."""
        return self.state_bytes + self.saved_bytes

    def spilled_bytes(self, cells: int) -> int:
        """Return the least that so many cells need if everything that can is spilled; see `hyfi_core.cells.budget`."""
        working = int(BORDERS * self.working_bytes / cells)
        records = LIBRARY_BYTES + cells * self.operators * STEP_BYTES[True]
        return self.state_bytes + records + (PAGES + WORKSPACE) * working + WEIGHT_COPIES * self.largest_weight_bytes


def enough_gb(needed_bytes: int) -> str:
    """Return an amount in GB, rounded up to four digits, so that whoever gives as much gives enough."""
    unit = 10 ** max(0, len(str(needed_bytes)) - 4)
    return f"{-(-needed_bytes // unit) * unit / 1e9:.4g}"


def microbatches_in_flight(plan: ParallelPlan, stage: int) -> int:
    """Return the most micro-batches of a stage and direction between forward and backward, as published."""
    if plan.schedule == "gpipe":
        return plan.microbatches
    if plan.schedule in ("1f1b", "chimera"):
        return min(plan.stages - stage, plan.microbatches // plan.directions)
    return 1


@dataclass(frozen=True, slots=True)
class StageMaps:
    """Bytes of a stage that do not depend on grids, schedule and recomputation.

    Attributes:
        weights: of the stage.
        all_weights: of all stages.
        largest_weight: of its parameters.
        saved: what backward needs again, of one micro-batch.
        taken: what it receives from other stages, and the image.
        working: what the largest operator reads and writes.
        operators: their number.
    """

    weights: int
    all_weights: int
    largest_weight: int
    saved: int
    taken: int
    working: int
    operators: int

    @classmethod
    def of(cls, program: Program, piece: Stage) -> StageMaps:
        """Return those of a stage of a captured model."""
        operators = piece.program.operators
        weights = [value_bytes(program, name) for name in piece.program.parameters]
        taken = {name for names in piece.entries.values() for name in names} or {program.image}
        return cls(
            sum(weights),
            sum(value_bytes(program, name) for name in program.parameters),
            max(weights, default=0),
            sum(value_bytes(program, name) for name in saved_values(program, operators)),
            sum(value_bytes(program, name) for name in taken),
            max((touched_bytes(program, op) for op in operators), default=0),
            len(operators),
        )


def forecast_memory(
    program: Program, plan: ParallelPlan, stages: Sequence[StageMaps] | None = None
) -> tuple[MemoryForecast, ...]:
    """Return the memory forecast of a rank of each stage.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts.
        stages: of the plan, if they are known.
    """
    assert plan.cuts != "auto" or plan.stages == 1, "cuts must be resolved first"
    if stages is None:
        pieces = cut_program(program, program.outputs, () if plan.cuts == "auto" else plan.cuts)
        stages = [StageMaps.of(program, piece) for piece in pieces]
    found = []
    for stage, (maps, (rows, columns)) in enumerate(zip(stages, Placement.of(plan).grids, strict=True)):
        ranks, in_flight = rows * columns, microbatches_in_flight(plan, stage)
        # With recomputation, other micro-batches keep only what the stage takes.
        saved = maps.saved + (in_flight - 1) * maps.taken if plan.recomputes(stage) else maps.saved * in_flight
        state = (1 + STATE_COPIES) * maps.weights
        parts = saved // ranks, maps.working // ranks
        found.append(MemoryForecast(state, *parts, maps.all_weights, maps.largest_weight, maps.operators))
    return tuple(found)


def saved_values(program: Program, operators: Iterable[Operator]) -> set[str]:
    """Return the values that backward needs again, each once."""
    kept = {*program.parameters, *program.buffers, *program.constants}
    found: set[str] = set()
    for op in operators:
        if op.text.startswith(_SAVE_INPUTS):
            found |= {name for name in op.inputs if name in program.values and name not in kept}
        if op.text.startswith(_SAVE_OUTPUTS):
            found |= {name for name in op.outputs if name is not None}
    return found


def touched_bytes(program: Program, op: Operator) -> int:
    """Return the bytes of an operator's input and output activations."""
    names = {*op.inputs, *(name for name in op.outputs if name is not None)}
    return sum(
        value_bytes(program, name) for name in names if name in program.values and name not in program.parameters
    )
