"""The dry run against the formulas of the papers, and against faults that were planted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule.action import Schedule
from hyfi_core.schedule.fault import MARK, ScheduleError
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.lower import lower
from hyfi_core.schedule.simulate import Costs, Simulation, simulate, validate
from tests.hyfi_core.schedule.cases import chain, draw_case, dry_run, plant

SHAPES = [(2, 2), (2, 8), (3, 6), (4, 4), (4, 16), (8, 8), (8, 32)]
"""Stages D and micro-batches N."""
WITHIN = 0.05


def run(schedule: str, stages: int, microbatches: int, costs: Costs | None = None, interleave: int = 1) -> Simulation:
    plan = ParallelPlan(((1, 1),) * stages, schedule=schedule, microbatches=microbatches, interleave=interleave)
    return dry_run(plan, costs)


@pytest.mark.parametrize(("d", "n"), SHAPES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_of_a_pipeline(schedule: str, d: int, n: int) -> None:
    """(D − 1) / (N + D − 1), whatever a backward costs."""
    for costs in (Costs(), Costs(backward_s=1.0)):
        assert run(schedule, d, n, costs).bubble == pytest.approx((d - 1) / (n + d - 1), rel=WITHIN)


@pytest.mark.parametrize(("d", "n"), SHAPES)
def test_bubble_of_layer_parallelism(d: int, n: int) -> None:
    assert run("sequential", d, n).bubble == pytest.approx((d - 1) / d, rel=WITHIN)


@pytest.mark.parametrize("d", [2, 3, 4, 8])
def test_bubble_of_gems(d: int) -> None:
    """(D − 1) / (D + ½) as η grows: a period of two micro-batches, 6 of work on each rank, takes 4D + 2."""
    bubbles = [run("gems_master", d, 2 * repetitions).bubble for repetitions in (1, 4, 16)]
    limit = (d - 1) / (d + 0.5)
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[-1] == pytest.approx(limit, rel=WITHIN)
    assert bubbles[-1] > limit
    for repetitions, bubble in zip((1, 4, 16), bubbles, strict=True):
        makespan = repetitions * (4 * d + 2) + d - 1  # the last backward goes through all the ranks once more
        assert bubble == pytest.approx(1 - 6 * repetitions / makespan)


@pytest.mark.parametrize(("d", "n"), [(2, 2), (4, 4), (6, 6), (8, 8), (4, 16), (8, 32)])
def test_bubble_of_chimera(d: int, n: int) -> None:
    """(D − 2) / (2N + D − 2) where a backward costs as much as a forward."""
    assert run("chimera", d, n, Costs(backward_s=1.0)).bubble == pytest.approx((d - 2) / (2 * n + d - 2), rel=WITHIN)


@pytest.mark.parametrize("d", [2, 4, 6, 8])
def test_bubble_of_chimera_with_slow_backwards(d: int) -> None:
    """(D − 2) / (3N/2 + D − 2) for one unit of N = D where a backward costs twice as much."""
    assert run("chimera", d, d).bubble == pytest.approx((d - 2) / (1.5 * d + d - 2), rel=WITHIN)


@pytest.mark.parametrize(("d", "n", "v"), [(2, 4, 2), (3, 6, 2), (4, 8, 2), (4, 8, 3), (4, 4, 2)])
def test_bubble_of_interleaved_stages(d: int, n: int, v: int) -> None:
    """(D − 1) / v instead of D − 1 micro-batches of waiting."""
    wait = (d - 1) / v
    assert run("1f1b", d, n, interleave=v).bubble == pytest.approx(wait / (n + wait), rel=WITHIN)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 12), st.sampled_from([0.5, 1.0, 1.5]), st.sampled_from([0.25, 0.5, 1.0]))
def test_bubble_of_zb_h1(d: int, more: int, first_s: float, weight_s: float) -> None:
    """(D − 1)(F + I − W) for N ≥ D if W is not longer than I: a third of 1F1B's if all three take as long."""
    n, weight_s = d + more, min(first_s, weight_s)
    costs = Costs(backward_s=first_s + weight_s, weight_s=weight_s)
    waits_s = run("zb_h1", d, n, costs).makespan_s - n * (1.0 + first_s + weight_s)
    assert waits_s == pytest.approx((d - 1) * (1.0 + first_s - weight_s))
    assert run("1f1b", d, n, costs).makespan_s - n * (1.0 + first_s + weight_s) == pytest.approx(
        (d - 1) * (1.0 + first_s + weight_s)
    )


