"""Calls on parts of the input against brute force: every tap reads the own part, a strip, or nothing."""

from __future__ import annotations

from dataclasses import astuple
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from hyfi_core.plan import Box
from hyfi_core.plan.transfer import Strip, Transfer
from hyfi_core.plan.window import AxisWindow, Window
from hyfi_core.plan.window_calls import OwnCall, faster_apart, inner_outputs, own_call, strip_call


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
    spans = {output: (taps(window, output)[0], taps(window, output)[-1]) for output in range(*outputs)}
    near = [output for output, (first, last) in spans.items() if last >= piece[0] and first < piece[1]]
    assert (call.outputs.y0, call.outputs.y1) == (near[0], near[-1] + 1), "no output more"


@settings(max_examples=300, deadline=None)
@given(cases())
def test_a_call_on_the_own_part_gives_just_its_outputs(
    case: tuple[AxisWindow, tuple[int, int], tuple[int, int]],
) -> None:
    """Of all starts and paddings, it is the only one that reads the first output's taps and gives as many outputs."""
    window, have, outputs = case
    call = own_call(Window(window, AxisWindow(1)), Box(*have, 0, 1), Box(*outputs, 0, 1))
    first, fitting = taps(window, outputs[0])[0], []
    for start, padding in product(range(have[1] - have[0] + 1), range(25)):
        read = have[1] - have[0] - start + 2 * padding - window.extent
        if start * padding == 0 and have[0] + start - padding == first and read >= 0:
            fitting += [(start, padding)] if read // window.stride + 1 == outputs[1] - outputs[0] else []
    assert fitting == ([] if call is None else [(call.start[0], call.padding[0])])
    if call is None:
        return
    start, padding = call.start[0], call.padding[0]
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
    spans = {output: window.input_interval(output, output + 1) for output in range(*outputs)}
    alone = [o for o, (start, stop) in spans.items() if max(0, start) >= have[0] and min(length, stop) <= have[1]]
    assert list(range(inner.y0, inner.y1)) == alone, "all of these, and no other"


@settings(max_examples=60, deadline=None)
@given(cases(), cases())
def test_both_axes_are_divided_alike(
    y: tuple[AxisWindow, tuple[int, int], tuple[int, int]], x: tuple[AxisWindow, tuple[int, int], tuple[int, int]]
) -> None:
    """Along each axis, a call is that of a map with one position along the other; it lacks if it lacks along one."""
    (along_y, piece_y, of_y), (along_x, piece_x, of_x) = y, x
    both, one = Window(along_y, along_x), AxisWindow(1)
    box, outputs = Box(*piece_y, *piece_x), Box(*of_y, *of_x)
    tall = Window(along_y, one), Box(*piece_y, 0, 1), Box(*of_y, 0, 1)
    wide = Window(one, along_x), Box(0, 1, *piece_x), Box(0, 1, *of_x)
    strip, strip_y, strip_x = strip_call(both, box, outputs), strip_call(*tall), strip_call(*wide)
    if strip_y is None or strip_x is None:
        assert strip is None
    else:
        pairs = zip(astuple(strip_y), astuple(strip_x), strict=True)
        assert strip is not None and astuple(strip) == tuple((*a[:2], *b[2:]) for a, b in pairs)
    own, own_y, own_x = own_call(both, box, outputs), own_call(*tall), own_call(*wide)
    if own_y is None or own_x is None:
        assert own is None
    else:
        assert own == OwnCall((own_y.start[0], own_x.start[1]), (own_y.padding[0], own_x.padding[1]))
    inner = inner_outputs(both, box, Box(0, 20, 0, 30), outputs)
    inner_y = inner_outputs(*tall[:2], Box(0, 20, 0, 1), tall[2])
    inner_x = inner_outputs(*wide[:2], Box(0, 1, 0, 30), wide[2])
    assert inner == Box(inner_y.y0, inner_y.y1, inner_x.x0, inner_x.x1)


def test_separate_calls_are_for_few_received_pixels() -> None:
    """Own pixels are at least four times as many as received ones, or as one pixel."""

    def apart(own: int, *received: int) -> bool:
        have = Box(0, 1, 0, own)
        strips = tuple(Strip(peer, Box(0, 1, 0, pixels)) for peer, pixels in enumerate(received))
        return faster_apart(Transfer(have, have, have, (), strips, have))

    assert [apart(own, 3, 2) for own in (19, 20, 21)] == [False, True, True]
    assert [apart(own) for own in (3, 4)] == [False, True]


def test_a_part_with_room_for_one_window_is_called_as_it_is() -> None:
    window = Window(AxisWindow(3), AxisWindow(3))
    call = own_call(window, Box(0, 3, 0, 3), Box(0, 1, 0, 1))
    assert call is not None and (call.start, call.padding) == ((0, 0), (0, 0))
