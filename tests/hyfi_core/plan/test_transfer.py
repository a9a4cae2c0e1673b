"""Transfers against a brute-force count of pixels."""

from hypothesis import given
from hypothesis import strategies as st

from hyfi_core.plan import Box, Layout, plan_transfer


def pixels(box: Box) -> set[tuple[int, int]]:
    return {(y, x) for y in range(box.y0, box.y1) for x in range(box.x0, box.x1)}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, list[Box]]:
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    grid = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    layout = Layout.even(height, width, grid)
    edge = st.integers(-3, 12)
    need = [Box(draw(edge), draw(edge), draw(edge), draw(edge)) for _ in layout.parts]
    return layout, need


@given(cases())
def test_every_needed_pixel_of_the_map_arrives_exactly_once(case: tuple[Layout, list[Box]]) -> None:
    layout, need = case
    for rank, wanted in enumerate(need):
        transfer = plan_transfer(layout.parts, need, layout.map, rank)
        arrived = [*pixels(transfer.kept)]
        for strip in transfer.receives:
            arrived += pixels(strip.box)
        assert len(arrived) == len(set(arrived))
        assert set(arrived) == pixels(wanted) & pixels(layout.map)


@given(cases())
def test_what_one_sends_the_other_receives(case: tuple[Layout, list[Box]]) -> None:
    layout, need = case
    plans = [plan_transfer(layout.parts, need, layout.map, rank) for rank in range(len(need))]
    sent = {(rank, strip.peer, strip.box) for rank, plan in enumerate(plans) for strip in plan.sends}
    received = {(strip.peer, rank, strip.box) for rank, plan in enumerate(plans) for strip in plan.receives}
    assert sent == received
    assert all(sender != receiver and not box.empty for sender, receiver, box in sent)


@given(cases())
def test_a_rank_is_idle_if_what_it_needs_is_what_it_has_and_others_need_none_of_it(
    case: tuple[Layout, list[Box]],
) -> None:
    layout, need = case
    for rank, wanted in enumerate(need):
        have, others = layout.parts[rank], need[:rank] + need[rank + 1 :]
        same = wanted == have or (have.empty and wanted.shape == have.shape)
        apart = not any(pixels(have) & pixels(other) for other in others)
        assert plan_transfer(layout.parts, need, layout.map, rank).idle == (same and apart)


def test_a_part_that_is_moved_by_its_padding_is_not_idle() -> None:
    layout = Layout.even(4, 4, (1, 1))
    for need in (Box(1, 5, 0, 4), Box(0, 4, -1, 3), Box(0, 0, 0, 2)):
        assert not plan_transfer(layout.parts, [need], layout.map, 0).idle
    nothing = Layout((0, 4, 4), (0, 4))
    for need, idle in ((Box(4, 4, 0, 4), True), (Box(9, 9, 0, 4), True), (Box(5, 7, 0, 4), False)):
        assert plan_transfer(nothing.parts, [Box(0, 4, 0, 4), need], nothing.map, 1).idle == idle


def test_a_part_smaller_than_the_halo_is_filled_from_two_neighbours() -> None:
    layout = Layout.even(6, 1, (6, 1))
    need = [Box(part.y0 - 2, part.y1 + 2, 0, 1) for part in layout.parts]
    assert [strip.peer for strip in plan_transfer(layout.parts, need, layout.map, 2).receives] == [0, 1, 3, 4]
