"""What is drawn of schedules, character by character: the orders in docstrings, grids of text, traces, pictures."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.schedule import generate as generators
from hyfi_core.schedule.generate import generate
from hyfi_core.schedule.grid import error_grid, list_grid, time_grid
from hyfi_core.schedule.picture import draw
from hyfi_core.schedule.trace import TraceEvent, to_chrome

ROW = re.compile(r"^ *rank \d+  (.*)$", re.MULTILINE)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", ["_sequential", "_gpipe", "_gems", "_zb_h1", "_chimera"])
def test_the_order_in_a_docstring_is_the_one_that_is_generated(name: str) -> None:
    of: dict[str, Callable[..., object]] = vars(generators)
    rows = [[word for word in row.split() if word != "."] for row in ROW.findall(of[name].__doc__ or "")]
    microbatches = 1 + max(int(word[1:]) for row in rows for word in row)
    schedule = {"_gems": "gems_master"}.get(name, name[1:])
    plan = ParallelPlan(((1, 1),) * len(rows), microbatches=microbatches, schedule=schedule)  # type: ignore[arg-type]
    made = generate(plan, Placement.of(plan)).actions
    assert [[str(action).split(".")[0] for action in row] for row in made] == rows


def test_interleaved_stages_are_in_the_published_order() -> None:
    """Two grids of two stages and four micro-batches: four and two forwards ahead, then one and one."""
    plan = ParallelPlan(((1, 1), (1, 1)), microbatches=4, interleave=2)
    rows = [" ".join(str(a).removesuffix(".d0") for a in row) for row in generate(plan, Placement.of(plan)).actions]
    assert rows == [
        "F0.s0 F1.s0 F0.s2 F1.s2 F2.s0 B0.s2 F3.s0 B1.s2 F2.s2 B0.s0 F3.s2 B1.s0 B2.s2 B3.s2 B2.s0 B3.s0",
        "F0.s1 F1.s1 F0.s3 B0.s3 F1.s3 B1.s3 F2.s1 B0.s1 F3.s1 B1.s1 F2.s3 B2.s3 F3.s3 B3.s3 B2.s1 B3.s1",
    ]
    alone = ParallelPlan(((1, 1),), microbatches=2, interleave=2)
    (row,) = generate(alone, Placement.of(alone)).actions
    assert " ".join(str(a).removesuffix(".d0") for a in row) == "F0.s0 F0.s1 B0.s1 B0.s0 F1.s0 F1.s1 B1.s1 B1.s0"


def test_of_long_lists_the_ends_before_a_fault_are_drawn() -> None:
    rows = [list(range(20)), list(range(100, 105)), *[[7]] * 9]
    drawn = list_grid(rows, {0: 10, 1: 4}).splitlines()
    assert drawn[0] == "rank  0 │ 3    4    5    6    7    8    9    10 <-- ERROR HERE"
    assert drawn[1] == "rank  1 │ 100  101  102  103  104 <-- ERROR HERE"
    assert drawn[2] == "rank  2 │ 7" and drawn[-1] == "rank 10 │ 7" and len(drawn) == 11
    after = list_grid([list(range(20)), list(range(20))], {0: 10}).splitlines()
    assert after == [f"rank {n} │ 3   4   5   6   7   8   9   10{' <-- ERROR HERE' * (n == 0)}" for n in (0, 1)]


def event(rank: int, name: str, start_s: float, end_s: float) -> TraceEvent:
    return TraceEvent(rank, name, start_s, end_s, re.split(r"\d|\.", name)[0])


EVENTS = [
    event(0, "F0.s0.d0", 2.0, 3.0),
    event(0, "SEND_F0.s0.d0>s1", 3.0, 3.5),
    event(1, "F0.s1.d0", 3.5, 4.5),
    event(1, "B0.s1.d0", 4.5, 6.5),
    event(0, "B0.s0.d0", 7.0, 9.0),
    event(1, "REDUCE.s1", 6.5, 7.0),
]


def test_a_grid_has_a_column_for_each_time_at_which_something_starts() -> None:
    assert time_grid(EVENTS, 2).splitlines() == [
        "rank 0 │ F0.s0.d0                      B0.s0.d0",
        "rank 1 │           F0.s1.d0  B0.s1.d0",
    ]
    assert error_grid(EVENTS[:4], ["B0.s0.d0", ""], [0], 2).splitlines() == [
        "rank 0 │ F0.s0.d0                      B0.s0.d0 <-- ERROR HERE",
        "rank 1 │           F0.s1.d0  B0.s1.d0",
    ]
    many = [event(0, f"F{n}.s0.d0", float(n), n + 1.0) for n in range(12)]
    assert "F0.s0.d0" in time_grid(many, 1) and "F4.s0.d0" not in error_grid(many, ["B0.s0.d0"], [0], 1)
    assert error_grid([], ["F0.s0.d0"], [], 1) == "rank 0 │ F0.s0.d0"
    nine = [event(0, f"F{n}.s0.d0", float(n), n + 1.0) for n in range(8)]
    assert error_grid(nine[:7], ["B0.s0.d0"], [0], 1).startswith("rank 0 │ F0.s0.d0")
    assert error_grid(nine, ["B0.s0.d0"], [0], 1).startswith("rank 0 │ F1.s0.d0")


def test_a_trace_has_a_process_for_each_rank_and_a_lane_for_each_kind() -> None:
    extra = [TraceEvent(1, "weights", 7.0, 7.5, "update"), TraceEvent(1, "batch", 0.0, 1.0, "data")]
    chrome = to_chrome([*EVENTS, *extra], {1: "loader"})
    rows = chrome["traceEvents"]
    names = {(row["pid"], row["name"], row.get("tid")): row["args"] for row in rows if row["ph"] == "M"}
    assert {key[:2] for key in names} == {
        (rank, name) for rank in (0, 1) for name in ("process_name", "process_sort_index", "thread_name")
    }
    assert names[0, "process_name", None] == {"name": "rank 0"} and names[1, "process_name", None] == {"name": "loader"}
    assert names[1, "process_sort_index", None] == {"sort_index": 1} and chrome["displayTimeUnit"] == "ms"
    lane_names = {lane: args["name"] for (rank, name, lane), args in names.items() if name == "thread_name"}
    drawn = {
        row["name"]: (row["pid"], lane_names[row["tid"]], row["ts"], row["dur"]) for row in rows if row["ph"] == "X"
    }
    assert drawn["F0.s0.d0"] == (0, "compute", 2e6, 1e6)
    assert drawn["SEND_F0.s0.d0>s1"] == (0, "communication", 3e6, 0.5e6)
    assert drawn["REDUCE.s1"][:2] == (1, "communication")
    assert len({drawn[name][1] for name in ("F0.s1.d0", "REDUCE.s1")}) == 2
    assert [row["name"] for row in rows if row["ph"] == "X" and row["pid"] == 0] == [
        "F0.s0.d0", "SEND_F0.s0.d0>s1", "B0.s0.d0",
    ]  # fmt: skip


def picture_of(events: list[TraceEvent], width_px: int) -> list[tuple[str, ...]]:
    """The boxes and texts of a picture: (fill, x, y, width, height) and (text, x, y, size, anchor)."""
    root = ElementTree.fromstring(draw(events, "a < title", width_px=width_px))
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}" and root.get("width") == str(width_px)
    found = []
    for item in root:
        box = item.tag == f"{SVG}rect"
        first, others = (item.get("fill"), ("width", "height")) if box else (item.text, ("font-size", "text-anchor"))
        found.append((str(first), *(item.get(name, "0") for name in ("x", "y", *others))))
    return found


def test_a_picture_box_by_box() -> None:
    """Seven seconds in 700 px: a second is 100 px wide, and the first one, 2 s, is at the left, at 70 px."""
    assert picture_of(EVENTS, 790) == [
        ("white", "0", "0", "790", "166"),
        ("a < title", "70.00", "18.00", "14", "start"),
        ("#9ccbe8", "70.00", "30.00", "12.00", "12"),
        ("forward, direction 0", "88.00", "40.00", "11", "start"),
        ("#2f7fb5", "240.00", "30.00", "12.00", "12"),
        ("backward, direction 0", "258.00", "40.00", "11", "start"),
        ("#999999", "416.50", "30.00", "12.00", "12"),
        ("send", "434.50", "40.00", "11", "start"),
        ("#009e73", "482.50", "30.00", "12.00", "12"),
        ("reduce", "500.50", "40.00", "11", "start"),
        ("rank 0", "62.00", "72.00", "11", "end"),
        ("#f3f3f3", "70.00", "56.00", "700.00", "24"),
        ("rank 1", "62.00", "112.00", "11", "end"),
        ("#f3f3f3", "70.00", "96.00", "700.00", "24"),
        ("#9ccbe8", "70.00", "56.00", "100.00", "24"),
        ("0", "120.00", "72.00", "11", "middle"),
        ("#999999", "170.00", "82.00", "50.00", "6"),
        ("#2f7fb5", "570.00", "56.00", "200.00", "24"),
        ("0", "670.00", "72.00", "11", "middle"),
        ("#9ccbe8", "220.00", "96.00", "100.00", "24"),
        ("0", "270.00", "112.00", "11", "middle"),
        ("#2f7fb5", "320.00", "96.00", "200.00", "24"),
        ("0", "420.00", "112.00", "11", "middle"),
        ("#009e73", "520.00", "122.00", "50.00", "6"),
        *((f"{t} s" if t == 7 else f"{t}", f"{70 + 100 * t}.00", "150.00", "11", "middle") for t in range(8)),
    ]


def test_both_directions_and_both_parts_of_a_backward_have_colours() -> None:
    """A number that is wider than its box is left out: seven pixels a digit."""
    names = ["F10.s0.d1", "B10.s0.d1", "I10.s0.d1", "W10.s0.d1", "I10.s0.d0", "W10.s0.d0"]
    events = [event(0, name, 14.0 * n, 14.0 * (n + 1)) for n, name in enumerate(names)]
    events += [event(0, "F10.s1.d0", 84.0, 97.9), TraceEvent(0, "halo", 97.9, 100.0, "exchange")]
    found = picture_of(events, 190)  # a pixel a second
    colours = [fill for fill, _, y, _, height in found if (y, height) == ("56.00", "24") and fill != "#f3f3f3"]
    assert colours == ["#f6cf7f", "#d98a00", "#d98a00", "#f7ead0", "#2f7fb5", "#d4e3ec", "#9ccbe8"]
    assert sum(text == "10" for text, *_ in found) == 6
    assert ("#cc79a7", "167.90", "82.00", "2.10", "6") in found
    legend = [text for text, _, y, *_ in found if y == "40.00"]
    assert legend == [
        "forward, direction 0", "backward, direction 0", "weight gradient, direction 0", "forward, direction 1",
        "backward, direction 1", "weight gradient, direction 1", "other",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("span_s", "ticks"),
    [
        (1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1 s"]),
        (4.9, ["0", "0.5", "1", "1.5", "2", "2.5", "3", "3.5", "4", "4.5 s"]),
        (5.0, ["0", "1", "2", "3", "4", "5 s"]),
        (24.9, ["0", "2", "4", "6", "8", "10", "12", "14", "16", "18", "20", "22", "24 s"]),
        (25.0, ["0", "5", "10", "15", "20", "25 s"]),
    ],
)
def test_ticks_are_at_round_times(span_s: float, ticks: list[str]) -> None:
    found = picture_of([event(0, "F0.s0.d0", 1.0, 1.0 + span_s)], 500)
    assert [text for text, _, y, *_ in found if y == "110.00"] == ticks
