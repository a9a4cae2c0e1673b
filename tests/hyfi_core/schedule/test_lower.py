from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import COMPUTE, Action, Schedule, Verb, act
from hyfi_core.schedule.fault import ScheduleError
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.lower import lower
from hyfi_core.schedule.routes import counterpart, receivers, senders
from tests.hyfi_core.schedule import runner
from tests.hyfi_core.schedule.cases import RECEIVES, SENDS, Case, chain, draw_case, swap_gangs


def lowered(schedule: str, grids: int, microbatches: int, edges: list[tuple[int, int]] | None = None) -> list[str]:
    plan = ParallelPlan(((1, 1),) * grids, schedule=schedule, microbatches=microbatches)
    placement = Placement.of(plan)
    made = lower(generate(plan, placement), placement, chain(grids) if edges is None else edges)
    return made.to_text().splitlines()[1:]


def test_one_stage_needs_only_its_reduction() -> None:
    assert lowered("1f1b", 1, 2) == ["0: F0.s0.d0 B0.s0.d0 F1.s0.d0 B1.s0.d0 REDUCE.s0"]


def test_receives_are_posted_before_the_computation_before() -> None:
    assert lowered("1f1b", 2, 3) == [
        "0: F0.s0.d0 SEND_F0.s0.d0>s1 RECV_B0.s0.d0<s1 F1.s0.d0 SEND_F1.s0.d0>s1 B0.s0.d0 RECV_B1.s0.d0<s1 "
        "F2.s0.d0 SEND_F2.s0.d0>s1 RECV_B2.s0.d0<s1 B1.s0.d0 B2.s0.d0 REDUCE.s0",
        "1: RECV_F0.s1.d0<s0 F0.s1.d0 RECV_F1.s1.d0<s0 B0.s1.d0 SEND_B0.s1.d0>s0 F1.s1.d0 RECV_F2.s1.d0<s0 "
        "B1.s1.d0 SEND_B1.s1.d0>s0 F2.s1.d0 B2.s1.d0 SEND_B2.s1.d0>s0 REDUCE.s1",
    ]


def test_skips_over_stages_travel_at_once() -> None:
    assert lowered("sequential", 3, 1, [(0, 1), (1, 2), (0, 2)]) == [
        "0: RECV_B0.s0.d0<s2 RECV_B0.s0.d0<s1 F0.s0.d0 SEND_F0.s0.d0>s1 SEND_F0.s0.d0>s2 B0.s0.d0 REDUCE.s0",
        "1: RECV_F0.s1.d0<s0 RECV_B0.s1.d0<s2 F0.s1.d0 SEND_F0.s1.d0>s2 B0.s1.d0 SEND_B0.s1.d0>s0 REDUCE.s1",
        "2: RECV_F0.s2.d0<s0 RECV_F0.s2.d0<s1 F0.s2.d0 B0.s2.d0 SEND_B0.s2.d0>s1 SEND_B0.s2.d0>s0 REDUCE.s2",
    ]


def test_gradients_of_direction_1_go_to_the_owners_of_the_state() -> None:
    plan = ParallelPlan(((1, 1), (1, 1)), schedule="chimera", microbatches=2, mirror="point_to_point")
    placement = Placement.of(plan)
    made = lower(generate(plan, placement), placement, chain(2), mirror=plan.mirror)
    words = [line.split()[1:] for line in made.to_text().splitlines()[1:]]
    gradients = [[word for word in row if "_G" in word or "REDUCE" in word] for row in words]
    assert gradients == [
        ["SEND_G.s1.d1>d0", "RECV_G.s0.d0<d1", "REDUCE.s0"],
        ["RECV_G.s1.d0<d1", "REDUCE.s1", "SEND_G.s0.d1>d0"],
    ]


def test_messages_without_a_peer_have_no_route() -> None:
    placement = Placement.of(ParallelPlan(((1, 1), (1, 1))))
    with pytest.raises(ValueError, match=r"^SEND_F0\.s0\.d0.* has no peer$"):
        receivers(placement, 0, act(Verb.SEND_F, 0, 0, 0))
    with pytest.raises(ValueError, match=r"^RECV_F0\.s1\.d0.* has no peer$"):
        senders(placement, 1, act(Verb.RECV_F, 1, 0, 0))


@pytest.mark.parametrize("edges", [[(1, 0)], [(0, 0)], [(0, 2)], [(-1, 1)]])
def test_edges_go_forward(edges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="does not go forward among stages 0 to 1"):
        lowered("gpipe", 2, 1, edges)


def draw(data: st.DataObject) -> Case:
    return draw_case(lambda low, high: data.draw(st.integers(low, high)))


@settings(deadline=None)
@given(st.data())
def test_a_pair_of_ranks_has_its_messages_in_one_order(data: st.DataObject) -> None:
    case = draw(data)
    sent, posted = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(case.lowered().actions):
        for action in row:
            if action.verb in SENDS:
                for other in receivers(case.placement, rank, action):
                    sent[rank, other].append(counterpart(action))
            elif action.verb in RECEIVES:
                for other in senders(case.placement, rank, action):
                    posted[other, rank].append(action)
    for pair in sent.keys() | posted.keys():
        if pair[0] == pair[1]:
            assert set(sent[pair]) == set(posted[pair])  # what a rank has itself needs no order
        else:
            assert sent[pair] == posted[pair]


