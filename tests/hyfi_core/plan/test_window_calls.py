"""Calls on parts of the input against brute force: every tap reads the own part, a strip, or nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hyfi_core.plan import Box
from hyfi_core.plan.window import AxisWindow, Window
from hyfi_core.plan.window_calls import inner_outputs, own_call, strip_call


@st.composite
def cases(draw: st.DrawFn) -> tuple[AxisWindow, tuple[int, int], tuple[int, int]]:
    window = AxisWindow(
        *(draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 3)))
    )
    start, first = draw(st.integers(0, 8)), draw(st.integers(0, 6))
    return window, (start, start + draw(st.integers(1, 8))), (first, first + draw(st.integers(1, 6)))


def taps(window: AxisWindow, output: int) -> list[int]:
    return [output * window.stride - window.padding + tap * window.dilation for tap in range(window.kernel)]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_the_call_on_a_strip_covers_its_outputs(
    case: tuple[AxisWindow, tuple[int, int], tuple[int, int]],
) -> None:
    window, piece, outputs = case
    hits = {
        (output, tap)
        for output in range(*outputs)
        for tap, at in enumerate(taps(window, output))
        if piece[0] <= at < piece[1]
    }
    call = strip_call(Window(window, AxisWindow(1)), Box(*piece, 0, 1), Box(*outputs, 0, 1))
    if not hits:
        assert call is None
        return
    assert call is not None
    assert all(call.outputs.y0 <= output < call.outputs.y1 for output, _ in hits)
    assert (call.taps.y0, call.taps.y1) == (min(tap for _, tap in hits), max(tap for _, tap in hits) + 1)
    count = (call.inputs.height - (call.taps.height - 1) * window.dilation - 1) // window.stride + 1
    assert count == call.outputs.height
    assert call.inputs.y0 == taps(window, call.outputs.y0)[call.taps.y0]


@settings(max_examples=300, deadline=None)
@given(cases())
def test_a_call_on_the_own_part_gives_just_its_outputs(
    case: tuple[AxisWindow, tuple[int, int], tuple[int, int]],
) -> None:
    window, have, outputs = case
    call = own_call(Window(window, AxisWindow(1)), Box(*have, 0, 1), Box(*outputs, 0, 1))
    if call is None:
        return
    start, padding = call.start[0], call.padding[0]
    seen = have[1] - have[0] - start
    assert (seen + 2 * padding - window.extent) // window.stride + 1 == outputs[1] - outputs[0]
    for index, output in enumerate(range(*outputs)):
        native = [
            index * window.stride - padding + tap * window.dilation + have[0] + start for tap in range(window.kernel)
        ]
        own = [at for at in taps(window, output) if have[0] <= at < have[1]]
        assert [at for at in native if have[0] + start <= at < have[1]] == own


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(8, 24))
def test_inner_outputs_look_at_nobody_elses_pixels(
    case: tuple[AxisWindow, tuple[int, int], tuple[int, int]], length: int
) -> None:
    window, have, outputs = case
    have = have[0], min(have[1], length)
    inner = inner_outputs(Window(window, AxisWindow(1)), Box(*have, 0, 1), Box(0, length, 0, 1), Box(*outputs, 0, 1))
    for output in range(inner.y0, inner.y1):
        start, stop = window.input_interval(output, output + 1)
        assert max(0, start) >= have[0] and min(length, stop) <= have[1]


def test_a_part_with_room_for_one_window_is_called_as_it_is() -> None:
    window = Window(AxisWindow(3), AxisWindow(3))
    call = own_call(window, Box(0, 3, 0, 3), Box(0, 1, 0, 1))
    assert call is not None and (call.start, call.padding) == ((0, 0), (0, 0))
