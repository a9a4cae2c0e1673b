"""Random plans with their edges, and faults planted into their lowered schedules."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hyfi_core.plan.parallel_plan import Mirror, ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import COMPUTE, Action, Schedule, Verb, act
from hyfi_core.schedule.fault import ScheduleError
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.lower import lower
from hyfi_core.schedule.routes import Edges, receivers, senders
from hyfi_core.schedule.simulate import Costs, Simulation, simulate, validate

Pick = Callable[[int, int], int]
"""Draws a whole number between two, both included."""

GRIDS = ((1, 1), (1, 2), (1, 1), (2, 1), (2, 2))
SCHEDULES = ("sequential", "gpipe", "1f1b", "zb_h1", "gems_mast", "gems_master", "chimera")
SENDS = (Verb.SEND_F, Verb.SEND_B, Verb.SEND_G)
RECEIVES = (Verb.RECV_F, Verb.RECV_B, Verb.RECV_G)


def chain(stages: int) -> list[tuple[int, int]]:
    return [(stage, stage + 1) for stage in range(stages - 1)]


def dry_run(plan: ParallelPlan, costs: Costs | None = None) -> Simulation:
    """Generate, lower and simulate a plan whose stages follow each other without skips."""
    placement = Placement.of(plan)
    edges = chain(plan.stages)
    lowered = lower(generate(plan, placement), placement, edges, mirror=plan.mirror)
    return simulate(lowered, placement, edges, mirror=plan.mirror, microbatches=plan.microbatches, costs=costs)


@dataclass(frozen=True)
class Case:
    """A plan, what its stages exchange, and its schedule of forwards and backwards."""

    plan: ParallelPlan
    placement: Placement
    edges: tuple[tuple[int, int], ...]
    compute: Schedule
    overlap_reduce: bool

    @property
    def mirror(self) -> Mirror:
        return self.plan.mirror

    def lowered(self) -> Schedule:
        return lower(self.compute, self.placement, self.edges, mirror=self.mirror, overlap_reduce=self.overlap_reduce)

    def simulate(self, schedule: Schedule) -> Simulation:
        return simulate(schedule, self.placement, self.edges, mirror=self.mirror, microbatches=self.plan.microbatches)

    def validate(self, schedule: Schedule) -> None:
        validate(schedule, self.placement, self.edges, mirror=self.mirror, microbatches=self.plan.microbatches)


def draw_case(pick: Pick) -> Case:
    """Draw a plan of up to four grids and twelve stages with skips, and one of all orders that it may be run in."""
    grids = tuple(GRIDS[pick(0, len(GRIDS) - 1)] for _ in range(pick(1, 3) + pick(0, 4) // 4))
    name = SCHEDULES[pick(0, len(SCHEDULES) - 1)]
    interleave, microbatches, mirror = 1, pick(1, 4), "all_reduce"
    if name == "1f1b" and pick(0, 1):
        interleave = pick(2, 3)
        microbatches = len(grids) * pick(1, 2)
    if name in ("gems_mast", "gems_master", "chimera"):
        microbatches = 2 * pick(1, 3)
        mirror = ("all_reduce", "point_to_point")[pick(0, 1)]
    plan = ParallelPlan(grids, schedule=name, microbatches=microbatches, interleave=interleave, mirror=mirror)
    stages = plan.stages
    skips = {
        (a, b) for _ in range(pick(0, 2)) for a, b in [sorted((pick(0, stages - 1), pick(0, stages - 1)))] if a < b
    }
    links = chain(stages)
    if links and not pick(0, 4):
        links.pop(pick(0, len(links) - 1))  # two stages that follow each other and exchange nothing
    edges = tuple(sorted({*links, *skips}))
    placement = Placement.of(plan)
    compute = _any_order(plan, placement, edges, pick) if not pick(0, 2) else generate(plan, placement)
    return Case(plan, placement, edges, compute, bool(pick(0, 3)))


def _any_order(plan: ParallelPlan, placement: Placement, edges: tuple[tuple[int, int], ...], pick: Pick) -> Schedule:
    """Draw any order of all gang actions that goes from cause to effect, and what each rank has of it."""
    links = Edges(edges, plan.stages)
    half = plan.microbatches // plan.directions
    needs: dict[Action, set[Action]] = {}
    backs: dict[tuple[int, int], Action] = {}
    for direction in range(plan.directions):
        for m in range(direction * half, (direction + 1) * half):
            for s in range(plan.stages):
                backs[s, m] = act(Verb.I if pick(0, 2) == 0 else Verb.B, s, direction, m)
            for s in range(plan.stages):
                forward, backward = act(Verb.F, s, direction, m), backs[s, m]
                needs[forward] = {act(Verb.F, a, direction, m) for a in links.sources[s]}
                needs[backward] = {backs[b, m] for b in links.targets[s]} | {forward}
                if backward.verb is Verb.I:
                    needs[act(Verb.W, s, direction, m)] = {backward}
    followers: dict[Action, list[Action]] = {}
    for action, before in needs.items():
        for need in before:
            followers.setdefault(need, []).append(action)
    ready = [action for action, before in needs.items() if not before]
    rows: list[list[Action]] = [[] for _ in range(placement.size)]
    while ready:
        action = ready.pop(pick(0, len(ready) - 1))
        for rank in placement.group(action.stage, action.direction):
            rows[rank].append(action)
        for follower in followers.get(action, ()):
            needs[follower].discard(action)
            if not needs[follower]:
                ready.append(follower)
    return Schedule("any", tuple(map(tuple, rows)))


@dataclass(frozen=True)
class Plant:
    """A fault in one list: what was done, the list's rank, and between which actions it is to be found."""

    what: str
    rank: int
    first: int
    last: int
    schedule: Schedule = field(repr=False)
    names: str = ""

    def is_located_by(self, error: ScheduleError) -> bool:
        """Whether an error blames this rank, in this place, and names what is missing."""
        near = any(b.rank == self.rank and self.first <= b.index <= self.last for b in error.blames)
        return near and self.names in str(error) and "<-- ERROR HERE" in str(error)


