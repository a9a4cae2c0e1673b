"""The forwards of a training step alone, and whether they come before all backwards."""

from __future__ import annotations

import pytest

from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import Action, Verb
from hyfi_core.schedule.of_plan import PlanSchedules

CASES = [
    ("sequential", 1, True),
    ("sequential", 2, False),
    ("gpipe", 4, True),
    ("1f1b", 1, True),
    ("1f1b", 2, False),
    ("gems_mast", 2, False),
    ("gems_master", 4, False),
    ("chimera", 2, True),
    ("chimera", 4, False),
]


def made(schedule: str, microbatches: int, stages: int, interleave: int = 1) -> PlanSchedules:
    plan = ParallelPlan(((1, 1),) * stages, microbatches=microbatches, schedule=schedule, interleave=interleave)  # type: ignore[arg-type]
    return PlanSchedules(plan, Placement.of(plan))


def forwards(row: tuple[Action, ...]) -> list[Action]:
    return [action for action in row if action.verb is Verb.F]


@pytest.mark.parametrize(("schedule", "microbatches", "first"), CASES)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_forwards_alone(schedule: str, microbatches: int, first: bool, stages: int) -> None:
    schedules = made(schedule, microbatches, stages)
    edges = {(stage, stage + 1) for stage in range(stages - 1)} | {(0, stages - 1)}
    assert schedules.forwards_first(edges) == first
    alone, training = schedules.outputs(edges), schedules.training(edges)
    for rank, row in enumerate(alone.actions):
        assert forwards(row) == forwards(training.actions[rank]), "the same forwards in the same order"
        assert {action.verb for action in row} <= {Verb.F, Verb.SEND_F, Verb.RECV_F}


def test_interleaved_stages() -> None:
    schedules = made("1f1b", 4, 2, interleave=2)
    edges = {(stage, stage + 1) for stage in range(3)}
    assert not schedules.forwards_first(edges)
    assert forwards(schedules.outputs(edges).actions[1]) == forwards(schedules.training(edges).actions[1])


def test_one_stage() -> None:
    assert made("1f1b", 1, 1).forwards_first(())
    assert not made("1f1b", 2, 1).forwards_first(())


def test_forwards_of_recomputed_stages_are_repeated_unless_backward_follows_at_once() -> None:
    plan = ParallelPlan(((1, 1), (1, 1)), microbatches=2, recompute=True)
    schedules = PlanSchedules(plan, Placement.of(plan))
    each = [schedules.recomputed([(0, 1)], rank, in_turn=False) for rank in range(2)]
    assert [sorted(map(str, actions)) for actions in each] == [["F0.s0.d0", "F1.s0.d0"], []]
    in_turn = schedules.recomputed([(0, 1)], 1, in_turn=False)
    assert in_turn is each[1], "computed once"
    fresh = PlanSchedules(plan, Placement.of(plan))
    assert len(fresh.recomputed([(0, 1)], 1, in_turn=True)) == 2, "cells take turns between forward and backward"
