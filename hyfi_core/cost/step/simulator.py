"""Forecast of a training step: the dry run of its schedule, with durations from the machine model.

All replicas do the same at the same time, and so do all ranks of a stage, so one rank is simulated for each stage of
one replica. With two directions and grids that are not the same from both ends, stages have some ranks in common; then
all ranks are simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import prod

from hyfi_core.capture.program import Program
from hyfi_core.cost.machine import MachineModel
from hyfi_core.cost.memory.forecast import MemoryForecast, StageMaps, forecast_memory, rank_peaks
from hyfi_core.cost.memory.resident import kept_bytes
from hyfi_core.cost.search.plan_bounds import ONE_IN_FLIGHT
from hyfi_core.cost.step.lowered_stages import LoweredPlans
from hyfi_core.cost.step.shared_cores import on_shared_cores
from hyfi_core.cost.step.spilling import SpillRule
from hyfi_core.cost.step.stage_cost import StageCosts
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import COMPUTE, Schedule
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.in_flight import fullest_moments
from hyfi_core.schedule.lower import lower
from hyfi_core.schedule.simulate import Costs, Simulation, simulate
from hyfi_core.schedule.trace import TraceEvent


@dataclass(frozen=True)
class StepForecast:
    """Modelled time and memory of a training step.

    Attributes:
        plan: the plan of the step.
        step_s: duration, including the optimizer step.
        busy: average fraction of the step in which a rank runs a forward or a backward.
        bubble: fraction of all ranks' time, until the last backward ends, in which they run neither.
        exposed_s: kind of communication (halo, sums, branches, spill, stage, reduce) -> time that it adds to the
            slowest stage.
        memory_bytes: for each rank of a replica, the memory that it needs at the peak, in addition to the process.
        resident_bytes: for each rank, growth of its process to the peak: on a CPU with what heap and kernels keep.
        compute_s: for each stage, time of all forwards and backwards, without waits within the stage.
        simulation: the dry run.
        moving_s: time in which maps of the slowest stage leave memory and come back, mostly while others are computed.
        moved_bytes: bytes of these maps on one rank, out of memory and back together.
        recomputing_s: time of maps that are computed again instead of leaving memory; contained in ``compute_s``.
    """

    plan: ParallelPlan
    step_s: float
    busy: float
    bubble: float
    exposed_s: Mapping[str, float]
    memory_bytes: tuple[int, ...]
    resident_bytes: tuple[int, ...]
    compute_s: tuple[float, ...]
    simulation: Simulation
    moving_s: float = 0.0
    moved_bytes: float = 0.0
    recomputing_s: float = 0.0

    @property
    def bound_by(self) -> str:
        """What takes the largest part of the step: ``compute``, ``bubble``, or a kind of communication.

        If computing waits for maps to be moved, all of their moving counts, not only what is exposed.
        """
        parts = {"compute": max(self.compute_s), "bubble": self.bubble * self.step_s, **self.exposed_s}
        parts["spill"] = self.moving_s if self.exposed_s["spill"] else 0.0
        return max(parts, key=lambda name: parts[name])

    def images_per_s(self, batch: int) -> float:
        """Return the images per second, for steps of ``batch`` images over all replicas."""
        return batch / self.step_s

    def events(self) -> tuple[TraceEvent, ...]:
        """Return the events of the dry run, for a trace."""
        return self.simulation.events


def forecast_step(
    program: Program,
    plan: ParallelPlan,
    machine: MachineModel,
    dtype: str | None = None,
    lowered_plans: LoweredPlans | None = None,
    spills: SpillRule | None = None,
) -> StepForecast:
    """Return the forecast of a training step.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts, and with cells resolved.
        machine: the machine model.
        dtype: of convolutions and matrix products under autocast; None: the dtype of their values.
        lowered_plans: stages of earlier calls with the same programs and machine; those of this plan are added.
        spills: computes what leaves memory with ``plan.spill``; None: the time of moving is not counted.

    Raises:
        RequestError: the plan does not work for this model.
        ScheduleError: its schedule deadlocks.
    """
    costs = StageCosts(program, plan, machine, dtype, lowered_plans, spills=spills)
    run = _dry_run(plan, costs)
    # Once more with messages that take no time: the difference is what they cost.
    quick = _dry_run(plan, costs, free_messages=True) if any(costs.edges.values()) else run
    step_s = run.makespan_s + _update_s(plan, costs)
    rounds = plan.microbatches
    slowest = max(costs.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    computed_s = max((event.end_s for event in run.events if event.kind in COMPUTE), default=0.0)
    exposed_s = {
        "halo": rounds * slowest.halo_s,
        "sums": rounds * slowest.sums_s,
        "branches": rounds * slowest.branch_s,
        "spill": rounds * slowest.spilled.exposed_s,
        "stage": max(0.0, run.makespan_s - quick.makespan_s),
        "reduce": max(0.0, run.makespan_s - computed_s),
    }
    return StepForecast(
        plan=plan,
        step_s=step_s,
        busy=sum(run.busy_s) / len(run.busy_s) / step_s,
        bubble=run.bubble,
        exposed_s=exposed_s,
        memory_bytes=rank_bytes(program, plan),
        resident_bytes=grown_bytes(program, plan, machine.device),
        compute_s=tuple(rounds * stage.computing_s for stage in costs.stages),
        simulation=run,
        moving_s=rounds * slowest.spilled.moving_s,
        moved_bytes=rounds * slowest.spilled.moved_bytes,
        recomputing_s=rounds * slowest.spilled.again_s,
    )


def step_s(plan: ParallelPlan, costs: StageCosts) -> float:
    """Return the duration of a step, without the rest of ``forecast_step``."""
    return _dry_run(plan, costs).makespan_s + _update_s(plan, costs)


def least_step_s(plan: ParallelPlan, each_s: Sequence[float], update_s: float) -> float:
    """Return a lower bound of ``step_s`` without a dry run.

    A rank computes all micro-batches of all stages that it holds. In one direction, a stage begins after the stages
    before it have computed a micro-batch, and these end after it: their last backward needs its cotangent (unless
    gradients of weights come later). With ``sequential`` and ``gems_master``, each direction has one micro-batch at a
    time.

    Args:
        plan: the plan of the step.
        each_s: for each stage, time of a forward and a backward of one micro-batch, or a lower bound.
        update_s: time of the optimizer step.
    """
    rounds = plan.microbatches // plan.directions
    busy_s = max(sum(rounds * each_s[stage] for stage, _ in hosted) for hosted in fullest_moments(plan))
    # A stage begins after those before it, and they end their last backward after it.
    if plan.directions == 1 and plan.interleave == 1 and not plan.divides_backwards:
        before = accumulate(each_s, initial=0.0)
        busy_s = max(first_s + rounds * own_s for first_s, own_s in zip(before, each_s, strict=False))
    if plan.schedule in ONE_IN_FLIGHT:
        busy_s = max(busy_s, rounds * sum(each_s))
    return busy_s + update_s


def _update_s(plan: ParallelPlan, costs: StageCosts) -> float:
    """Return the seconds of the optimizer step, on the rank with the longest update."""
    placement = Placement.of(_collapsed(plan))
    # With point-to-point mirrors, the second direction receives its weights from the owner, and updates none.
    updated = [
        {stage for stage, direction in placement.hosted(rank) if direction == 0 or plan.mirror == "all_reduce"}
        for rank in range(placement.size)
    ]
    # ``watch_s``: every rank checks whether anything but the engine has changed weights.
    longest_s = costs.watch_s + max(sum(costs.stages[stage].update_s for stage in stages) for stages in updated)
    if costs.machine.cores is None:
        return longest_s
    # Ranks of a node that share cores take turns.
    nodes = -(-plan.ranks // costs.machine.devices_per_node)
    return longest_s * max(1.0, plan.ranks / nodes / costs.machine.cores.count)


def _collapsed(plan: ParallelPlan) -> ParallelPlan:
    """Return a plan whose dry run forecasts the same time: one replica and, if possible, one rank for each grid.

    Fields that do not change the order of actions have their defaults, so that many plans share one dry run.
    """
    small = ParallelPlan(
        plan.grids,
        cuts="auto",
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        interleave=plan.interleave,
        mirror=plan.mirror,
    )
    sizes = [prod(grid) for grid in plan.grids]
    if plan.directions == 2 and sizes != sizes[::-1]:
        return small  # the stages that a rank has in both directions depend on the sizes of the grids
    return replace(small, grids=((1, 1),) * len(plan.grids))


def _dry_run(plan: ParallelPlan, costs: StageCosts, free_messages: bool = False) -> Simulation:
    """Return the dry run of a step in modelled time.

    Args:
        plan: the plan of the step.
        costs: the costs of its stages.
        free_messages: whether messages between stages take no time.
    """
    # If possible with one rank in place of each stage's grid.
    small, edges = _collapsed(plan), tuple(costs.edges)
    copied_s = dict.fromkeys(edges, 0.0) if free_messages else _copied_s(plan, costs)
    # Copying needs a core at both ends of an edge, so it is a part of both stages' computation.
    at_ends_s = [sum(s for edge, s in copied_s.items() if stage in edge) for stage in range(len(costs.stages))]
    durations = Costs(
        forward_s=lambda stage: costs.stages[stage].forward_s + at_ends_s[stage],
        backward_s=lambda stage: costs.stages[stage].backward_s + at_ends_s[stage],
        reduce_s=lambda stage: costs.stages[stage].reduce_s,
        weight_s=lambda stage: costs.stages[stage].weight_s,
        edge_s={edge: 0.0 if free_messages else costs.edges[edge] - copied_s[edge] for edge in edges},
    )
    rounds, placement = small.microbatches, Placement.of(small)
    run = simulate(_actions(small, edges), placement, edges, mirror=small.mirror, microbatches=rounds, costs=durations)
    cores = costs.machine.cores
    if cores is None or not costs.machine.shared(plan.ranks):
        return run
    is_collapsed = placement.size < plan.ranks_per_plane
    # Ranks of a plane that each rank of the dry run stands for, and of a node.
    sizes = [prod(grid) for grid in plan.grids] if is_collapsed else [1] * placement.size
    nodes = -(-plan.ranks // costs.machine.devices_per_node)
    weights = [plan.replicas * plan.branches * size / nodes for size in sizes]
    return on_shared_cores(run, weights, cores)


def _copied_s(plan: ParallelPlan, costs: StageCosts) -> dict[tuple[int, int], float]:
    """Return (sending stage, receiving stage) -> seconds in which both copy a message, and need a core for it.

    0 unless ranks share cores: a rank with its own core has nothing else to do meanwhile.
    """
    if not costs.machine.shared(plan.ranks):
        return dict.fromkeys(costs.edges, 0.0)
    # The time of a message begins with the wait for other ranks on the same core, in which nothing is copied.
    core_wait_s = costs.machine.core_wait_s(plan.ranks)
    return {edge: message_s - core_wait_s for edge, message_s in costs.edges.items()}


@lru_cache(maxsize=64)  # plans with other cuts, grids and replicas have the same
def _actions(plan: ParallelPlan, edges: tuple[tuple[int, int], ...]) -> Schedule:
    placement = Placement.of(plan)
    return lower(generate(plan, placement), placement, edges, mirror=plan.mirror)


def rank_bytes(program: Program, plan: ParallelPlan, stages: Sequence[StageMaps] | None = None) -> tuple[int, ...]:
    """Return the peak memory of each rank of a replica, without what its process takes anyway.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts, and with cells resolved.
        stages: the bytes of each stage; None: they are computed.
    """
    plane_bytes = _plane_bytes(plan, forecast_memory(program, plan, stages))
    # Ranks are numbered plane by plane. An upper bound: as if each plane had all branches.
    return plane_bytes * plan.branches


def grown_bytes(program: Program, plan: ParallelPlan, device: str) -> tuple[int, ...]:
    """Return the bytes by which the process of each rank of a replica grows: on a CPU with what heap and messages keep.

    Args:
        program: the captured model, of one micro-batch.
        plan: with named cuts, and with cells resolved.
        device: cpu or cuda.
    """
    if device != "cpu":
        return rank_bytes(program, plan)
    # A heap returns the memory of whole maps to the system, so gradients do not fit where these were: count them as if
    # they stayed in memory.
    # With cells, which free parts of maps one after the other, they find room: for 2 and 4 cells 335 and 328 MB were
    # measured, 365 and 357 are forecast, and would be 400 with gradients that stay.
    stays = plan.cells is None
    stages = [replace(stage, gradients_stay=stage.gradients_stay or stays) for stage in forecast_memory(program, plan)]
    placement, plane_bytes, grown = Placement.of(plan), _plane_bytes(plan, stages), []
    states = [sum(stages[stage].state_bytes for stage, _ in placement.hosted(rank)) for rank in range(placement.size)]
    maps = [max(0, needs - state) for needs, state in zip(plane_bytes, states, strict=True)]
    for needs, of_maps, kept_by_rank in zip(plane_bytes, maps, kept_bytes(program, plan, maps), strict=True):
        # What is not maps, this plane's share of the maps, and what heap and messages keep.
        grown.append(kept_by_rank + needs - of_maps + of_maps // plan.branches)
    return tuple(grown) * plan.branches


def _plane_bytes(plan: ParallelPlan, stages: Sequence[MemoryForecast]) -> tuple[int, ...]:
    """Return the peak bytes of each rank of a plane; if the plan spills, the least that the rank needs."""
    if plan.cell_grid is None or plan.spill is None:
        return rank_peaks(plan, stages)  # also with cells: they run in lockstep, so together they hold whole maps
    cells = prod(plan.cell_grid)
    placement, least_bytes = Placement.of(plan), [stage.spilled_bytes(cells) for stage in stages]
    sums = (sum(least_bytes[stage] for stage, _ in placement.hosted(rank)) for rank in range(placement.size))
    return tuple(max(stages[0].start_bytes, needs) for needs in sums)