def plant(case: Case, schedule: Schedule, pick: Pick) -> Plant | None:
    """Plant one fault; None where this schedule has no place for the kind that was drawn."""
    rank = pick(0, len(schedule.actions) - 1)
    return _PLANTS[pick(0, len(_PLANTS) - 1)](case, schedule, rank, pick)


def _with(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    return replace(schedule, actions=(*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :]))


def lose(case: Case, schedule: Schedule, rank: int, pick: Pick) -> Plant:
    """An action is missing: a backward, a receive, whatever."""
    row = list(schedule.actions[rank])
    lost = row.pop(pick(0, len(row) - 1))
    return Plant("lost action", rank, 0, len(row), _with(schedule, rank, row), f"{lost}")


def repeat(case: Case, schedule: Schedule, rank: int, pick: Pick) -> Plant:
    """An action is there twice."""
    row = list(schedule.actions[rank])
    index = pick(0, len(row) - 1)
    place = pick(index + 1, len(row))
    row.insert(place, row[index])
    return Plant("repeated action", rank, place, place, _with(schedule, rank, row), "twice")


def misdirect(case: Case, schedule: Schedule, rank: int, pick: Pick) -> Plant | None:
    """A message has the wrong peer."""
    row = list(schedule.actions[rank])
    places = [index for index, action in enumerate(row) if action.peer is not None]
    if not places:
        return None
    index = places[pick(0, len(places) - 1)]
    peer = row[index].peer
    assert peer is not None
    row[index] = replace(row[index], peer=peer + 1)
    return Plant("wrong peer", rank, index, index, _with(schedule, rank, row))


def swap_gangs(case: Case, schedule: Schedule, rank: int, pick: Pick) -> Plant | None:
    """Two gang actions are swapped on one rank; another rank has both of them in the right order."""
    row = list(schedule.actions[rank])
    pairs = [
        (i, j)
        for i, first in enumerate(row)
        for j in range(i + 1, len(row))
        for second in [row[j]]
        if first.verb in COMPUTE and second.verb in COMPUTE and _share(case, first, second)
    ]
    return _swapped("swapped gang actions", schedule, rank, row, pairs, pick)


