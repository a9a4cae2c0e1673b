"""The common order of all gang actions of a replica: the ranks' lists merged into one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import TO_INPUTS, Action, Schedule, Verb, act
from hyfi_core.schedule.fault import Blame, ScheduleError
from hyfi_core.schedule.grid import list_grid
from hyfi_core.schedule.routes import Edges

_NOMINAL_DURATION = {Verb.F: 1, Verb.B: 2, Verb.I: 1, Verb.W: 1}  # a backward computes two gradients


@dataclass(frozen=True, slots=True)
class Timed:
    """A gang action and when it runs, if a forward takes 1, a backward 2 (each part 1) and a message 0."""

    action: Action
    start: int
    end: int


def common_order(schedule: Schedule, placement: Placement, edges: Edges) -> list[Timed]:
    """Return the gang actions of a schedule, each once, sorted by start; the schedule has no communication yet.

    Raises:
        ScheduleError: the ranks' lists have no common order, or an action is before one that it needs.
    """
    rows, backward_of = schedule.actions, backwards_to_inputs(schedule)
    cursor = [0] * len(rows)  # of each rank, the index of its current action
    clock = [0] * len(rows)  # of each rank, the end of its last action
    ended: dict[Action, int] = {}  # action -> its end
    waiting: dict[Action, list[int]] = {}  # action -> ranks whose current action needs it
    done: list[Timed] = []
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        if cursor[rank] == len(rows[rank]):
            continue
        action = rows[rank][cursor[rank]]
        gang = placement.group(action.stage, action.direction)
        if any(_current(rows[other], cursor[other]) != action for other in gang):
            continue  # the last rank to arrive runs the action for the whole gang
        needs = _needs(action, edges, backward_of)
        # Waiting for one missing need is enough: when it is done, the rank looks for the next.
        missing = next((need for need in needs if need not in ended), None)
        if missing is not None:
            waiting.setdefault(missing, []).append(rank)
            continue
        start = max([clock[other] for other in gang] + [ended[need] for need in needs])
        end = start + _NOMINAL_DURATION[action.verb]
        ended[action] = end
        done.append(Timed(action, start, end))
        for other in gang:
            cursor[other] += 1
            clock[other] = end
        ready += gang
        ready += waiting.pop(action, ())
    if any(cursor[rank] < len(row) for rank, row in enumerate(rows)):
        raise _stuck(schedule, placement, edges, backward_of, cursor, ended)
    return sorted(done, key=lambda timed: timed.start)


def _current(row: tuple[Action, ...], cursor: int) -> Action | None:
    return row[cursor] if cursor < len(row) else None


BackwardOf = Mapping[tuple[int, int, int | None], Action]
"""(stage, direction, micro-batch) -> the action that computes the gradients of the stage's inputs: B or I."""


def backwards_to_inputs(schedule: Schedule) -> BackwardOf:
    """Return the B or I of each backward of a schedule."""
    actions = (action for row in dict.fromkeys(schedule.actions) for action in row if action.verb in TO_INPUTS)
    return {(action.stage, action.direction, action.microbatch): action for action in actions}


def _needs(action: Action, edges: Edges, backward_of: BackwardOf) -> list[Action]:
    """Return the gang actions whose results a gang action needs."""
    stage, direction, microbatch = action.stage, action.direction, action.microbatch
    if action.verb is Verb.F:
        return [act(Verb.F, source, direction, microbatch) for source in edges.sources[stage]]
    if action.verb is Verb.W:
        return [act(Verb.I, stage, direction, microbatch)]
    # If the schedule has no backward of a target, the error names its B.
    later = [
        backward_of.get((target, direction, microbatch), act(Verb.B, target, direction, microbatch))
        for target in edges.targets[stage]
    ]
    return [act(Verb.F, stage, direction, microbatch), *later]


def _stuck(
    schedule: Schedule,
    placement: Placement,
    edges: Edges,
    backward_of: BackwardOf,
    cursor: list[int],
    ended: dict[Action, int],
) -> ScheduleError:
    """Return the error that names, for each rank that has not ended, what it waits for."""
    blames = []
    for rank, row in enumerate(schedule.actions):
        if cursor[rank] == len(row):
            continue
        action = row[cursor[rank]]
        why = [f"{need} is not done" for need in _needs(action, edges, backward_of) if need not in ended]
        for other in placement.group(action.stage, action.direction):
            current = _current(schedule.actions[other], cursor[other])
            if current != action:
                why.append(f"rank {other} is at {current or 'its end'}")
        blames.append(Blame(rank, cursor[rank], "waits: " + ", ".join(why)))
    drawn = list_grid(schedule.actions, {blame.rank: blame.index for blame in blames})
    return ScheduleError(schedule, "the lists of its ranks have no common order", blames, drawn)
