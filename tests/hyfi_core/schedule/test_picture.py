import math
from xml.etree import ElementTree

import pytest

from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.schedule.picture import draw
from hyfi_core.schedule.simulate import Costs
from hyfi_core.schedule.trace import TraceEvent
from tests.hyfi_core.schedule.cases import dry_run

SVG = "{http://www.w3.org/2000/svg}"
PLAN = ParallelPlan(((1, 1),) * 4, schedule="chimera", microbatches=4)


def boxes(picture: str) -> dict[str, list[ElementTree.Element]]:
    """The boxes of a picture by their hints."""
    found: dict[str, list[ElementTree.Element]] = {}
    for box in ElementTree.fromstring(picture).iter(f"{SVG}rect"):
        hint = box.find(f"{SVG}title")
        if hint is not None and hint.text:
            found.setdefault(hint.text.split(":")[0], []).append(box)
    return found


def test_every_event_has_its_box_where_and_when_it_was() -> None:
    events = dry_run(PLAN, Costs(message_s=0.5, reduce_s=1.0)).events
    drawn = boxes(draw(events, "chimera"))
    assert sum(map(len, drawn.values())) == len(events)
    rows = [
        text.text for text in ElementTree.fromstring(draw(events, "")).iter(f"{SVG}text") if "rank" in str(text.text)
    ]
    assert rows == [f"rank {rank}" for rank in range(4)]
    first, other = drawn["F0.s0.d0"][0], drawn["F2.s0.d1"][0]
    assert first.get("x") == other.get("x")
    assert float(other.get("y", 0)) - float(first.get("y", 0)) == 3 * 40  # the other direction begins on rank 3
    assert first.get("fill") != other.get("fill")
    backward = drawn["B0.s0.d0"][0]
    assert float(backward.get("width", 0)) == pytest.approx(2 * float(first.get("width", 0)), abs=0.02)


def test_a_box_of_no_time_is_seen() -> None:
    drawn = boxes(draw([TraceEvent(0, "F0.s0.d0", 5.0, 5.0, "F"), TraceEvent(1, "done", 5.0, 5.0, "note")], "x"))
    assert [float(box[0].get("width", 0)) for box in drawn.values()] == [0.5, 0.5]


def test_names_of_measured_traces_are_free_text() -> None:
    picture = draw([TraceEvent(0, "a < b & c", 0.0, 1.0, "F"), TraceEvent(0, "halo", 0.0, 0.25, "exchange")], "<title>")
    assert boxes(picture).keys() == {"a < b & c", "halo"}
    texts = [text.text for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    assert "<title>" in texts
    assert {"rank 0", "forward, direction 0", "other", "0", "1 s"} <= set(texts)


def test_nothing_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match="at least one event"):
        draw([], "x")


def test_a_span_just_below_a_power_of_ten_has_ticks() -> None:
    span_s = 5 * math.nextafter(0.001, 0.0)
    assert math.log10(span_s / 5) == -3.0 and span_s / 5 < 0.001
    picture = ElementTree.fromstring(draw([TraceEvent(0, "F0.s0.d0", 0.0, span_s, "F")], "title"))
    texts = {text.text for text in picture.iter(f"{SVG}text")}
    assert {"0", "0.001", "0.002", "0.003", "0.004", "0.005 s"} <= texts


def test_ticks_are_where_their_times_are() -> None:
    picture = ElementTree.fromstring(
        draw([TraceEvent(rank=0, kind="F", name="F0", start_s=2.0, end_s=12.0)], "title", width_px=1000)
    )
    texts = {text.text: float(text.get("x", 0)) for text in picture.iter(f"{SVG}text")}
    (box,) = boxes(ElementTree.tostring(picture, "unicode"))["F0"]
    left, width = float(box.get("x", 0)), float(box.get("width", 0))
    assert [texts[time] for time in ("0", "4", "10 s")] == pytest.approx([left, left + 0.4 * width, left + width])
