"""Checks of each rank's list of actions by itself: which actions it must have, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import Action, Schedule, Verb, act
from hyfi_core.schedule.fault import Blame
from hyfi_core.schedule.routes import Edges

Needs = Mapping[Action, Sequence[Action]]
"""Each action that a rank must have -> the actions that must precede it in the rank's list."""

Backward = tuple[int, int, int]
"""(stage, direction, micro-batch) of a backward."""


def divided(schedule: Schedule) -> frozenset[Backward]:
    """Return the backwards that a schedule divides: those for which any rank has an I or a W instead of a B."""
    distinct = dict.fromkeys(schedule.actions)  # ranks of a stage mostly have equal rows
    return frozenset(
        (action.stage, action.direction, action.microbatch)
        for row in distinct
        for action in row
        if action.verb in (Verb.I, Verb.W) and action.microbatch is not None
    )


def expected(
    placement: Placement,
    edges: Edges,
    microbatches: Sequence[Sequence[int]],
    point_to_point: bool,
    divided: frozenset[Backward] = frozenset(),
) -> list[Needs]:
    """Return the `Needs` of each rank: its required actions, and what must precede each of them.

    Args:
        placement: which ranks hold which stage.
        edges: stages that exchange values.
        microbatches: numbers of the micro-batches of each direction.
        point_to_point: whether direction 1 sends its gradients to direction 0.
        divided: the backwards that are divided into I and W.
    """
    ranks: list[dict[Action, Sequence[Action]]] = [{} for _ in range(placement.size)]
    backwards: list[dict[int, list[Action]]] = [{} for _ in range(placement.size)]
    for direction in range(placement.directions):
        for stage in range(placement.stages):
            needs, completing = _of_stage(stage, direction, microbatches[direction], edges, divided)
            # Only direction 1 sends: direction 0 owns the optimizer's state.
            if point_to_point and direction == 1:
                needs[act(Verb.SEND_G, stage, 1, None, 0)] = completing
            for rank in placement.group(stage, direction):
                ranks[rank].update(needs)
                backwards[rank].setdefault(stage, []).extend(completing)
    # A rank may have a stage in both directions: it reduces the gradients once, after the backwards of both.
    for rank, stages in enumerate(backwards):
        for stage, completing in stages.items():
            if not point_to_point:
                ranks[rank][act(Verb.REDUCE, stage, 0)] = completing
            elif rank in placement.group(stage, 0):
                gradients = act(Verb.RECV_G, stage, 0, None, 1)
                ranks[rank][gradients] = ()
                ranks[rank][act(Verb.REDUCE, stage, 0)] = [gradients, *completing]
    return list(ranks)


def _of_stage(
    stage: int, direction: int, microbatches: Iterable[int], edges: Edges, divided: frozenset[Backward]
) -> tuple[dict[Action, Sequence[Action]], list[Action]]:
    """Return (action of one stage -> actions that must precede it, the actions that complete its gradients: B or W)."""
    needs: dict[Action, Sequence[Action]] = {}
    completing = []
    sources, targets = edges.sources[stage], edges.targets[stage]
    for m in microbatches:
        forward = act(Verb.F, stage, direction, m)
        in_two = (stage, direction, m) in divided
        backward = act(Verb.I if in_two else Verb.B, stage, direction, m)
        values = [act(Verb.RECV_F, stage, direction, m, source) for source in sources]
        gradients = [act(Verb.RECV_B, stage, direction, m, target) for target in targets]
        # Receives need nothing before them: they are posted ahead.
        needs.update(dict.fromkeys(values, ()))
        needs.update(dict.fromkeys(gradients, ()))
        needs[forward] = values
        needs[backward] = [*gradients, forward]
        for target in targets:
            needs[act(Verb.SEND_F, stage, direction, m, target)] = [forward]
        for source in sources:
            needs[act(Verb.SEND_B, stage, direction, m, source)] = [backward]
        if in_two:
            needs[act(Verb.W, stage, direction, m)] = [backward]
        completing.append(act(Verb.W, stage, direction, m) if in_two else backward)
    return needs, completing


def find_faults(schedule: Schedule, needs: Sequence[Needs]) -> list[Blame]:
    """Return a blame for each action that is extra, then for each that is missing, then for each that is misplaced."""
    extra, missing, misplaced = [], [], []
    for rank, (row, required) in enumerate(zip(schedule.actions, needs, strict=True)):
        if _is_right(row, required):
            continue
        places: dict[Action, int] = {}
        for index, action in enumerate(row):
            if action not in required:
                extra.append(Blame(rank, index, "does not belong to this rank in this plan"))
            elif action in places:
                extra.append(Blame(rank, index, f"occurs twice, first as action {places[action]}"))
                extra.append(Blame(rank, places[action], f"occurs twice, again as action {index}"))
            else:
                places[action] = index
        if len(places) < len(required):
            missing += [
                _missing(rank, len(row), action, required, places) for action in required if action not in places
            ]
        for action, index in places.items():
            for need in required[action]:
                # A need that is missing altogether is reported above.
                if places.get(need, -1) > index:
                    misplaced.append(Blame(rank, index, f"comes before {need}, which it needs"))
    return extra + missing + misplaced


def _is_right(row: Sequence[Action], required: Needs) -> bool:
    """Whether a list has all required actions once, in a valid order; faster than finding faults."""
    if len(row) != len(required):
        return False
    done: set[Action] = set()
    for action in row:
        if action not in required or not done.issuperset(required[action]):
            return False
        done.add(action)
    return len(done) == len(required)


def _missing(rank: int, end: int, action: Action, required: Needs, places: Mapping[Action, int]) -> Blame:
    """Return the blame for a missing action: at the action that needs it, or after its needs, or at the list's end."""
    for other, index in places.items():
        if action in required[other]:
            return Blame(rank, index, f"needs {action}, which is missing")
    after = [places[need] for need in required[action] if need in places]
    return Blame(rank, max(after, default=end), f"{action} is missing" + (" after it" if after else ""))
