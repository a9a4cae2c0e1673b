"""Forecast of the memory of a training step on each rank, from shapes alone, to the peak.

    weights, moments       of all stages that a rank holds, always
    gradients              from the backward that makes them on
    waiting                micro-batches in flight: what they keep         `schedule.in_flight`
    running                what a backward holds, operator by operator     `cost.memory.lifetimes`

Of one rank without cells, PyTorch's profiler saw peaks of 0.97 to 1.02 times the forecast (ResNet-18 and 50,
AmoebaNet-D; one and two micro-batches). Halos and buffers of messages come in addition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np

from hyfi_core.capture.program import Operator, Program, refs_in
from hyfi_core.capture.stages import Stage, cut_program
from hyfi_core.cost.memory.lifetimes import Lifetimes, Peak
from hyfi_core.cost.operators import value_bytes
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.in_flight import Moment, fullest_moments

STATE_COPIES = 3
"""Tensors of a weight's size in addition to it: its gradient and two moments of the optimizer."""

UPDATE_COPIES = 2
"""Temporary tensors of the optimizer, of the size of the weight that it updates."""
PeakOrLeast = Literal["peak", "least"]
"""Memory at the peak, or the least: what is kept when a backward begins; with less, the run cannot work."""

FORECAST_OFF = {"cpu": 1.4, "cuda": 1.15}
"""A step's real peak is at most this many times the forecast. On a CPU a process keeps what is freed: measured 1.12 to
1.36 on one rank at 512 to 1024 px (ResNet-18 and 50, AmoebaNet-D), more where all maps together are small."""
SPILLING_OFF = 1.15
"""The same for a plan that spills: its forecast counts workspaces, and maps in memory are limited."""

