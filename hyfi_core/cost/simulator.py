"""A training step that is not run: the schedule's dry run with the times of a machine.

All replicas do the same at the same time, and so do the ranks of a stage: one rank stands for each stage of one
replica. Two directions whose grids are not the same read backwards share ranks in part; there every rank is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from hyfi_core.capture.program import Program
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.memory import MemoryForecast, forecast_memory
from hyfi_core.cost.stage_cost import StageCosts
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.lower import lower
from hyfi_core.schedule.simulate import Costs, Simulation, simulate
from hyfi_core.schedule.trace import TraceEvent


@dataclass(frozen=True)
class StepForecast:
    """What a training step will take.

    Attributes:
        plan: whose step.
        step_s: from its beginning until the weights are new.
        busy: share of the step in which ranks run a forward or a backward, on the average.
        bubble: share of the ranks' time, until the last backward ends, in which they run neither.
        exposed_s: by kind (halo, sums, stage, reduce) what communication adds to the step of the slowest stage.
        memory_bytes: for each rank of a replica what it needs at its peak, beside its process.
        compute_s: for each stage, forward and backward of all micro-batches, without what it waits for inside.
        simulation: the dry run.
    """

    plan: ParallelPlan
    step_s: float
    busy: float
    bubble: float
    exposed_s: Mapping[str, float]
    memory_bytes: tuple[int, ...]
    compute_s: tuple[float, ...]
    simulation: Simulation

    @property
    def bound_by(self) -> str:
        """What most of the step goes to: ``compute``, ``bubble``, or a kind of communication."""
        shares = {"compute": max(self.compute_s), "bubble": self.bubble * self.step_s, **self.exposed_s}
        return max(shares, key=lambda name: shares[name])

    def images_per_s(self, batch: int) -> float:
        """Return the images of all replicas a second; ``batch``: those of one step, of all replicas."""
        return batch / self.step_s

    def events(self) -> tuple[TraceEvent, ...]:
        """Return what happens when, for a trace."""
        return self.simulation.events


def forecast_step(
    program: Program, plan: ParallelPlan, machine: MachineModel, dtype: str | None = None
) -> StepForecast:
    """Return what a step of a plan takes.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts and cells.
        machine: what things cost.
        dtype: that products compute in under autocast; None: that of their values.

    Raises:
        RequestError: the model cannot be run by this plan.
        ScheduleError: its schedule dead-locks.
    """
    costs = StageCosts(program, plan, machine, dtype)
    small = _collapsed(plan)
    placement = Placement.of(small)
    durations = Costs(
        forward_s=lambda stage: costs.stages[stage].forward_s,
        backward_s=lambda stage: costs.stages[stage].backward_s,
        reduce_s=lambda stage: costs.stages[stage].reduce_s,
        edge_s=costs.edges,
    )
    found = _run(small, placement, costs, durations)
    quick = _run(small, placement, costs, replace(durations, edge_s=dict.fromkeys(costs.edges, 0.0)))
    update_s = max(stage.update_s for stage in costs.stages)
    step_s = found.makespan_s + update_s
    rounds = plan.microbatches
    slowest = max(costs.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    computed_s = max((event.end_s for event in found.events if event.kind in ("F", "B")), default=0.0)
    exposed_s = {
        "halo": rounds * slowest.halo_s,
        "sums": rounds * slowest.sums_s,
        "stage": max(0.0, found.makespan_s - quick.makespan_s),
        "reduce": max(0.0, found.makespan_s - computed_s),
    }
    return StepForecast(
        plan,
        step_s,
        sum(found.busy_s) / len(found.busy_s) / step_s,
        found.bubble,
        exposed_s,
        _rank_bytes(plan, forecast_memory(program, plan)),
        tuple(rounds * (s.forward_s + s.backward_s - s.halo_s - s.sums_s) for s in costs.stages),
        found,
    )


def _collapsed(plan: ParallelPlan) -> ParallelPlan:
    """Return a plan of one replica whose dry run takes as long: one rank for each grid, where they are alike."""
    small = replace(plan, replicas=1, shares=None, cells=None, spill=None)
    sizes = [prod(grid) for grid in plan.grids]
    if plan.directions == 2 and sizes != sizes[::-1]:
        return small
    return replace(small, grids=((1, 1),) * len(plan.grids))


def _run(plan: ParallelPlan, placement: Placement, costs: StageCosts, durations: Costs) -> Simulation:
    edges = tuple(costs.edges)
    lowered = lower(generate(plan, placement), placement, edges, mirror=plan.mirror)
    return simulate(lowered, placement, edges, mirror=plan.mirror, microbatches=plan.microbatches, costs=durations)


def _rank_bytes(plan: ParallelPlan, stages: tuple[MemoryForecast, ...]) -> tuple[int, ...]:
    """Return what the ranks of a replica need; those of two directions hold what both do."""
    placement, needed = Placement.of(plan), [_stage_bytes(plan, stage) for stage in stages]
    return tuple(sum(needed[stage] for stage, _ in placement.hosted(rank)) for rank in range(placement.size))


def _stage_bytes(plan: ParallelPlan, stage: MemoryForecast) -> int:
    """Return a rank's peak; cells share what an operator works with, and with spilling what is kept."""
    cells = plan.cell_grid
    if cells is None:
        return stage.total_bytes
    working = stage.working_bytes // prod(cells)
    if plan.spill is not None:
        return max(plan.memory_bytes or 0, stage.state_bytes + 5 * working)
    return stage.state_bytes + stage.saved_bytes + working
