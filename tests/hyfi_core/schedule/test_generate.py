from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import COMPUTE, Action, Verb
from hyfi_core.schedule.generate import generate
from tests.hyfi_core.schedule.cases import SCHEDULES, draw_case


def rows(schedule: str, grids: int, microbatches: int, interleave: int = 1) -> list[str]:
    """The lists of the ranks, shortly: verb and micro-batch, and the stage where the rank has several."""
    plan = ParallelPlan(((1, 1),) * grids, schedule=schedule, microbatches=microbatches, interleave=interleave)
    made = generate(plan, Placement.of(plan))
    assert made.name == schedule
    stage = "/{0.stage}" if interleave > 1 else ""
    return [" ".join(f"{a.verb}{a.microbatch}{stage.format(a)}" for a in row) for row in made.actions]


def test_sequential_is_one_microbatch_at_a_time() -> None:
    assert rows("sequential", 2, 2) == ["F0 B0 F1 B1"] * 2


def test_gpipe_is_all_forwards_then_all_backwards() -> None:
    assert rows("gpipe", 2, 3) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_runs_as_far_ahead_as_stages_follow() -> None:
    assert rows("1f1b", 3, 4) == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    assert rows("1f1b", 3, 1) == ["F0 B0"] * 3
    assert rows("1f1b", 1, 2) == ["F0 B0 F1 B1"]


def test_zb_h1_is_the_picture_of_the_paper() -> None:
    """Its forwards are those of 1F1B; stage s runs W s micro-batches behind I."""
    assert rows("zb_h1", 3, 4) == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]
    assert rows("zb_h1", 3, 1) == ["F0 I0 W0"] * 3
    assert rows("zb_h1", 1, 2) == ["F0 I0 W0 F1 I1 W1"]


def test_gems_mast_fills_what_the_first_direction_frees() -> None:
    assert rows("gems_mast", 3, 4) == ["F0 F1 B0 F2 B1 F3 B2 B3"] * 3


def test_gems_master_repeats_it_with_one_microbatch_for_each_direction() -> None:
    assert rows("gems_master", 3, 4) == ["F0 B0 F2 B2 F1 B1 F3 B3"] * 3
    assert rows("gems_mast", 3, 2) == rows("gems_master", 3, 2)


def test_chimera_is_the_picture_of_the_paper() -> None:
    """Figure 3 of the paper: four workers, four micro-batches."""
    assert rows("chimera", 4, 4) == [
        "F0 F1 F2 B2 F3 B3 B0 B1",
        "F0 F2 F1 F3 B2 B0 B3 B1",
        "F2 F0 F3 F1 B0 B2 B1 B3",
        "F2 F3 F0 B0 F1 B1 B2 B3",
    ]


def test_on_one_grid_a_micro_batch_goes_through_all_stages_and_back() -> None:
    order = " ".join(rows("1f1b", 1, 2, interleave=3)).split()
    assert [word[0] for word in order] == list("FFFBBBFFFBBB")
    assert [word[-1] for word in order] == list("012210012210")


def test_interleaved_1f1b() -> None:
    assert rows("1f1b", 2, 2, interleave=2) == [
        "F0/0 F1/0 F0/2 F1/2 B0/2 B1/2 B0/0 B1/0",
        "F0/1 F1/1 F0/3 B0/3 F1/3 B1/3 B0/1 B1/1",
    ]


@pytest.mark.parametrize(("microbatches", "works"), [(1, 3), (4, 3), (5, 6), (8, 9)])
def test_interleaved_1f1b_needs_whole_groups(microbatches: int, works: int) -> None:
    plan = ParallelPlan(((1, 1),) * 3, schedule="1f1b", microbatches=microbatches, interleave=2)
    with pytest.raises(RequestError, match=f"plan.microbatches is {microbatches}; use {works}$"):
        generate(plan, Placement.of(plan))
    right = ParallelPlan(((1, 1),) * 3, schedule="1f1b", microbatches=works, interleave=2)
    assert generate(right, Placement.of(right))


@settings(deadline=None)
@given(st.data())
def test_everything_is_done_once_by_each_rank_that_has_to(data: st.DataObject) -> None:
    case = draw_case(lambda low, high: data.draw(st.integers(low, high)))
    half = case.plan.microbatches // case.plan.directions
    wanted = [
        Counter(
            Action(verb, stage, direction, microbatch)
            for stage, direction in case.placement.hosted(rank)
            for microbatch in range(direction * half, (direction + 1) * half)
            for verb in ((Verb.F, Verb.I, Verb.W) if case.plan.divides_backwards else (Verb.F, Verb.B))
        )
        for rank in range(case.placement.size)
    ]
    assert [Counter(row) for row in generate(case.plan, case.placement).actions] == wanted


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("grids", [((2, 2), (1, 1)), ((1, 2), (1, 1), (2, 2)), ((2, 1), (1, 2))])
def test_two_ranks_have_what_they_share_in_one_order(schedule: str, grids: tuple[tuple[int, int], ...]) -> None:
    plan = ParallelPlan(grids, schedule=schedule, microbatches=6)
    made = generate(plan, Placement.of(plan))
    for first in made.actions:
        for second in made.actions:
            shared = set(first) & set(second)
            assert [a for a in first if a in shared] == [a for a in second if a in shared]
    assert all(action.verb in COMPUTE for row in made.actions for action in row)