def _share(case: Case, first: Action, second: Action) -> bool:
    groups = [set(case.placement.group(action.stage, action.direction)) for action in (first, second)]
    return len(groups[0] & groups[1]) > 1


def swap_messages(case: Case, schedule: Schedule, rank: int, pick: Pick) -> Plant | None:
    """Two sends to the same rank, or two receives from it, are swapped."""
    row = list(schedule.actions[rank])
    peers: list[set[int]] = []
    for action in row:
        if action.verb in SENDS:
            peers.append(set(receivers(case.placement, rank, action)) - {rank})
        elif action.verb in RECEIVES:
            peers.append({-1 - sender for sender in senders(case.placement, rank, action)} - {-1 - rank})
        else:
            peers.append(set())
    pairs = [(i, j) for i in range(len(row)) for j in range(i + 1, len(row)) if peers[i] & peers[j]]
    return _swapped("swapped messages", schedule, rank, row, pairs, pick)


def weights_first(case: Case, schedule: Schedule, rank: int, pick: Pick) -> Plant | None:
    """Weights' gradients are computed before those of the inputs of the same stage and micro-batch."""
    row = list(schedule.actions[rank])
    pairs = [(row.index(replace(a, verb=Verb.I)), j) for j, a in enumerate(row) if a.verb is Verb.W]
    return _swapped("W before I", schedule, rank, row, pairs, pick)


def weights_last(case: Case, schedule: Schedule, rank: int, pick: Pick) -> Plant | None:
    """Weights' gradients are computed after they have been reduced, and so after the optimizer has used them."""
    row = list(schedule.actions[rank])
    places = [index for index, action in enumerate(row) if action.verb is Verb.W]
    if not places:
        return None
    late = row.pop(places[pick(0, len(places) - 1)])
    reduced = row.index(act(Verb.REDUCE, late.stage, 0)) if act(Verb.REDUCE, late.stage, 0) in row else -1
    if reduced < 0:
        return None
    row.insert(pick(reduced + 1, len(row)), late)
    return Plant("W after REDUCE", rank, reduced, reduced, _with(schedule, rank, row), f"{late}")


def swap_reduces(case: Case, schedule: Schedule, rank: int, pick: Pick) -> Plant | None:
    """Two reductions are swapped on one rank; another rank has both of them in the right order."""
    row = list(schedule.actions[rank])
    owners = [
        {r for r, other in enumerate(schedule.actions) if act(Verb.REDUCE, stage, 0) in other}
        for stage in range(case.plan.stages)
    ]
    places = [index for index, action in enumerate(row) if action.verb is Verb.REDUCE]
    pairs = [(i, j) for i in places for j in places if i < j and len(owners[row[i].stage] & owners[row[j].stage]) > 1]
    return _swapped("swapped reductions", schedule, rank, row, pairs, pick)


def _swapped(
    what: str, schedule: Schedule, rank: int, row: list[Action], pairs: list[tuple[int, int]], pick: Pick
) -> Plant | None:
    if not pairs:
        return None
    i, j = pairs[pick(0, len(pairs) - 1)]
    row[i], row[j] = row[j], row[i]
    return Plant(what, rank, i, j, _with(schedule, rank, row))


_PLANTS = (lose, repeat, misdirect, swap_gangs, swap_messages, swap_reduces, weights_first, weights_last)


def run_batch(seed: int, count: int) -> dict[str, int]:
    """Run ``count`` random cases, each as it is and with one planted fault; return how many of each kind."""
    generator = random.Random(seed)
    kinds: dict[str, int] = {}
    for index in range(count):
        case = draw_case(generator.randint)
        schedule = case.lowered()
        case.validate(schedule)
        planted = plant(case, schedule, generator.randint)
        if planted is None:
            continue
        try:
            case.validate(planted.schedule)
        except ScheduleError as error:
            assert planted.is_located_by(error), f"seed {seed}, case {index}: {planted}\n{error}"
        else:
            raise AssertionError(f"seed {seed}, case {index}: not found: {planted}")
        kinds[planted.what] = kinds.get(planted.what, 0) + 1
    return kinds
