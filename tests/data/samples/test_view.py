from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.samples.pack import Shelves, components, place_all, place_most
from data.samples.view import Piece, View, _merged, _sides, make_view
from data.store.tissue_grid import LARGEST_DENOMINATOR, TissueGrid
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box

ALIGN = 4


def upsample(mask, mask_mpp, size_px, mpp):
    """The tissue of every image pixel, by its centre: the definition, in rational numbers."""
    index = []
    for axis in (0, 1):
        ratio = (Fraction(mpp[axis]) / Fraction(mask_mpp[axis])).limit_denominator(LARGEST_DENOMINATOR)
        rows = [int((Fraction(2 * y + 1, 2) * ratio).__floor__()) for y in range(size_px[axis])]
        index.append(np.minimum(rows, mask.shape[axis] - 1))
    return mask[np.ix_(*index)]


def blobs(seed: int, shape: tuple[int, int], count: int, radius: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[: shape[0], : shape[1]]
    mask = np.zeros(shape, bool)
    for _ in range(count):
        cy, cx, r = rng.uniform(0, shape[0]), rng.uniform(0, shape[1]), rng.uniform(0.5, radius)
        mask |= (y - cy) ** 2 + (x - cx) ** 2 <= r * r
    return mask


@st.composite
def cases(draw):
    size = (draw(st.integers(3, 90)), draw(st.integers(3, 90)))
    mask_mpp = draw(st.sampled_from([1.0, 2.0, 3.0, 4.0, 7.5, 8.016]))
    shape = tuple(max(1, round(side / mask_mpp + draw(st.integers(-1, 1)))) for side in size)
    mask = blobs(draw(st.integers(0, 10**6)), shape, draw(st.integers(0, 12)), draw(st.floats(0.6, 9)))
    target = (draw(st.integers(ALIGN, 80)), draw(st.integers(ALIGN, 80)))
    return mask, (mask_mpp, mask_mpp), size, target, draw(st.sampled_from(["pack", "crop"]))


def paint(view: View, size_px, box_of) -> np.ndarray:
    count = np.zeros(size_px, int)
    for piece in view.pieces:
        box = box_of(piece)
        assert Box.of_size(*size_px).contains(box)
        count[box.slices()] += 1
    return count


@settings(max_examples=300, deadline=None)
@given(cases())
def test_views_hold_what_they_say(case):
    mask, mask_mpp, size, target, kind = case
    view = make_view(TissueGrid.under(mask, mask_mpp, size, (1.0, 1.0)), target, kind, ALIGN)
    tissue = upsample(mask, mask_mpp, size, (1.0, 1.0))
    in_slide = paint(view, size, lambda piece: piece.source)
    in_image = paint(view, target, lambda piece: piece.target)
    assert in_slide.max() <= 1 and in_image.max() <= 1
    assert view.tissue_px == tissue.sum()
    kept = (tissue & (in_slide == 1)).sum()
    assert view.coverage == (kept / tissue.sum() if tissue.any() else 0.0)
    assert view.flags == (("no_tissue",) if not tissue.any() else () if kept == tissue.sum() else ("cropped",))
    for piece in view.pieces:
        assert piece.source.shape == piece.target.shape
        starts = (piece.source.y0, piece.source.x0, piece.target.y0, piece.target.x0)
        assert not any(start % ALIGN for start in starts)
        assert piece.source.y1 % ALIGN == 0 or piece.source.y1 == size[0] or piece.target.y1 == target[0]
        assert piece.source.x1 % ALIGN == 0 or piece.source.x1 == size[1] or piece.target.x1 == target[1]
    assert view == make_view(TissueGrid.under(mask, mask_mpp, size, (1.0, 1.0)), target, kind, ALIGN)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_crop_is_the_window_with_most_tissue(case):
    mask, mask_mpp, size, target, _ = case
    tissue = upsample(mask, mask_mpp, size, (1.0, 1.0))
    view = make_view(TissueGrid.under(mask, mask_mpp, size, (1.0, 1.0)), target, "crop", ALIGN)
    best = max(
        tissue[y : y + target[0], x : x + target[1]].sum()
        for y in range(0, size[0], ALIGN)
        for x in range(0, size[1], ALIGN)
    )
    assert round(view.coverage * view.tissue_px) == best


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.data())
def test_of_windows_with_as_much_tissue_the_middle_one_is_shown(height, width, rows, columns, data):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width)))
    mask = mask.reshape(height, width)
    if not mask.any():
        return
    grid = TissueGrid.under(mask, (4.0, 4.0), (4 * height, 4 * width), (1.0, 1.0))
    (piece,) = make_view(grid, (4 * rows, 4 * columns), "crop", ALIGN).pieces
    corners = [(y, x) for y in range(max(0, height - rows) + 1) for x in range(max(0, width - columns) + 1)]
    tissue = {(y, x): mask[y : y + rows, x : x + columns].sum() for y, x in corners}
    best = np.array([corner for corner in corners if tissue[corner] == max(tissue.values())])
    middle = (best.min(axis=0) + best.max(axis=0)) / 2
    off = {tuple(corner): np.abs(corner - middle).sum() for corner in best.tolist()}
    assert off[piece.source.y0 // 4, piece.source.x0 // 4] == min(off.values())


@pytest.mark.parametrize(
    ("size_px", "align_px", "sides"),
    [
        ((2048, 4096), 64, [32, 16, 8, 4]),
        ((4000, 2000), 64, [31, 15, 7, 4]),
        ((128, 128), 64, [2]),
        ((4096, 4096), 512, [8, 4, 2, 1]),
    ],
)
def test_squares_are_halved_until_they_are_as_small_as_a_gland(size_px, align_px, sides):
    assert _sides(size_px, align_px) == sides


def test_a_grid_of_single_pixels_is_a_grid():
    grid = TissueGrid.under(np.eye(5, dtype=bool), (1.0, 1.0), (5, 5), (1.0, 1.0))
    assert make_view(grid, (7, 7), "pack", 1).pieces == (Piece(Box(0, 5, 0, 5), Box(1, 6, 1, 6)),)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.integers(1, 24)] * 3), max_size=14), st.integers(8, 48), st.integers(8, 48))
