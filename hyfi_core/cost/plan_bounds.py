"""Lower bounds of the steps of plans, from the operators of a model alone; nothing is lowered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from hyfi_core.capture.program import Program
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.operators import OperatorCost, operator_costs
from hyfi_core.plan.parallel_plan import ParallelPlan

Programs = Callable[[int], Program]
"""Returns the captured model for micro-batches of this number of images."""
_Seconds = dict[tuple[int, ...], float]
"""Height and width of a map -> time of the convolutions that compute such; (1, 1) stands for all other operators."""
ONE_IN_FLIGHT = ("gems_mast", "gems_master")
"""Schedules in which each direction has one micro-batch at a time."""
_CAPTURED_IMAGES = 2
"""Bounds of larger micro-batches are extrapolated from those of up to so many images."""


class PlanBounds:
    """Lower bounds of the steps of plans.

    A micro-batch takes W seconds on one rank, of which K for starting operators, which every rank of a stage does. With
    m micro-batches and stages of r₀, r₁ … ranks that take t₀, t₁ … seconds for each::

        m tₛ + Σ(j < s) tⱼ ≤ step        for every stage s, in one direction: it begins after those before it
        Σ rₛ tₛ ≥ W + min(r) K           the stages do all the work

    The step is at least (W + min(r) K) / Σ yₛ for any yₛ ≥ 0 with m yₛ + Σ(j > s) yⱼ ≥ rₛ. With GEMS schedules, each
    direction begins a micro-batch after the backward of the one before: at least W / max(r) + K for each.

    A convolution of a map of h x w on R x C ranks takes at least the time of the largest part, ceil(h/R) ceil(w/C), so
    W counts it R C ceil(h/R) ceil(w/C) / (h w) times, for the best grid: many ranks cannot divide a small map.

    Models are captured for two sizes of micro-batches only: an operator takes a time that is linear in the images, or
    the larger of two such, so their sum is convex, and larger sizes take at least what a straight line says.

    Args:
        programs: captures the model.
        batch: images of a step, over all replicas.
        ranks: of all replicas.
        machine: the machine model.
        dtype: of convolutions and matrix products under autocast; None: the dtype of their values.
    """

    def __init__(
        self, programs: Programs, batch: int, ranks: int, machine: MachineModel, dtype: str | None = None
    ) -> None:
        self._programs, self._batch = programs, batch
        self._machine, self._dtype = machine, dtype
        self._crowded = ranks > 1 and machine.devices_per_node > 1
        self._work: dict[int, tuple[_Seconds, float]] = {}
        self._totals: dict[tuple[int, frozenset[tuple[int, int]]], tuple[float, float]] = {}

    def of(self, plan: ParallelPlan) -> float:
        """Return the bound of a plan."""
        sizes = [rows * columns for rows, columns in plan.grids]
        images, grids = self._batch // plan.replicas // plan.microbatches, frozenset(plan.grids)
        if (images, grids) not in self._totals:
            by_map, kernels_s = self._of_microbatch(images)
            work_s = sum(seconds * min(_repeated(at, grid) for grid in grids) for at, seconds in by_map.items())
            self._totals[images, grids] = work_s, kernels_s
        work_s, kernels_s = self._totals[images, grids]
        total_s = work_s + min(sizes) * kernels_s
        if plan.schedule in ONE_IN_FLIGHT:
            return plan.microbatches / plan.directions * (work_s / max(sizes) + kernels_s)
        if plan.directions == 2:
            return plan.microbatches * total_s / sum(sizes)
        weights = 0.0
        for size in reversed(sizes):
            weights += max(0.0, size - weights) / plan.microbatches
        return total_s / weights

    def _of_microbatch(self, images: int) -> tuple[_Seconds, float]:
        """Return the least time of all operators on one rank, by map, and of their starting."""
        if images <= _CAPTURED_IMAGES:
            return self._captured(images)
        (low, _), (high, kernels_s) = self._captured(1), self._captured(_CAPTURED_IMAGES)
        more = (images - _CAPTURED_IMAGES) / (_CAPTURED_IMAGES - 1)
        return {at: seconds + more * (seconds - low.get(at, 0.0)) for at, seconds in high.items()}, kernels_s

    def _captured(self, images: int) -> tuple[_Seconds, float]:
        if images not in self._work:
            machine, crowded, program = self._machine, self._crowded, self._programs(images)
            bare = replace(machine, kernel_s=0.0)
            by_map: _Seconds = {}
            kernels_s = 0.0
            for op, cost in zip(program.operators, operator_costs(program, machine, self._dtype), strict=True):
                seconds = _least_s(cost, bare, crowded)
                at = program.values[op.first_output].shape[-2:] if cost.kind.endswith("convolution") else (1, 1)
                by_map[at] = by_map.get(at, 0.0) + seconds
                kernels_s += _least_s(cost, machine, crowded) - seconds
            self._work[images] = by_map, kernels_s
        return self._work[images]


def _repeated(size: tuple[int, ...], grid: tuple[int, int]) -> float:
    """Return the least pixels of the largest part times the ranks, relative to the map; 1 for what is not a map."""
    if size == (1, 1):
        return 1.0
    both = grid, grid[::-1]  # y and x of a map may have been exchanged
    return min(prod(ranks * -(-side // ranks) / side for side, ranks in zip(size, way, strict=True)) for way in both)


def _least_s(cost: OperatorCost, machine: MachineModel, crowded: bool) -> float:
    """Return the shortest time of an operator: for norms, of the faster kind."""
    kinds = ("norm", "shared_norm") if cost.kind == "norm" else (cost.kind,)
    return min(cost.forward_s(machine, 1.0, crowded, k) + cost.backward_s(machine, 1.0, crowded, k) for k in kinds)
