import json
from itertools import pairwise

import pytest

from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.schedule.simulate import Costs
from hyfi_core.schedule.trace import TraceEvent, bubble, to_chrome, to_json
from tests.hyfi_core.schedule.cases import dry_run

PLAN = ParallelPlan(((1, 2), (1, 1)), schedule="1f1b", microbatches=3)
EVENTS = dry_run(PLAN, Costs(message_s=0.25, reduce_s=1.0)).events


def test_the_trace_is_what_perfetto_reads() -> None:
    chrome = json.loads(to_json(EVENTS))
    assert chrome == to_chrome(EVENTS)
    rows = chrome["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    drawn = [row for row in rows if row["ph"] == "X"]
    assert len(drawn) == len(EVENTS)
    assert all(row.keys() == {"ph", "name", "cat", "pid", "tid", "ts", "dur"} for row in drawn)
    first = next(row for row in drawn if row["name"] == "B0.s1.d0")
    assert (first["pid"], first["tid"], first["cat"], first["ts"], first["dur"]) == (2, 0, "B", 2.25e6, 2e6)


def test_a_rank_computes_one_thing_at_a_time() -> None:
    for rank in range(3):
        compute = sorted(
            (event.start_s, event.end_s) for event in EVENTS if event.rank == rank and event.kind in ("F", "B")
        )
        assert len(compute) == 6
        assert all(before[1] <= after[0] for before, after in pairwise(compute))


def test_the_ranks_of_a_gang_compute_together() -> None:
    spans = [{(e.name, e.start_s, e.end_s) for e in EVENTS if e.rank == r and e.kind in ("F", "B")} for r in (0, 1)]
    assert spans[0] == spans[1]


def test_a_bubble_is_the_time_without_forward_and_backward() -> None:
    events = [
        TraceEvent(0, "forward", 10.0, 11.0, "F"),
        TraceEvent(0, "backward", 12.0, 14.0, "B"),
        TraceEvent(1, "all of it", 10.5, 13.5, "F"),
        TraceEvent(1, "a message", 0.0, 99.0, "SEND_F"),
    ]
    assert bubble(events) == pytest.approx(1 - 6 / 8)
    with pytest.raises(ValueError, match="without forward and backward"):
        bubble(events[3:])


def test_a_rank_that_only_computes_has_a_lane_for_messages_too() -> None:
    """So that the ranks of a trace look alike; one for data only where there are any."""
    for more, lanes in (([], ["compute", "communication"]), (["data"], ["compute", "communication", "data"])):
        events = [TraceEvent(0, "F0.s0.d0", 0.0, 1.0, "F"), *(TraceEvent(0, "batch", 0.0, 1.0, kind) for kind in more)]
        rows = [row for row in to_chrome(events)["traceEvents"] if row["name"] == "thread_name"]
        assert [(row["tid"], row["args"]["name"]) for row in rows] == list(enumerate(lanes))