def test_boxes_with_most_tissue_are_placed_as_long_as_they_fit_together(sizes, height, width):
    boxes = [Box(64 * k, 64 * k + h, 0, w) for k, (h, w, _) in enumerate(sizes)]
    tissue = [t for _, _, t in sizes]
    ranked = sorted(boxes, key=lambda box: (-tissue[boxes.index(box)], box))
    fit = [place_all(ranked[:n], (height, width), ALIGN) is not None for n in range(len(boxes) + 1)]
    placed = {box for box, _ in place_most(boxes, tissue, (height, width), ALIGN)}
    assert any(fit[n] and not any(fit[n + 1 : n + 2]) and set(ranked[:n]) <= placed for n in range(len(fit)))
    if fit == sorted(fit, reverse=True):
        assert set(ranked[: sum(fit) - 1]) <= placed


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 97), st.integers(0, 10**6))
def test_tissue_is_counted_exactly(case, thousandths, seed):
    mask, mask_mpp, size, _, _ = case
    mpp = (1.0 + thousandths / 1000, 1.0 - thousandths / 2000)
    grid = TissueGrid.under(mask, mask_mpp, size, mpp)
    tissue = upsample(mask, mask_mpp, size, mpp)
    rng = np.random.default_rng(seed)
    ends = [np.sort(rng.integers(0, side + 1, rng.integers(2, 8))) for side in size]
    counts = grid.counts(*ends)
    for i in range(len(ends[0]) - 1):
        for j in range(len(ends[1]) - 1):
            assert counts[i, j] == tissue[ends[0][i] : ends[0][i + 1], ends[1][j] : ends[1][j + 1]].sum()
    assert grid.total_px() == tissue.sum()


def test_mask_finer_than_the_image_is_read_at_pixel_centres():
    mask = np.arange(36).reshape(6, 6) % 5 == 0
    grid = TissueGrid.under(mask, (1.0, 1.0), (2, 2), (3.0, 3.0))
    ends = np.array([0, 1, 2])
    assert np.array_equal(grid.counts(ends, ends), mask[1::3, 1::3].astype(int))


@settings(max_examples=150, deadline=None)
@given(cases(), st.tuples(*[st.integers(-10, 90)] * 4))
def test_boxes_map_to_the_slide(case, ends):
    mask, mask_mpp, size, target, kind = case
    view = make_view(TissueGrid.under(mask, mask_mpp, size, (1.0, 1.0)), target, kind, ALIGN)
    box = Box(ends[0], ends[0] + abs(ends[1]), ends[2], ends[2] + abs(ends[3]))
    names = np.arange(1, size[0] * size[1] + 1).reshape(size)
    image = np.zeros(target, int)
    for piece in view.pieces:
        image[piece.target.slices()] = names[piece.source.slices()]
    shown = np.zeros_like(image)
    for piece in view.to_slide(box):
        assert box.contains(piece.target)
        shown[piece.target.slices()] = names[piece.source.slices()]
    inside = Box.of_size(*target).intersect(box)
    wanted = np.zeros_like(image)
    if not inside.empty:
        wanted[inside.slices()] = image[inside.slices()]
    assert np.array_equal(shown, wanted)