PAGES_FACTOR = 2
"""Memory for pages of maps, in inputs and outputs of a cell's largest step: its pages, and those being transferred."""
WORKSPACE_FACTOR = 3
"""Memory for operators (kernels reorder maps), messages and allocators, in the same unit."""
WEIGHT_COPIES = 4
"""Of a step's weights, in cells: their gradient, and both in the kernels' own order."""
LIBRARY_BYTES = 64 << 20
"""What kernels need from their first run on: code, and buffers of matrix products."""
RECORD_BYTES = {True: 8 << 10, False: 1 << 10}
"""Whether there is backward -> bytes for each operator of a cell: objects of Python and autograd, sums; measured 6 KB
with backward."""
BORDERS = 1.25
"""Factor for halos and unequal parts of cells."""


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """Memory of one rank of a stage in training, in parts; ``rank_peaks`` adds them up.

    Attributes:
        state_bytes: weights, gradients and optimizer state of the stage.
        saved_bytes: what one micro-batch keeps for backward.
        working_bytes: inputs and outputs of the largest operator.
        waiting_bytes: what a micro-batch keeps while it waits for its backward: with recomputation, only the inputs of
            the stage; else ``saved_bytes``.
        first_bytes: peak of the first backward of a step: saved maps, cotangents, gradients so far.
        later_bytes: peak of a later backward, with all gradients.
        start_bytes: all weights, which a rank holds at start, before it releases those of other stages.
        largest_weight_bytes: the largest weight.
        operators: number of operators.
        gradients_stay: whether gradients stay in memory between steps, in the buckets of their reduction.
        between_bytes: what a micro-batch keeps between the two parts of its backward.
    """

    state_bytes: int
    saved_bytes: int
    working_bytes: int
    waiting_bytes: int
    first_bytes: int
    later_bytes: int
    start_bytes: int = 0
    largest_weight_bytes: int = 0
    operators: int = 0
    gradients_stay: bool = False
    between_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Weights of the stage."""
        return self.state_bytes // (1 + STATE_COPIES)

    @property
    def written_bytes(self) -> int:
        """Weights and optimizer state of the stage: what a checkpoint contains, and a rank always holds."""
        return self.weight_bytes * STATE_COPIES

    def backward_bytes(self, gradients: bool, way: PeakOrLeast) -> int:
        """Return what a micro-batch holds while its backward runs, gradients included.

        Args:
            gradients: whether gradients of earlier micro-batches exist.
            way: whether to count the peak, or the least: only what is kept when the backward begins.
        """
        if way == "peak":
            return self.later_bytes if gradients else self.first_bytes
        return self.saved_bytes + gradients * self.weight_bytes

    def spilled_bytes(self, cells: int) -> int:
        """Return the least memory of a rank that spills all it can, with this number of cells; see ``cells.budget``."""
        working = int(BORDERS * self.working_bytes / cells)
        records = LIBRARY_BYTES + cells * self.operators * RECORD_BYTES[True]
        return (
            self.state_bytes
            + records
            + (PAGES_FACTOR + WORKSPACE_FACTOR) * working
            + WEIGHT_COPIES * self.largest_weight_bytes
        )


def held_bytes(forecasts: Sequence[MemoryForecast], moments: Iterable[Moment], way: PeakOrLeast = "peak") -> int:
    """Return the largest number of bytes that a rank holds in a step; an array if the forecasts have arrays.

    Args:
        forecasts: the forecast of each stage that the rank holds.
        moments: what the rank does when it may hold the most, stage by stage in the order of ``forecasts``.
        way: whether to count the peak, or the least: only what is kept when a backward begins.
    """
    # During the update no maps are left, but the optimizer's temporary tensors of one weight.
    update = sum(forecast.state_bytes for forecast in forecasts)
    if way == "peak":
        update += UPDATE_COPIES * max_of(forecast.largest_weight_bytes for forecast in forecasts)
    always, totals = sum(forecast.written_bytes for forecast in forecasts), [update]
    for moment in moments:
        waits = sum(count * forecast.waiting_bytes for forecast, count in zip(forecasts, moment.waiting, strict=True))
        # ``between`` is empty while backwards are whole.
        waits += sum(count * forecast.between_bytes for forecast, count in zip(forecasts, moment.between, strict=False))
        gradients = [has or forecast.gradients_stay for forecast, has in zip(forecasts, moment.gradients, strict=True)]
        # Gradients of other stages on this rank; those of the running one are in its own peak.
        other_weights = sum(
            forecasts[at].weight_bytes for at, has in enumerate(gradients) if has and at != moment.running
        )
        runs = forecasts[moment.running].backward_bytes(gradients[moment.running], way)
        totals.append(always + waits + other_weights + runs)
    return max_of(totals)


def max_of(sizes: Iterable[int]) -> int:
    """Return the largest number; with arrays, the maximum element by element."""
    return reduce(lambda a, b: max(a, b) if isinstance(a, int) and isinstance(b, int) else np.maximum(a, b), sizes)


def rank_peaks(plan: ParallelPlan, stages: Sequence[MemoryForecast], way: PeakOrLeast = "peak") -> tuple[int, ...]:
    """Return the peak bytes of each rank of a plane, at start or in a step, in addition to the process itself.

    Args:
        plan: with as many stages; without cells.
        stages: forecast for each stage.
        way: whether to count the peak, or the least: only what is kept when a backward begins.
    """
    placement, moments = Placement.of(plan), fullest_moments(plan)
    # Ranks that hold the same stages have the same peak; at start, a rank has the whole model.
    peak_of = {
        hosted: max(stages[0].start_bytes, held_bytes([stages[stage] for stage, _ in hosted], fullest, way))
        for hosted, fullest in moments.items()
    }
    return tuple(peak_of[placement.hosted(rank)] for rank in range(placement.size))


def enough_gb(needed_bytes: int) -> str:
    """Return an amount in GB, rounded up to four digits, so that the amount shown is enough."""
    unit = 10 ** max(0, len(str(needed_bytes)) - 4)
    return f"{-(-needed_bytes // unit) * unit / 1e9:.4g}"


@dataclass(frozen=True, slots=True)
class StageMaps:
    """Bytes of a stage that do not depend on grids, schedule and recomputation; maps are those of one micro-batch.

    Attributes:
        weights: all weights of the stage.
        all_weights: the weights of all stages.
        largest_weight: the largest weight of the stage.
        saved: what its forward keeps for backward.
        taken: its inputs: values of other stages, or the image.
        working: what the largest operator reads and writes.
        operators: number of operators, not bytes.
        first: peak of its first backward of a step, without weights and moments.
        later: peak of a later backward, without weights and moments.
        between: what it keeps between the two parts of a backward.
        first_in_two: as ``first``, of a backward in two parts.
        later_in_two: as ``later``, of a backward in two parts.
    """

    weights: int
    all_weights: int
    largest_weight: int
    saved: int
    taken: int
    working: int
    operators: int
    first: Peak
    later: Peak
    between: int
    first_in_two: Peak
    later_in_two: Peak

    @classmethod
    def of(cls, program: Program, pieces: Sequence[Stage]) -> list[StageMaps]:
        """Return the bytes of each stage of a captured model, which ``pieces`` are."""
        lifetimes = Lifetimes(program)
        return [cls._of_stage(program, piece, lifetimes) for piece in pieces]

    @classmethod
    def _of_stage(cls, program: Program, piece: Stage, lifetimes: Lifetimes) -> StageMaps:
        """Return the bytes of the stage ``piece`` of the model ``program``."""
        operators = piece.program.operators
        weights = [value_bytes(program, name) for name in piece.program.parameters]
        entering = {name for names in piece.entries.values() for name in names}
        leaving = {*refs_in(piece.outputs), *(name for names in piece.exits.values() for name in names)}
        # By name: a value that several operators keep counts once.
        saved = {name: size for op in operators for name, size in lifetimes.of(op).kept.items()}
        carried = sum(value_bytes(program, name) for name in lifetimes.carried(entering))
        between = {name: size for op in operators for name, size in lifetimes.of(op).between.items()}
        first, later = lifetimes.of_stage(operators, leaving, carried)
        first_in_two, later_in_two = lifetimes.of_stage(operators, leaving, carried, in_two=True)
        return cls(
            weights=sum(weights),
            all_weights=sum(value_bytes(program, name) for name in program.parameters),
            largest_weight=max(weights, default=0),
            saved=sum(saved.values()),
            # The first stage takes the image.
            taken=sum(value_bytes(program, name) for name in entering or {program.image}),
            working=max((touched_bytes(program, op) for op in operators), default=0),
            operators=len(operators),
            first=first,
            later=later,
            between=sum(between.values()),
            first_in_two=first_in_two,
            later_in_two=later_in_two,
        )


def forecast_memory(
    program: Program, plan: ParallelPlan, stages: Sequence[StageMaps] | None = None
) -> tuple[MemoryForecast, ...]:
    """Return the memory forecast of a rank of each stage: maps are divided among its ranks, weights are not.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts.
        stages: the bytes of each stage; None: they are computed.
    """
    assert plan.cuts != "auto" or plan.stages == 1, "cuts must be resolved first"
    if stages is None:
        pieces = cut_program(program, program.outputs, () if plan.cuts == "auto" else plan.cuts)
        stages = StageMaps.of(program, pieces)
    forecasts, in_two = [], plan.divides_backwards
    for stage, (maps, (rows, columns)) in enumerate(zip(stages, Placement.of(plan).grids, strict=True)):
        ranks = rows * columns
        forecasts.append(
            MemoryForecast(
                state_bytes=(1 + STATE_COPIES) * maps.weights,
                saved_bytes=maps.saved // ranks,
                working_bytes=maps.working // ranks,
                waiting_bytes=(maps.taken if plan.recomputes(stage) else maps.saved) // ranks,
                first_bytes=(maps.first_in_two if in_two else maps.first).bytes(ranks),
                later_bytes=(maps.later_in_two if in_two else maps.later).bytes(ranks),
                start_bytes=maps.all_weights,
                largest_weight_bytes=maps.largest_weight,
                operators=maps.operators,
                # Where ranks reduce, gradients stay in the buckets of their messages.
                gradients_stay=plan.directions * plan.replicas * plan.branches * ranks > 1,
                between_bytes=maps.between // ranks if in_two else 0,
            )
        )
    return tuple(forecasts)


def touched_bytes(program: Program, op: Operator) -> int:
    """Return the bytes of an operator's input and output activations."""
    names = {*op.inputs, *(name for name in op.outputs if name is not None)}
    return sum(
        value_bytes(program, name) for name in names if name in program.values and name not in program.parameters
    )
