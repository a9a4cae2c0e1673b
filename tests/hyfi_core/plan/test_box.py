from hypothesis import given
from hypothesis import strategies as st

from hyfi_core.plan import Box
from hyfi_core.plan.box import hull

sides = st.integers(-4, 6)
boxes = st.builds(Box, sides, sides, sides, sides)


def pixels(box: Box) -> set[tuple[int, int]]:
    return {(y, x) for y in range(box.y0, box.y1) for x in range(box.x0, box.x1)}


@given(boxes, boxes)
def test_boxes_behave_as_sets_of_pixels(a: Box, b: Box) -> None:
    assert pixels(a.intersect(b)) == pixels(a) & pixels(b)
    assert a.area == len(pixels(a)) and a.empty == (not pixels(a))
    assert a.contains(b) == (pixels(b) <= pixels(a))
    both = pixels(a) | pixels(b)
    rows, columns = [y for y, _ in both], [x for _, x in both]
    if both:
        smallest = Box(min(rows), max(rows) + 1, min(columns), max(columns) + 1)
        assert a.hull(b) == hull([a, Box(0, 0, 9, 9), b]) == smallest
    assert (a.height, a.width) == a.shape == (len(range(a.y0, a.y1)), len(range(a.x0, a.x1)))
    assert pixels(a.shift(2, -1)) == {(y + 2, x - 1) for y, x in pixels(a)}


def test_a_box_is_counted_from_another() -> None:
    assert Box(5, 8, 2, 4).relative_to(Box(4, 9, 2, 9)) == Box(1, 4, 0, 2)
    assert hull([]) == Box(0, 0, 0, 0)
    assert Box.of_size(3, 5) == Box(0, 3, 0, 5) and Box(1, 2, 3, 5).slices() == (slice(1, 2), slice(3, 5))
