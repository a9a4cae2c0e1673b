"""Windows against a brute-force mask."""

from itertools import pairwise

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


@given(windows, st.integers(1, 8))
def test_a_window_misses_the_map_if_no_tap_is_in_it(window: AxisWindow, inputs: int) -> None:
    of_map, outputs = set(range(inputs)), max(0, outputs_of(window, inputs))
    assert window.misses(inputs, outputs) == any(not touched(window, o, o + 1) & of_map for o in range(outputs))


def test_no_output_needs_no_input() -> None:
    window = AxisWindow(3, padding=1)
    first, last = window.input_interval(5, 5)
    assert first == last
    assert Window(window, window).input_box(Box(4, 4, 0, 8)) == Box(0, 0, 0, 0)


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

    balanced = data.draw(st.integers(0, outputs))
    chosen = window.cut(cut, inputs, outputs, balanced)
    assert 0 <= chosen <= outputs
    if 0 < cut < inputs:
        fewest = min(crossing(out) for out in range(outputs + 1))
        assert crossing(chosen) == fewest
        target = cut if window.stride == 1 and outputs == inputs else balanced
        nearest = min((out for out in range(outputs + 1) if crossing(out) == fewest), key=lambda out: abs(out - target))
        assert abs(chosen - target) == abs(nearest - target)
    else:
        assert chosen == (0 if cut == 0 else outputs)


def test_three_by_three_stride_two_moves_one_row_not_two() -> None:
    window = AxisWindow(3, 2, 1)
    layout = Layout.even(64, 64, (2, 1)).through(Window(window, window), 32, 32)
    needs = [window.input_interval(part.y0, part.y1) for part in layout.parts]
    have = Layout.even(64, 64, (2, 1)).rows
    crossing = max(0, min(needs[0][1], 64) - have[1]) + max(0, have[1] - needs[1][0])
    assert crossing == 1


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 6), st.integers(1, 6))
def test_an_even_layout_has_parts_of_two_sizes_at_most(height: int, width: int, rows: int, columns: int) -> None:
    layout = Layout.even(height, width, (rows, columns))
    assert (layout.height, layout.width, layout.map) == (height, width, Box(0, height, 0, width))
    assert layout.parts.grid == (rows, columns) and sum(part.area for part in layout.parts) == height * width
    for cuts, length, count in ((layout.rows, height, rows), (layout.columns, width, columns)):
        sizes = [stop - start for start, stop in pairwise(cuts)]
        assert sum(sizes) == length and set(sizes) <= {length // count, -(-length // count)}
    twin = Layout(layout.rows, layout.columns)
    assert hash(twin) == hash(layout) and twin == layout


@given(windows, windows, st.integers(1, 40), st.integers(1, 40), st.integers(1, 4), st.integers(1, 4))
def test_each_axis_of_a_layout_goes_through_its_own_window(
    y: AxisWindow, x: AxisWindow, height: int, width: int, rows: int, columns: int
) -> None:
    """Cuts are those of ``AxisWindow.cut`` with even ones as targets, but none before the last."""
    out_y, out_x = outputs_of(y, height), outputs_of(x, width)
    if out_y < 1 or out_x < 1:
        return
    layout = Layout.even(height, width, (rows, columns))
    made, even = layout.through(Window(y, x), out_y, out_x), Layout.even(out_y, out_x, (rows, columns))
    axes = ((y, layout.rows, made.rows, even.rows), (x, layout.columns, made.columns, even.columns))
    for window, cuts, found, balanced in axes:
        wanted = [0]
        for cut, target in zip(cuts[1:-1], balanced[1:-1], strict=True):
            wanted.append(max(wanted[-1], window.cut(cut, cuts[-1], balanced[-1], target)))
        assert found == (*wanted, balanced[-1])


@given(windows, st.integers(1, 60), st.integers(1, 5))
def test_parts_of_the_output_cover_it_once(window: AxisWindow, inputs: int, ranks: int) -> None:
    outputs = outputs_of(window, inputs)
    if outputs < 1:
        return
    layout = Layout.even(inputs, inputs, (ranks, 1)).through(Window(window, window), outputs, outputs)
    assert layout.rows[0] == 0 and layout.rows[-1] == outputs
    assert list(layout.rows) == sorted(layout.rows)
    assert sum(part.area for part in layout.parts) == outputs * outputs
