"""Lower bounds of the steps of plans, from the operators of a model alone; nothing is lowered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hyfi_core.capture.program import Program
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.operators import OperatorCost, operator_costs
from hyfi_core.plan.parallel_plan import ParallelPlan

Programs = Callable[[int], Program]
"""Returns the captured model for micro-batches of this number of images."""
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
        self._work: dict[int, tuple[float, float]] = {}

    def of(self, plan: ParallelPlan) -> float:
        """Return the bound of a plan."""
        sizes = [rows * columns for rows, columns in plan.grids]
        work_s, kernels_s = self._of_microbatch(self._batch // plan.replicas // plan.microbatches)
        total_s = work_s + min(sizes) * kernels_s
        if plan.schedule in ONE_IN_FLIGHT:
            return plan.microbatches / plan.directions * (work_s / max(sizes) + kernels_s)
        if plan.directions == 2:
            return plan.microbatches * total_s / sum(sizes)
        weights = 0.0
        for size in reversed(sizes):
            weights += max(0.0, size - weights) / plan.microbatches
        return total_s / weights

    def _of_microbatch(self, images: int) -> tuple[float, float]:
        """Return the least time of all operators on one rank, and of their starting."""
        if images <= _CAPTURED_IMAGES:
            return self._captured(images)
        low, high = self._captured(1), self._captured(_CAPTURED_IMAGES)
        slope = (high[0] - low[0]) / (_CAPTURED_IMAGES - 1)
        return high[0] + slope * (images - _CAPTURED_IMAGES), high[1]

    def _captured(self, images: int) -> tuple[float, float]:
        if images not in self._work:
            machine, crowded = self._machine, self._crowded
            costs = operator_costs(self._programs(images), machine, self._dtype)
            bare = replace(machine, kernel_s=0.0)
            work_s = sum(_least_s(cost, bare, crowded) for cost in costs)
            self._work[images] = work_s, sum(_least_s(cost, machine, crowded) for cost in costs) - work_s
        return self._work[images]


def _least_s(cost: OperatorCost, machine: MachineModel, crowded: bool) -> float:
    """Return the shortest time of an operator: for norms, of the faster kind."""
    kinds = ("norm", "shared_norm") if cost.kind == "norm" else (cost.kind,)
    return min(cost.forward_s(machine, 1.0, crowded, k) + cost.backward_s(machine, 1.0, crowded, k) for k in kinds)
