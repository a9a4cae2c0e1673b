"""The dry run: whether a lowered schedule can be run at all, and how long it takes with given durations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hyfi_core.plan.parallel_plan import Mirror
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule import deadlock
from hyfi_core.schedule.action import Schedule
from hyfi_core.schedule.check import expected, find_faults
from hyfi_core.schedule.fault import Blame, ScheduleError
from hyfi_core.schedule.grid import error_grid, list_grid, time_grid
from hyfi_core.schedule.machine import Durations, FaultFound, Machine
from hyfi_core.schedule.routes import Edges
from hyfi_core.schedule.trace import TraceEvent, bubble

Seconds = float | Callable[[int], float]
"""The same for all stages, or a function of the stage."""


@dataclass(frozen=True)
class Costs:
    """Durations in seconds; a backward is about two forwards.

    Attributes:
        forward_s: one forward of a stage, its ranks together.
        backward_s: one backward.
        message_s: one message of what a stage sends, from the moment at which both sides are there.
        reduce_s: the reduction of a stage's gradients.
        edge_s: (from, to) of stages -> one message between them, in either direction, instead of ``message_s``.
    """

    forward_s: Seconds = 1.0
    backward_s: Seconds = 2.0
    message_s: Seconds = 0.0
    reduce_s: Seconds = 0.0
    edge_s: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def of(self, stages: int) -> Durations:
        """Return the durations of each stage."""
        forms = (self.forward_s, self.backward_s, self.message_s, self.reduce_s)
        forward, backward, message, reduce = (
            [form(s) if callable(form) else form for s in range(stages)] for form in forms
        )
        return Durations(forward, backward, message, reduce, self.edge_s)


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation.

    Attributes:
        schedule: the lowered schedule.
        events: every forward, backward, send (from its start to its arrival) and reduction, in no order.
        makespan_s: from the beginning to the end of the last event.
        busy_s: for each rank, the time of its forwards and backwards.
        peak_live: for each rank, the most forwards at a time whose backward is not done: of all stages and
            directions of the rank together.
    """

    schedule: Schedule
    events: tuple[TraceEvent, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of all ranks' time, until the last forward or backward ends, in which they run neither."""
        return bubble(self.events)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The same for each rank."""
        span_s = max(event.end_s for event in self.events if event.kind in ("F", "B"))
        return tuple(1.0 - busy_s / span_s for busy_s in self.busy_s)

    def grid(self) -> str:
        """Return all ranks as text, time from left to right."""
        return time_grid(self.events, len(self.busy_s))


def simulate(
    schedule: Schedule,
    placement: Placement,
    edges: Iterable[tuple[int, int]],
    *,
    mirror: Mirror = "all_reduce",
    microbatches: int | None = None,
    costs: Costs | None = None,
    one_stream: bool = False,
) -> Simulation:
    """Run a lowered schedule dry.

    Args:
        schedule: lowered.
        placement: which ranks hold which stage.
        edges: as for ``lower``.
        mirror: as for ``lower``.
        microbatches: of both directions together; None = those that are there.
        costs: durations; by default forward 1, backward 2, the rest nothing.
        one_stream: whether all messages of a rank go through one stream, where each begins when the last has ended.

    Raises:
        ScheduleError: it deadlocks, or a list lacks, repeats or misplaces an action, or two ranks disagree about
            their messages; the error names ranks, actions and what they wait for, and draws all ranks.
    """
    machine = _run(schedule, placement, edges, mirror, microbatches, costs or Costs(), one_stream)
    return Simulation(
        schedule,
        machine.events,
        max((rank.end_s for rank in machine.ranks), default=0.0),
        tuple(rank.busy_s for rank in machine.ranks),
        tuple(rank.peak_live for rank in machine.ranks),
    )


def validate(
    schedule: Schedule,
    placement: Placement,
    edges: Iterable[tuple[int, int]],
    *,
    mirror: Mirror = "all_reduce",
    microbatches: int | None = None,
) -> None:
    """Raise what ``simulate`` raises, and return nothing: faster where only that is asked."""
    _run(schedule, placement, edges, mirror, microbatches, Costs())


def _run(
    schedule: Schedule,
    placement: Placement,
    edges: Iterable[tuple[int, int]],
    mirror: Mirror,
    microbatches: int | None,
    costs: Costs,
    one_stream: bool = False,
) -> Machine:
    point_to_point = mirror == "point_to_point" and placement.directions == 2
    needs = expected(
        placement, Edges(edges, placement.stages), _split(schedule, placement, microbatches), point_to_point
    )
    if len(schedule.actions) != placement.size:
        raise ScheduleError(
            schedule, f"it has {len(schedule.actions)} ranks, but the placement has {placement.size}", []
        )
    if blames := find_faults(schedule, needs):
        raise ScheduleError(schedule, "its lists of actions are wrong", blames, _drawn_lists(schedule, blames))
    durations = costs.of(placement.stages)
    machine = Machine(schedule, placement, needs, durations, not point_to_point, one_stream)
    try:
        machine.run()
        fault = deadlock.find(machine)
    except FaultFound as found:
        fault = found
    if fault is not None:
        raise ScheduleError(schedule, fault.problem, fault.blames, _drawn(machine, fault.blames))
    return machine


def _split(schedule: Schedule, placement: Placement, microbatches: int | None) -> Sequence[Sequence[int]]:
    """Return the micro-batches of each direction."""
    if microbatches is not None:
        count = microbatches // placement.directions
        return [range(direction * count, (direction + 1) * count) for direction in range(placement.directions)]
    found: list[set[int]] = [set() for _ in range(placement.directions)]
    for row in schedule.actions:
        for action in row:
            if action.microbatch is not None and action.direction < placement.directions:
                found[action.direction].add(action.microbatch)
    return [sorted(counts) for counts in found]


def _drawn_lists(schedule: Schedule, blames: Sequence[Blame]) -> str:
    places = {blame.rank: blame.index for blame in reversed(blames)}
    return list_grid(schedule.actions, places)


def _drawn(machine: Machine, blames: Sequence[Blame]) -> str:
    current = ["" if rank.current is None else str(rank.current) for rank in machine.ranks]
    for blame in blames:
        row = machine.ranks[blame.rank].row
        current[blame.rank] = str(row[blame.index]) if blame.index < len(row) else ""
    return error_grid(machine.events, current, {blame.rank for blame in blames}, len(machine.ranks))