@pytest.mark.parametrize(("d", "n"), [*SHAPES, (4, 2), (8, 3)])
def test_zb_h1_keeps_no_more_than_the_first_stage_of_1f1b(d: int, n: int) -> None:
    assert run("zb_h1", d, n).peak_live == (max(run("1f1b", d, n).peak_live),) * d
    assert run("zb_h1", d, n).makespan_s <= run("1f1b", d, n).makespan_s


@pytest.mark.parametrize(("d", "n"), SHAPES)
def test_live_microbatches(d: int, n: int) -> None:
    assert run("gpipe", d, n).peak_live == (n,) * d
    assert run("1f1b", d, n).peak_live == tuple(min(d - stage, n) for stage in range(d))
    assert run("sequential", d, n).peak_live == (1,) * d
    assert run("gems_master", d, n).peak_live == run("sequential", d, n).peak_live
    assert run("gems_mast", d, n).peak_live == (n // 2,) * d


@pytest.mark.parametrize(("d", "n"), [(2, 2), (4, 4), (4, 16), (6, 6), (8, 8), (8, 32)])
def test_live_microbatches_of_chimera(d: int, n: int) -> None:
    """From D/2 + 1 on the outer ranks to D on the middle ones."""
    peaks = run("chimera", d, n).peak_live
    assert (min(peaks), max(peaks)) == (d // 2 + 1, d)
    assert peaks[0] == peaks[-1] == d // 2 + 1


@pytest.mark.parametrize(("d", "n"), [(3, 4), (5, 6), (5, 20), (7, 8)])
def test_chimera_on_an_odd_number_of_stages(d: int, n: int) -> None:
    """Exact and within the memory, if not within the bubbles, of the paper; for N = D + 1 it waits less than 1F1B."""
    found = run("chimera", d, n)
    assert max(found.peak_live) <= d
    assert n > d + 1 or found.bubble < run("1f1b", d, n).bubble


def test_costs_may_depend_on_the_stage() -> None:
    slow_second = Costs(forward_s=lambda stage: 1.0 + stage, backward_s=2.0, message_s=0.5, reduce_s=3.0)
    found = run("sequential", 2, 1, slow_second)
    assert found.makespan_s == 1 + 0.5 + 2 + 2 + 0.5 + 2 + 3  # F0, send, F1, B1, send, B0, REDUCE.s0
    assert found.busy_s == (3.0, 4.0)
    assert found.bubble == pytest.approx(1 - 7 / 16)


def test_the_grid_shows_all_ranks_over_time() -> None:
    assert run("gpipe", 2, 2).grid().splitlines() == [
        "rank 0 │ F0.s0.d0  F1.s0.d0                      B0.s0.d0  B1.s0.d0",
        "rank 1 │           F0.s1.d0  F1.s1.d0  B0.s1.d0  B1.s1.d0",
    ]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_generated_and_lowered_runs(data: st.DataObject) -> None:
    case = draw_case(lambda low, high: data.draw(st.integers(low, high)))
    schedule = case.lowered()
    assert Schedule.from_text(schedule.to_text()) == schedule
    found = case.simulate(schedule)
    assert 0 <= found.bubble < 1
    work = 3 * case.plan.microbatches * sum(rows * columns for rows, columns in case.placement.grids)
    assert sum(found.busy_s) == work


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_a_planted_fault_is_found_where_it_is(data: st.DataObject) -> None:
    def pick(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    case = draw_case(pick)
    planted = plant(case, case.lowered(), pick)
    if planted is None:
        return
    with pytest.raises(ScheduleError) as caught:
        case.simulate(planted.schedule)
    assert planted.is_located_by(caught.value), f"{planted}\n{caught.value}"


def lowered(schedule: str, grids: tuple[tuple[int, int], ...], microbatches: int) -> tuple[Schedule, Placement]:
    plan = ParallelPlan(grids, schedule=schedule, microbatches=microbatches)
    placement = Placement.of(plan)
    return lower(generate(plan, placement), placement, chain(plan.stages)), placement


def edited(schedule: Schedule, rank: int, old: str, new: str) -> Schedule:
    lines = schedule.to_text().splitlines()
    assert lines[1 + rank].count(old) == 1
    lines[1 + rank] = lines[1 + rank].replace(old, new)
    return Schedule.from_text("\n".join(lines))


def message(schedule: Schedule, placement: Placement) -> str:
    with pytest.raises(ScheduleError) as caught:
        simulate(schedule, placement, chain(placement.stages))
    return str(caught.value)


def test_two_gangs_in_opposite_orders_dead_lock() -> None:
    """Ranks 0 and 1 hold stage 0 of direction 0 and stage 1 of direction 1; without gangs a dry run would say "ok"."""
    plan = ParallelPlan(((1, 2), (1, 2)), schedule="chimera", microbatches=2)
    placement = Placement.of(plan)
    schedule = lower(generate(plan, placement), placement, [])
    swapped = edited(schedule, 1, "F0.s0.d0 F1.s1.d1", "F1.s1.d1 F0.s0.d0")
    with pytest.raises(ScheduleError) as caught:
        simulate(swapped, placement, [])
    assert str(caught.value).splitlines() == [
        "schedule chimera: deadlock",
        "  rank 0, action 0, F0.s0.d0: waits for rank 1 of its stage, which is at F1.s1.d1",
        "  rank 1, action 0, F1.s1.d1: waits for rank 0 of its stage, which is at F0.s0.d0",
        f"rank 0 │ {'':8}  {'':8}  {'':8}  {'':8}  F0.s0.d0 {MARK}",
        f"rank 1 │ {'':8}  {'':8}  {'':8}  {'':8}  F1.s1.d1 {MARK}",
        "rank 2 │ F1.s0.d1  F0.s1.d0  B0.s1.d0  B1.s0.d1",
        "rank 3 │ F1.s0.d1  F0.s1.d0  B0.s1.d0  B1.s0.d1",
    ]


def test_a_lost_receive_is_told_by_what_needs_it() -> None:
    schedule, placement = lowered("1f1b", ((1, 1), (1, 1)), 2)
    text = message(edited(schedule, 1, "RECV_F1.s1.d0<s0 ", ""), placement)
    assert "rank 1, action 4, F1.s1.d0: needs RECV_F1.s1.d0<s0, which is missing" in text
    assert f"F1.s1.d0 {MARK}" in text


def test_messages_in_another_order_are_told_on_both_sides() -> None:
    schedule, placement = lowered("gpipe", ((1, 1), (1, 1)), 2)
    wrong = edited(schedule, 1, "RECV_F0.s1.d0<s0 RECV_F1.s1.d0<s0", "RECV_F1.s1.d0<s0 RECV_F0.s1.d0<s0")
    text = message(wrong, placement)
    assert "rank 1, action 0, RECV_F1.s1.d0<s0: is posted while rank 0 sends for RECV_F0.s1.d0<s0" in text
    assert "rank 0, action 1, SEND_F0.s0.d0>s1: is sent while rank 1 posts RECV_F1.s1.d0<s0" in text
    assert text.count(MARK) == 2


def test_ranks_that_wait_for_each_others_data_are_told() -> None:
    schedule, placement = lowered("gpipe", ((1, 1), (1, 1)), 2)
    early = edited(schedule, 0, "RECV_B0.s0.d0<s1 F1.s0.d0 SEND_F1.s0.d0>s1", "RECV_B0.s0.d0<s1")
    early = edited(early, 0, "B0.s0.d0 B1.s0.d0", "B0.s0.d0 F1.s0.d0 SEND_F1.s0.d0>s1 B1.s0.d0")
    text = message(early, placement)
    assert "deadlock" in text
    assert "B0.s0.d0: waits for rank 1 to send for RECV_B0.s0.d0<s1; it is at F1.s1.d0" in text
    assert "F1.s1.d0: waits for rank 0 to send for RECV_F1.s1.d0<s0; it is at B0.s0.d0" in text


def test_a_rank_that_has_sent_to_itself_does_not_wait_for_itself() -> None:
    """Both ranks hold both stages; rank 1 sends too late for its own receive, and rank 0 waits for rank 1 alone."""
    plan = ParallelPlan(((1, 2),), interleave=2)
    placement = Placement.of(plan)
    schedule = lower(generate(plan, placement), placement, chain(2))
    text = message(edited(schedule, 1, "SEND_F0.s0.d0>s1 F0.s1.d0", "F0.s1.d0 SEND_F0.s0.d0>s1"), placement)
    assert text.splitlines()[:2] == [
        "schedule 1f1b: deadlock",
        "  rank 1, action 2, F0.s1.d0: waits for rank 1 to send for RECV_F0.s1.d0<s0; it is at F0.s1.d0",
    ]
    assert text.count(MARK) == 1


def test_a_schedule_of_another_number_of_ranks_is_refused() -> None:
    schedule, placement = lowered("gpipe", ((1, 1), (1, 1)), 2)
    assert "it has 1 ranks, but the placement has 2" in message(Schedule("x", schedule.actions[:1]), placement)
    with pytest.raises(ScheduleError, match="it has 3 ranks, but the placement has 2"):
        validate(Schedule("x", (*schedule.actions, ())), placement, [(0, 1)])


def test_microbatches_that_lack_everywhere_are_found_by_their_number() -> None:
    schedule, placement = lowered("gpipe", ((1, 1), (1, 1)), 2)
    assert simulate(schedule, placement, chain(2))
    with pytest.raises(ScheduleError, match=r"F2\.s0\.d0 is missing|needs F2\.s0\.d0"):
        simulate(schedule, placement, chain(2), microbatches=3)


def test_messages_of_one_direction_may_go_through_one_stream() -> None:
    placement = Placement.of(ParallelPlan(((1, 1),) * 2, ("a",), 1, "gpipe"))
    text = """schedule hand
0: F0.s0.d0 SEND_F0.s0.d0>s1 RECV_B0.s0.d0<s1 B0.s0.d0 REDUCE.s0
1: RECV_F0.s1.d0<s0 F0.s1.d0 B0.s1.d0 SEND_B0.s1.d0>s0 REDUCE.s1
"""
    found = simulate(Schedule.from_text(text), placement, [(0, 1)], one_stream=True)
    assert found.makespan_s == 6


def test_in_one_stream_a_message_waits_for_the_one_before_it() -> None:
    """Two forwards of a second each, whose messages take three: alone they overlap, in one stream they do not."""
    placement = Placement.of(ParallelPlan(((1, 1),) * 2, ("a",), 2, "gpipe"))
    schedule = Schedule.from_text(TWO_FORWARDS)
    costs = Costs(forward_s=1.0, backward_s=1.0, message_s=3.0, reduce_s=0.0)
    events = {
        one_stream: {
            event.name: (event.start_s, event.end_s)
            for event in simulate(schedule, placement, [(0, 1)], costs=costs, one_stream=one_stream).events
        }
        for one_stream in (False, True)
    }
    assert [events[way]["SEND_F1.s0.d0>s1"] for way in (False, True)] == [(2, 5), (4, 7)]


TWO_FORWARDS = """schedule two forwards
0: F0.s0.d0 SEND_F0.s0.d0>s1 F1.s0.d0 SEND_F1.s0.d0>s1 RECV_B0.s0.d0<s1 B0.s0.d0 RECV_B1.s0.d0<s1 B1.s0.d0 REDUCE.s0
1: RECV_F0.s1.d0<s0 RECV_F1.s1.d0<s0 F0.s1.d0 F1.s1.d0 B0.s1.d0 SEND_B0.s1.d0>s0 B1.s1.d0 SEND_B1.s1.d0>s0 REDUCE.s1
"""
IN_TWO = """schedule in two
0: F0.s0.d0 F1.s0.d0 I0.s0.d0 W0.s0.d0 I1.s0.d0 W1.s0.d0
1: F0.s1.d0 I0.s1.d0 F1.s1.d0 I1.s1.d0 W0.s1.d0 W1.s1.d0
"""


def in_two() -> tuple[Schedule, Placement]:
    placement = Placement.of(ParallelPlan(((1, 1),) * 2, microbatches=2))
    return lower(Schedule.from_text(IN_TWO), placement, chain(2)), placement


def test_the_first_part_of_a_backward_sends_and_the_second_is_before_the_reduction() -> None:
    schedule, placement = in_two()
    assert schedule.to_text().splitlines()[2] == (
        "1: RECV_F0.s1.d0<s0 F0.s1.d0 RECV_F1.s1.d0<s0 I0.s1.d0 SEND_B0.s1.d0>s0 F1.s1.d0 I1.s1.d0 SEND_B1.s1.d0>s0 "
        "W0.s1.d0 W1.s1.d0 REDUCE.s1"
    )
    found = simulate(schedule, placement, chain(2))
    assert found.makespan_s == 7 and found.bubble == pytest.approx(1 - 12 / 14)
    assert found.peak_live == (2, 2)  # what weights need is kept until W
    uneven = simulate(schedule, placement, chain(2), costs=Costs(backward_s=5.0, weight_s=lambda stage: 4.0 - stage))
    assert uneven.busy_s == (12.0, 12.0)
    assert {e.name: e.end_s - e.start_s for e in uneven.events if e.kind in ("I", "W") and "0.s" in e.name} == {
        "I0.s0.d0": 1.0,
        "W0.s0.d0": 4.0,
        "I0.s1.d0": 2.0,
        "W0.s1.d0": 3.0,
    }


@pytest.mark.parametrize(
    ("rank", "old", "new", "told"),
    [
        (0, "I1.s0.d0 W1.s0.d0", "W1.s0.d0 I1.s0.d0", "W1.s0.d0: comes before I1.s0.d0, which it needs"),
        (1, "W0.s1.d0 ", "", "REDUCE.s1: needs W0.s1.d0, which is missing"),
        (1, "W1.s1.d0 REDUCE.s1", "REDUCE.s1 W1.s1.d0", "REDUCE.s1: comes before W1.s1.d0, which it needs"),
        (0, "I1.s0.d0", "B1.s0.d0", "B1.s0.d0: does not belong to this rank in this plan"),
    ],
)
def test_weights_out_of_order_are_told(rank: int, old: str, new: str, told: str) -> None:
    schedule, placement = in_two()
    assert told in message(edited(schedule, rank, old, new), placement)


def test_a_rank_that_waits_for_its_own_message_is_told_so() -> None:
    placement = Placement.of(ParallelPlan(((1, 1),), microbatches=1, interleave=2))
    actions = "RECV_F0.s1.d0<s0 F0.s1.d0 F0.s0.d0 SEND_F0.s0.d0>s1 B0.s1.d0 SEND_B0.s1.d0>s0 RECV_B0.s0.d0<s1 B0.s0.d0"
    schedule = Schedule.from_text(f"schedule s\n0: {actions} REDUCE.s1 REDUCE.s0\n")
    with pytest.raises(ScheduleError, match="deadlock") as told:
        simulate(schedule, placement, [(0, 1)])
    (blame,) = told.value.blames
    assert (blame.rank, blame.index) == (0, 1)
    assert blame.why == "waits for rank 0 to send for RECV_F0.s1.d0<s0; it is at F0.s1.d0"


def test_an_action_of_a_direction_that_the_plan_lacks_does_not_belong_to_it() -> None:
    placement = Placement.of(ParallelPlan(((1, 1),), microbatches=1))
    schedule = Schedule.from_text("schedule s\n0: F0.s0.d0 F0.s0.d1 B0.s0.d0 REDUCE.s0\n")
    with pytest.raises(ScheduleError, match="does not belong to this rank in this plan") as told:
        simulate(schedule, placement, [])
    assert [(blame.rank, blame.index) for blame in told.value.blames] == [(0, 1)]
