"""Boxes of all ranks, as intervals of rows and columns of ranks, against the boxes one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyfi_core.plan import AxisWindow, Box, Layout, Window, plan_transfer
from hyfi_core.plan.boxes import Boxes

WHOLE = Box.of_size(7, 9)
intervals = st.tuples(st.integers(-3, 12), st.integers(-3, 12))


@st.composite
def several(draw: st.DrawFn, count: int = 2) -> list[Boxes]:
    """Boxes of ranks of one grid, in each of them y and x of the map exchanged or not."""
    sides = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    found = []
    for _ in range(count):
        turned = draw(st.booleans())
        rows, columns = sides[::-1] if turned else sides
        found.append(
            Boxes(
                tuple(draw(intervals) for _ in range(rows)),
                tuple(draw(intervals) for _ in range(columns)),
                turned,
            )
        )
    return found


def same(one: Box, other: Box) -> bool:
    return one == other or (one.empty and other.empty)


@given(several(1))
def test_they_are_a_sequence_in_order_of_ranks(given_boxes: list[Boxes]) -> None:
    (boxes,) = given_boxes
    assert [boxes[rank] for rank in range(len(boxes))] == list(boxes) == list(boxes[:])
    assert boxes.grid[0] * boxes.grid[1] == len(boxes)
    assert boxes.area == sum(box.area for box in boxes)
    assert boxes.largest == max(box.area for box in boxes)
    assert list(boxes.shift(2, -1)) == [box.shift(2, -1) for box in boxes]
    assert list(boxes.transposed()) == [Box(b.x0, b.x1, b.y0, b.y1) for b in boxes]
    assert all(map(same, boxes.within(WHOLE), [box.intersect(WHOLE) for box in boxes]))
    there_and_back = boxes.transposed().transposed()
    assert there_and_back == (boxes if len(boxes) > 1 else Boxes(boxes.rows, boxes.columns))
    assert hash(Boxes(boxes.rows, boxes.columns, boxes.turned)) == hash(boxes)
    for wrong in (len(boxes), -1):
        with pytest.raises(IndexError):
            boxes[wrong]
    for box in (Box(2, 6, -1, 5), Box(3, 3, 0, 9)):
        met = [(rank, own.intersect(box)) for rank, own in enumerate(boxes) if not own.intersect(box).empty]
        assert list(boxes.meeting(box)) == met


def test_grids_that_differ_are_not_alike() -> None:
    row, column = Boxes(((0, 1),), ((0, 1), (1, 2))), Boxes(((0, 1), (1, 2)), ((0, 1),))
    assert row.same_grid_as(row) and not row.same_grid_as(column) and not row.same_grid_as(row.transposed())
    assert not row.same_grid_as(Boxes(column.rows, column.columns, turned=True)), "the same grid, the other way round"
    assert Boxes.same(Box(1, 2, 3, 4), (2, 3)) == Boxes(((1, 2),) * 2, ((3, 4),) * 3)


@given(several())
def test_they_cover_what_is_needed_if_each_one_does(given_boxes: list[Boxes]) -> None:
    held, need = given_boxes
    pairs = zip(held, need, strict=True)
    assert held.cover(need, WHOLE) == all(has.contains(wanted.intersect(WHOLE)) for has, wanted in pairs)
    if held.turned == need.turned:
        both = held.hull(need)
        for box, has, wanted in zip(both, held, need, strict=True):
            assert box.contains(has) and box.contains(wanted)
        if not any(box.empty for box in (*held, *need)):
            assert list(both) == [has.hull(wanted) for has, wanted in zip(held, need, strict=True)]


@given(st.integers(1, 9), st.integers(1, 12), several(1))
def test_a_transfer_is_that_of_single_boxes(height: int, width: int, given_boxes: list[Boxes]) -> None:
    (need,) = given_boxes
    layout = Layout.even(height, width, need.grid)
    for rank in range(len(need)):
        quick = plan_transfer(layout.parts, need, layout.map, rank)
        assert quick == plan_transfer(tuple(layout.parts), tuple(need), layout.map, rank)


axes = st.builds(AxisWindow, st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2))


@given(several(1), axes, axes)
def test_a_window_reads_the_boxes_that_it_reads_one_by_one(
    given_boxes: list[Boxes], y: AxisWindow, x: AxisWindow
) -> None:
    (outputs,) = given_boxes
    window = Window(y, x)
    assert all(map(same, window.input_boxes(outputs), map(window.input_box, outputs)))
