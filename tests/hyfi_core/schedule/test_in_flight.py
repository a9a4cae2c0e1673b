"""Micro-batches in flight against counting them, and against the formulas of the papers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import TO_INPUTS, TO_WEIGHTS, Verb
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.in_flight import Moment, _sizes, fullest_moments, microbatches_in_flight, recomputes

SHAPES = [(1, 3), (2, 2), (2, 8), (3, 6), (4, 4), (4, 16), (8, 8)]
"""Stages D and micro-batches N."""


def of(schedule: str, stages: int, microbatches: int, **more: int) -> list[int]:
    plan = ParallelPlan(((1, 1),) * stages, microbatches=microbatches, schedule=schedule, **more)  # type: ignore[arg-type]
    return [microbatches_in_flight(plan, stage) for stage in range(plan.stages)]


@pytest.mark.parametrize(("d", "n"), SHAPES)
def test_pipelines_have_as_many_as_published(d: int, n: int) -> None:
    assert of("gpipe", d, n) == [n] * d
    assert of("1f1b", d, n) == [min(d - stage, n) for stage in range(d)]
    assert of("sequential", d, n) == [1] * d
    assert of("zb_h1", d, n) == [min(d, n)] * d


@pytest.mark.parametrize(("d", "n"), [(2, 2), (4, 4), (4, 8), (8, 8)])
def test_two_directions(d: int, n: int) -> None:
    """Chimera: D/2 of each stage at most. GEMS: one, or without repetitions half of all."""
    assert of("chimera", d, n) == [min(d // 2, d - stage) for stage in range(d)]
    assert of("gems_master", d, n) == [1] * d
    assert of("gems_mast", d, n) == [n // 2] * d


@pytest.mark.parametrize(("d", "v", "n"), [(2, 2, 4), (4, 2, 8), (3, 3, 6)])
def test_interleaved_stages_run_as_many_ahead_as_published(d: int, v: int, n: int) -> None:
    """2(D - g - 1) + (v - 1)D forwards ahead and one more, of all stages of a rank together."""
    plan = ParallelPlan(((1, 1),) * d, microbatches=n, schedule="1f1b", interleave=v)
    for (first, *_), moments in fullest_moments(plan).items():
        ahead = min(n * v, 2 * (d - 1 - first[0]) + (v - 1) * d + 1)
        assert max(sum(moment.waiting) + 1 for moment in moments) == ahead


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "expected"),
    [
        ("sequential", 1, 1, [False]),
        ("1f1b", 1, 4, [False]),
        ("gpipe", 1, 4, [True]),
        ("sequential", 2, 2, [True, False]),
        ("1f1b", 3, 4, [True, True, False]),
        ("gpipe", 3, 4, [True, True, True]),
        ("gems_master", 2, 2, [True, False]),
        ("chimera", 2, 4, [True, False]),
        ("zb_h1", 3, 4, [True, True, False]),
    ],
)
def test_what_its_backward_follows_at_once_is_not_recomputed(
    schedule: str, stages: int, microbatches: int, expected: list[bool]
) -> None:
    plan = ParallelPlan(((1, 1),) * stages, microbatches=microbatches, schedule=schedule, recompute=True)  # type: ignore[arg-type]
    assert [recomputes(plan, stage) for stage in range(stages)] == expected
    assert not any(recomputes(replace(plan, recompute=False), stage) for stage in range(stages))
    in_cells = replace(plan, cells=(2, 2))  # each cell's forward waits while others run
    assert all(recomputes(in_cells, stage) for stage in range(stages))


def test_first_backwards_have_no_gradients_yet() -> None:
    plan = ParallelPlan(((1, 1),) * 2, microbatches=4, schedule="gpipe")
    no, yes = (False,), (True,)
    assert fullest_moments(plan)[(0, 0),] == (Moment(0, (3,), no), Moment(0, (2,), yes))
    assert fullest_moments(ParallelPlan(((1, 1),)))[(0, 0),] == (Moment(0, (0,), no),)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["sequential", "gpipe", "1f1b", "zb_h1", "gems_mast", "gems_master", "chimera"]),
    st.lists(st.sampled_from([(1, 1), (1, 2), (2, 2)]), min_size=1, max_size=4),
    st.integers(1, 4).map(lambda half: 2 * half),
)
def test_every_moment_of_every_rank_is_covered(schedule: str, grids: list[tuple[int, int]], microbatches: int) -> None:
    plan = ParallelPlan(tuple(grids), microbatches=microbatches, schedule=schedule)  # type: ignore[arg-type]
    placement = Placement.of(plan)
    found = fullest_moments(plan)
    for rank, actions in enumerate(generate(plan, placement).actions):
        hosted = placement.hosted(rank)
        fullest, live, done, seen = found[hosted], Counter[tuple[int, int]](), set[tuple[int, int]](), list[Moment]()
        between = Counter[tuple[int, int]]()
        states: list[Any] = [live.__getitem__, done.__contains__, *[between.__getitem__] * plan.divides_backwards]
        for action in actions:
            key = action.stage, action.direction
            live[key] -= action.verb in TO_INPUTS
            between[key] -= action.verb is Verb.W
            now = Moment(hosted.index(key), *(tuple(state(h) for h in hosted) for state in states))
            assert any(moment.covers(now) for moment in fullest), (str(action), now)
            seen.append(now)
            live[key] += action.verb is Verb.F
            between[key] += action.verb is Verb.I
            done |= {key} if action.verb in TO_WEIGHTS else set()
        assert set(fullest) <= set(seen)
        assert not any(one.covers(other) for one in fullest for other in fullest if one is not other)


def test_few_ranks_stand_for_all_wherever_their_number_does_not_matter() -> None:
    """One rank a grid, unless there are two directions and grids of other sizes at the other end."""
    for grids, directions, wanted in (
        (((1, 2), (1, 1)), 1, (1, 1)),
        (((1, 2), (1, 1)), 2, (2, 1)),
        (((1, 2), (1, 1), (1, 2)), 2, (1, 1, 1)),
        (((2, 1), (1, 3), (1, 2), (1, 1)), 2, (2, 3, 2, 1)),
        (((1, 2),), 2, (1,)),
    ):
        schedule = "chimera" if directions == 2 else "1f1b"
        assert _sizes(ParallelPlan(grids, microbatches=2, schedule=schedule)) == wanted  # type: ignore[arg-type]


def test_a_moment_covers_those_that_need_no_more() -> None:
    small = [Moment(r, (w,), (g,), b) for r in (0, 1) for w in (0, 1) for g in (False, True) for b in ((0,), (1,))]
    for one in small:
        for other in small:
            more = one.waiting >= other.waiting and one.gradients >= other.gradients and one.between >= other.between
            assert one.covers(other) == (one.running == other.running and more)
    assert [Moment(0, (2, 3), (False, True), b).in_flight(1) for b in ((), (0, 4))] == [3, 7]
    assert Moment(1, (2, 3), (False, True)).in_flight(1) == 4