def test_tissue_that_fits_stays_as_it_lies():
    mask = np.zeros((20, 30), bool)
    mask[2, 3] = mask[8, 15] = True
    view = make_view(TissueGrid.under(mask, (8.0, 8.0), (160, 240), (1.0, 1.0)), (256, 256), "pack", 16)
    assert view.pieces == (Piece(Box(16, 80, 16, 128), Box(96, 160, 64, 176)),)
    assert view.coverage == 1.0 and view.flags == ()


def test_pieces_far_apart_are_moved_together():
    mask = np.zeros((400, 400), bool)
    for y, x in ((10, 10), (10, 350), (350, 10), (350, 350)):
        mask[y : y + 30, x : x + 30] = True
    view = make_view(TissueGrid.under(mask, (8.0, 8.0), (3200, 3200), (1.0, 1.0)), (640, 640), "pack", 64)
    assert len(view.pieces) == 4
    assert view.coverage == 1.0


def test_a_long_piece_is_cut_until_it_fits():
    mask = np.zeros((40, 1000), bool)
    mask[4:36, 10:990] = True
    view = make_view(TissueGrid.under(mask, (8.0, 8.0), (320, 8000), (1.0, 1.0)), (2048, 2048), "pack", 64)
    assert view.coverage == 1.0 and len(view.pieces) > 1
    assert min(piece.source.height for piece in view.pieces) >= 256


def test_too_much_tissue_keeps_what_fits_and_says_so():
    mask = np.ones((256, 256), bool)
    view = make_view(TissueGrid.under(mask, (8.0, 8.0), (2048, 2048), (1.0, 1.0)), (1024, 1024), "pack", 64)
    assert view.flags == ("cropped",)
    assert view.coverage == 0.25


def test_the_pieces_with_most_tissue_are_kept():
    mask = np.zeros((64, 192), bool)
    mask[:32, :32] = True
    mask[:32, 64:96] = np.eye(32, dtype=bool)
    mask[:32, 128:160] = True
    view = make_view(TissueGrid.under(mask, (8.0, 8.0), (512, 1536), (1.0, 1.0)), (256, 512), "pack", 64)
    assert [piece.source.x0 for piece in view.pieces] == [0, 1024]
    assert view.coverage == 2048 / 2080


def test_no_tissue():
    view = make_view(TissueGrid.under(np.zeros((5, 5), bool), (8.0, 8.0), (40, 40), (1.0, 1.0)), (64, 64), "crop")
    assert (view.pieces, view.coverage, view.flags) == ((), 0.0, ("no_tissue",))
    assert view.to_slide(view.box) == ()


@pytest.mark.parametrize(("kind", "size", "words"), [("zoom", (64, 64), "pack, crop"), ("pack", (64, 63), "64 × 63")])
def test_wrong_requests_say_what_would_work(kind, size, words):
    with pytest.raises(RequestError, match=words):
        make_view(TissueGrid.under(np.ones((5, 5), bool), (8.0, 8.0), (40, 40), (1.0, 1.0)), size, kind)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 40), st.floats(0.02, 0.6))
def test_components_are_disjoint_and_hold_everything(seed, height, width, density):
    occupied = np.random.default_rng(seed).random((height, width)) < density
    painted = np.zeros((height, width), int)
    for box in components(occupied):
        painted[box.slices()] += 1
    assert painted.max(initial=0) <= 1
    assert not (occupied & (painted == 0)).any()


def test_shelves_fill_a_row_before_they_begin_another():
    shelves = Shelves(100, 130, 32)
    places = [shelves.place(*size) for size in ((64, 64), (64, 64), (40, 32), (36, 2), (37, 1), (36, 98), (36, 66))]
    assert places == [(0, 0), (0, 64), None, (0, 128), None, (64, 0), None]


def test_neighbours_in_one_row_of_image_and_slide_are_one_piece():
    left, right = Piece(Box(8, 12, 4, 8), Box(0, 4, 0, 4)), Piece(Box(8, 12, 8, 16), Box(0, 4, 4, 12))
    below = Piece(Box(12, 16, 16, 20), Box(4, 8, 12, 16))
    far = Piece(Box(8, 12, 40, 44), Box(0, 4, 12, 16))
    assert _merged([left, right]) == (Piece(Box(8, 12, 4, 16), Box(0, 4, 0, 12)),)
    assert _merged([left, right, far]) == (*_merged([left, right]), far), "not neighbours in the slide"
    assert _merged([right, below]) == (right, below), "of another row"
    assert _merged([left, far]) == (left, far)


@pytest.mark.parametrize(
    ("source", "target"),
    [(Box(0, 4, 0, 4), Box(0, 4, 0, 5)), (Box(0, 4, 0, 4), Box(0, 5, 0, 4)), (Box(2, 2, 0, 4), Box(0, 0, 0, 4))],
)
def test_a_piece_that_would_be_resized_or_is_empty_is_none(source, target):
    with pytest.raises(ValueError, match="the same size in slide and image, and must not be empty"):
        Piece(source, target)
