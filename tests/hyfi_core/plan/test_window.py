"""Windows against a brute-force mask."""

from hypothesis import given
from hypothesis import strategies as st

from hyfi_core.plan import AxisWindow, Box, Layout, Window

windows = st.builds(AxisWindow, st.integers(1, 7), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3)).filter(
    lambda w: w.padding <= w.extent // 2
)


def outputs_of(window: AxisWindow, inputs: int) -> int:
    return (inputs + 2 * window.padding - window.extent) // window.stride + 1


def touched(window: AxisWindow, start: int, stop: int) -> set[int]:
    taps = range(window.kernel)
    return {o * window.stride - window.padding + t * window.dilation for o in range(start, stop) for t in taps}


@given(windows, st.integers(0, 20), st.integers(1, 10))
def test_the_input_interval_is_the_hull_of_all_taps(window: AxisWindow, start: int, length: int) -> None:
    positions = touched(window, start, start + length)
    assert window.input_interval(start, start + length) == (min(positions), max(positions) + 1)


def test_no_output_needs_no_input() -> None:
    window = AxisWindow(3, padding=1)
    first, last = window.input_interval(5, 5)
    assert first == last
    assert Window(window, window).input_box(Box(4, 4, 0, 8)).empty


@given(windows, st.integers(1, 40), st.data())
def test_no_other_cut_moves_fewer_positions(window: AxisWindow, inputs: int, data: st.DataObject) -> None:
    outputs = outputs_of(window, inputs)
    if outputs < 1:
        return
    cut = data.draw(st.integers(0, inputs))

    def crossing(out: int) -> int:
        inside = range(inputs)
        before = window.input_interval(0, out)[1] if out else 0
        after = window.input_interval(out, outputs)[0] if out < outputs else inputs
        return sum(p >= cut for p in inside if p < before) + sum(p < cut for p in inside if p >= after)

    chosen = window.cut(cut, inputs, outputs, outputs // 2)
    assert 0 <= chosen <= outputs
    if 0 < cut < inputs:
        assert crossing(chosen) == min(crossing(out) for out in range(outputs + 1))


def test_three_by_three_stride_two_moves_one_row_not_two() -> None:
    window = AxisWindow(3, 2, 1)
    layout = Layout.even(64, 64, (2, 1)).through(Window(window, window), 32, 32)
    needs = [window.input_interval(part.y0, part.y1) for part in layout.parts]
    have = Layout.even(64, 64, (2, 1)).rows
    crossing = max(0, min(needs[0][1], 64) - have[1]) + max(0, have[1] - needs[1][0])
    assert crossing == 1


@given(windows, st.integers(1, 60), st.integers(1, 5))
def test_parts_of_the_output_cover_it_once(window: AxisWindow, inputs: int, ranks: int) -> None:
    outputs = outputs_of(window, inputs)
    if outputs < 1:
        return
    layout = Layout.even(inputs, inputs, (ranks, 1)).through(Window(window, window), outputs, outputs)
    assert layout.rows[0] == 0 and layout.rows[-1] == outputs
    assert list(layout.rows) == sorted(layout.rows)
    assert sum(part.area for part in layout.parts) == outputs * outputs
