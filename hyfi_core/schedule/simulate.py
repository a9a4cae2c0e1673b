"""Simulation of a lowered schedule: whether it can be run, and how long it takes with given durations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hyfi_core.plan.parallel_plan import Mirror
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule import deadlock
from hyfi_core.schedule.action import Schedule
from hyfi_core.schedule.check import divided, expected, find_faults
from hyfi_core.schedule.dry_run import DryRun, Durations, FaultFound
from hyfi_core.schedule.fault import Blame, ScheduleError
from hyfi_core.schedule.grid import error_grid, list_grid, time_grid
from hyfi_core.schedule.routes import Edges
from hyfi_core.schedule.symmetry import represented
from hyfi_core.schedule.trace import TraceEvent, bubble

Seconds = float | Callable[[int], float]
"""The same for all stages, or a function of the stage."""


@dataclass(frozen=True)
class Costs:
    """Durations in seconds. By default a backward takes as long as two forwards, half of it for the weights.

    Messages take no time by default.

    Attributes:
        forward_s: one forward of a stage, on all its ranks at once.
        backward_s: one backward, whole or both of its parts.
        weight_s: its second part, W; at most ``backward_s``. None: half of it.
        message_s: one message that a stage sends, from the moment at which both sides have been posted.
        reduce_s: the reduction of a stage's gradients.
        edge_s: (from, to) of stages -> duration of a message in either direction, instead of ``message_s``.
    """

    forward_s: Seconds = 1.0
    backward_s: Seconds = 2.0
    message_s: Seconds = 0.0
    reduce_s: Seconds = 0.0
    weight_s: Seconds | None = None
    edge_s: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def of(self, stages: int) -> Durations:
        """Return the durations of each stage."""
        forms = (self.forward_s, self.backward_s, self.message_s, self.reduce_s)
        forward, backward, message, reduce = (_each(form, stages) for form in forms)
        weight = [seconds / 2 for seconds in backward] if self.weight_s is None else _each(self.weight_s, stages)
        return Durations(forward, backward, message, reduce, weight, self.edge_s)


def _each(seconds: Seconds, stages: int) -> list[float]:
    return [seconds(stage) if callable(seconds) else seconds for stage in range(stages)]


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation.

    Attributes:
        schedule: the lowered schedule.
        events: every gang action, send (from its start to its arrival) and reduction, in any order.
        makespan_s: time until the last event ends.
        busy_s: for each rank, the time of its forwards and backwards.
        peak_live: for each rank, the largest number of forwards whose backward, W included, is not done, of all its
            stages and directions together.
    """

    schedule: Schedule
    events: tuple[TraceEvent, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    peak_live: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Fraction of all ranks' time, until the last forward or backward ends, in which they run neither."""
        return bubble(self.events)

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
    """Simulate a lowered schedule.

    Args:
        schedule: lowered.
        placement: which ranks hold which stage.
        edges: as for ``lower``.
        mirror: as for ``lower``.
        microbatches: number of both directions together; None: those in the schedule.
        costs: durations; by default 1 for a forward, 2 for a backward (1 for each part), 0 for the rest.
        one_stream: whether all messages of a rank go through one stream, each after the previous one.

    Raises:
        ScheduleError: the schedule deadlocks; an action is missing, repeated or misplaced; or two ranks send and
            receive in different orders. The error names ranks, actions and what they wait for, and draws all ranks.
    """
    run = _run(schedule, placement, edges, mirror, microbatches, costs or Costs(), one_stream)
    return Simulation(
        schedule,
        run.events,
        max((rank.end_s for rank in run.ranks), default=0.0),
        tuple(rank.busy_s for rank in run.ranks),
        tuple(rank.peak_live for rank in run.ranks),
    )


def validate(
    schedule: Schedule,
    placement: Placement,
    edges: Iterable[tuple[int, int]],
    *,
    mirror: Mirror = "all_reduce",
    microbatches: int | None = None,
) -> None:
    """Raise what ``simulate`` raises, in less time: the dry run has a few ranks that represent all."""
    edges = tuple(edges)
    _check_size(schedule, placement)
    few = represented(schedule, placement, _point_to_point(mirror, placement))
    try:
        _run(few.schedule, few.placement, edges, mirror, microbatches, Costs())
    except ScheduleError:
        _run(schedule, placement, edges, mirror, microbatches, Costs())  # raises the same error, with all ranks


def _run(
    schedule: Schedule,
    placement: Placement,
    edges: Iterable[tuple[int, int]],
    mirror: Mirror,
    microbatches: int | None,
    costs: Costs,
    one_stream: bool = False,
) -> DryRun:
    """Return the dry run of a schedule.

    Raises:
        ScheduleError: lists are wrong, or ranks deadlock.
    """
    point_to_point = _point_to_point(mirror, placement)
    links, counts = Edges(edges, placement.stages), _split(schedule, placement, microbatches)
    needs = expected(placement, links, counts, point_to_point, divided(schedule))
    _check_size(schedule, placement)
    # Checked first, because the dry run would report a missing action as a deadlock.
    if blames := find_faults(schedule, needs):
        raise ScheduleError(schedule, "its lists of actions are wrong", blames, _drawn_lists(schedule, blames))
    durations = costs.of(placement.stages)
    # With point_to_point, gradients of direction 1 arrive as messages, and direction 0 reduces alone.
    dry_run = DryRun(schedule, placement, needs, durations, not point_to_point, one_stream)
    try:
        dry_run.run()
        fault = deadlock.find(dry_run)
    except FaultFound as found:
        fault = found
    if fault is not None:
        raise ScheduleError(schedule, fault.problem, fault.blames, _drawn(dry_run, fault.blames))
    return dry_run


def _point_to_point(mirror: Mirror, placement: Placement) -> bool:
    return mirror == "point_to_point" and placement.directions == 2


def _check_size(schedule: Schedule, placement: Placement) -> None:
    if len(schedule.actions) != placement.size:
        raise ScheduleError(
            schedule, f"it has {len(schedule.actions)} ranks, but the placement has {placement.size}", []
        )


def _split(schedule: Schedule, placement: Placement, microbatches: int | None) -> Sequence[Sequence[int]]:
    """Return the micro-batches of each direction.

    Args:
        schedule: the schedule.
        placement: which ranks hold which stage, in which directions.
        microbatches: number of all directions together, divided equally; None: those that the actions name.
    """
    if microbatches is not None:
        count = microbatches // placement.directions
        return [range(direction * count, (direction + 1) * count) for direction in range(placement.directions)]
    used: list[set[int]] = [set() for _ in range(placement.directions)]
    for row in schedule.actions:
        for action in row:
            if action.microbatch is not None and action.direction < placement.directions:
                used[action.direction].add(action.microbatch)
    return [sorted(numbers) for numbers in used]


def _drawn_lists(schedule: Schedule, blames: Sequence[Blame]) -> str:
    # Reversed, because the last entry of a rank stays in the dict: its first fault is drawn.
    places = {blame.rank: blame.index for blame in reversed(blames)}
    return list_grid(schedule.actions, places)


def _drawn(run: DryRun, blames: Sequence[Blame]) -> str:
    current = ["" if rank.current is None else str(rank.current) for rank in run.ranks]
    for blame in blames:
        current[blame.rank] = str(run.ranks[blame.rank].row[blame.index])
    return error_grid(run.events, current, {blame.rank for blame in blames}, len(run.ranks))