@settings(deadline=None)
@given(st.data())
def test_receives_are_posted_ahead_and_computations_keep_their_order(data: st.DataObject) -> None:
    case = draw(data)
    for before, row in zip(case.compute.actions, case.lowered().actions, strict=True):
        computed = [index for index, action in enumerate(row) if action.verb in COMPUTE]
        assert tuple(row[index] for index in computed) == before
        for place, index in enumerate(computed):
            ahead = computed[place - 1] if place else index
            verb = Verb.RECV_F if row[index].verb is Verb.F else Verb.RECV_B
            own = (row[index].stage, row[index].direction, row[index].microbatch)
            for posted, action in enumerate(row):
                if action.verb is verb and (action.stage, action.direction, action.microbatch) == own:
                    assert posted < ahead


@settings(deadline=None)
@given(st.data())
def test_ranks_reduce_in_one_order_and_late_where_asked(data: st.DataObject) -> None:
    case = draw(data)
    rows = case.lowered().actions
    orders = [[action.stage for action in row if action.verb is Verb.REDUCE] for row in rows]
    for first in orders:
        for second in orders:
            assert [s for s in first if s in second] == [s for s in second if s in first]
    for row in rows:
        for index, action in enumerate(row):
            if action.verb is Verb.REDUCE:
                later = row[index:]
                assert not any(other.verb is Verb.B and other.stage == action.stage for other in later)
                assert case.overlap_reduce or not any(other.verb in COMPUTE for other in later)


@settings(deadline=None)
@given(st.data(), st.integers())
def test_numbers_that_go_through_it_come_out_right(data: st.DataObject, seed: int) -> None:
    case = draw(data)
    wanted = runner.reference(case)
    for rank, gradients in enumerate(runner.run(case, case.lowered(), seed)):
        owned = {stage for stage, d in case.placement.hosted(rank) if d == 0 or case.mirror == "all_reduce"}
        assert gradients == {stage: wanted[stage] for stage in owned}


@settings(deadline=None)
@given(st.data())
def test_lists_without_a_common_order_are_refused_where_they_differ(data: st.DataObject) -> None:
    case = draw(data)
    rank = data.draw(st.integers(0, case.placement.size - 1))
    planted = swap_gangs(case, case.compute, rank, lambda low, high: data.draw(st.integers(low, high)))
    if planted is None:
        return
    with pytest.raises(ScheduleError, match="no common order") as caught:
        lower(planted.schedule, case.placement, case.edges)
    assert any(b.rank == rank and planted.first <= b.index <= planted.last for b in caught.value.blames)


@pytest.mark.parametrize(
    ("second", "of_first", "of_second"),
    [
        ("F1.s0.d0 F0.s0.d0", "waits: rank 1 is at F1.s0.d0", "waits: rank 0 is at F0.s0.d0"),
        ("", "waits: rank 1 is at its end", None),
    ],
)
def test_ranks_of_a_stage_are_told_what_the_others_are_at(second: str, of_first: str, of_second: str | None) -> None:
    schedule = Schedule.from_text(f"schedule s\n0: F0.s0.d0 F1.s0.d0\n1: {second}\n")
    with pytest.raises(ScheduleError, match="no common order") as caught:
        lower(schedule, Placement.of(ParallelPlan(((1, 2),), microbatches=2)), ())
    assert [blame.why for blame in caught.value.blames] == [of_first, *([of_second] if of_second else [])]


def test_a_receive_without_order_would_give_wrong_numbers() -> None:
    """The runner sees what the lowering is for: two receives swapped are two values swapped."""
    plan = ParallelPlan(((1, 1), (1, 1)), schedule="gpipe", microbatches=2)
    placement = Placement.of(plan)
    case = Case(plan, placement, ((0, 1),), generate(plan, placement), True)
    right = case.lowered()
    rows = [list(row) for row in right.actions]
    places = [index for index, action in enumerate(rows[1]) if action.verb is Verb.RECV_F]
    rows[1][places[0]], rows[1][places[1]] = rows[1][places[1]], rows[1][places[0]]
    assert runner.run(case, right, 0)[1] == {1: runner.reference(case)[1]}
    swapped = Schedule("swapped", tuple(map(tuple, rows)))
    assert runner.run(case, swapped, 0)[1] != {1: runner.reference(case)[1]}


def test_needed_actions_are_those_of_the_plan() -> None:
    assert counterpart(Action(Verb.SEND_B, 2, 1, 3, 0)) == Action(Verb.RECV_B, 0, 1, 3, 2)
    assert counterpart(Action(Verb.SEND_G, 2, 1, None, 0)) == Action(Verb.RECV_G, 2, 0, None, 1)
