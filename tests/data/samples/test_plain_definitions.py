"""Numbers, colours and places of samples, against definitions written out with loops."""

from __future__ import annotations

import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.samples.augment import Augment, Variation
from data.samples.classes import _is_number
from data.samples.colours import density_mix, reinhard
from data.samples.colours.density_mix import MAX_DENSITY, STEPS, density_table, mixed_densities, value_table
from data.samples.colours.reinhard import LabStatistics, ReinhardMap
from data.samples.keyed import keyed_bits, keyed_permutation, keyed_uniforms
from data.samples.matching import LabelMatch
from data.samples.pack import Shelves, cut, place_all, place_most, shrink
from data.samples.trained.trained_range import SlideFigures, StainRange, TrainedRange
from data.samples.view import make_view, make_views
from data.store.tissue_grid import TissueGrid
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box


def test_numbers_of_a_key_stay_the_same_from_version_to_version() -> None:
    assert keyed_bits(2, "a", 1).tolist() == keyed_bits(3, "a", 1).tolist()[:2] != keyed_bits(2, "a", "1").tolist()
    digest = hashlib.blake2b(b"('split', 7)", digest_size=16, person=b"hyfi").digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(50)
    assert keyed_bits(50, "split", np.int64(7)).tolist() == words.tolist()  # type: ignore[arg-type]
    assert keyed_uniforms(50, "split", 7).tolist() == [(int(word) >> 11) / 2**53 for word in words]
    assert keyed_permutation(50, "split", 7).tolist() == sorted(range(50), key=lambda at: int(words[at]))
    assert keyed_permutation(0, "split", 7).size == 0 and keyed_permutation(1, "x").tolist() == [0]


@pytest.mark.parametrize("square", [True, False])
def test_a_variation_is_made_of_six_numbers(square: bool) -> None:
    size, seen = (64, 64 if square else 32), set()
    for epoch in range(60):
        u = keyed_uniforms(6, "augment", 3, epoch, "s")
        found = Augment(stain=0.2, colour=0.1).draw(3, epoch, "s", size)
        assert found.turns == (int(4 * u[0 + 1]) if square else (0 if u[1] < 0.5 else 2)) and found.mirror == (
            u[0] < 0.5
        )
        factors = (*found.stains, found.density, found.contrast)
        assert factors == pytest.approx([1 + (2 * u[k] - 1) * (0.2 if k < 4 else 0.1) for k in range(2, 6)])
        seen.add(found.turns)
        plain = Augment(flips=False, own="a:b").draw(3, epoch, "s", size)
        assert (plain.mirror, plain.turns, plain.own) == (False, 0, "a:b")
        assert plain.own_draw == keyed_uniforms(1, "own", 3, epoch, "s")[0] and found.own_draw == 0
    assert seen == ({0, 1, 2, 3} if square else {0, 2})


@pytest.mark.parametrize(("mirror", "turns"), itertools.product([False, True], range(8)))
def test_the_source_of_a_box_holds_its_pixels(mirror: bool, turns: int) -> None:
    side = 12
    names = np.arange(side * side).reshape(1, side, side)
    whole = np.rot90(names[:, :, ::-1] if mirror else names, turns, axes=(1, 2))
    variation = Variation((side, side), mirror, turns)
    for box in (Box(0, 5, 2, 9), Box(11, 12, 0, 1), Box(3, 3, 1, 4)):
        part = names[(slice(None), *variation.source(box).slices())]
        moved = np.rot90(part[:, :, ::-1] if mirror else part, turns, axes=(1, 2))
        assert np.array_equal(moved, whole[(slice(None), *box.slices())])


def test_tables_of_densities_and_values() -> None:
    for glass in (255.0, 240.0):
        wanted = [max(0.0, np.log((glass + 1) / (value + 1))) * STEPS / MAX_DENSITY for value in range(256)]
        assert np.allclose(density_table(glass), wanted, rtol=1e-6)
    for contrast in (1.0, 0.8, 1.3):
        values = 256 * np.exp(-(np.arange(STEPS) + 0.5) * MAX_DENSITY / STEPS) - 1
        wanted = np.clip(np.rint(255 - (255 - values) * contrast), 0, 255)
        assert np.array_equal(value_table(contrast), wanted)


def test_densities_are_mixed_pixel_by_pixel_in_strips_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (3, 7, 13), dtype=np.uint8)
    mix = (np.eye(3) + rng.uniform(-0.4, 0.4, (3, 3))).astype(np.float32)
    tables, values = np.stack([density_table(g) for g in (240.0, 250.0, 255.0)]), value_table()
    density = np.stack([tables[k][pixels[k].ravel()] for k in range(3)]).astype(np.float64)
    steps = np.clip(mix.T.astype(np.float64) @ density, 0, STEPS - 1)
    near = np.abs(steps - np.rint(steps)) < 1e-2
    wanted = values[steps.astype(int)].reshape(pixels.shape).astype(int)
    for strip in (1, 13, 90, 91, 92, 32_768):
        monkeypatch.setattr(density_mix, "STRIP_PX", strip)
        found = mixed_densities(pixels, tables, mix, values).astype(int)
        assert np.array_equal(found[~near.reshape(pixels.shape)], wanted[~near.reshape(pixels.shape)])
        assert np.abs(found - wanted).max() <= 1


def test_reinhard_is_its_formula_in_strips_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    pixels, glass = rng.integers(0, 256, (3, 5, 11), dtype=np.uint8), np.array([243, 240, 250], np.float32)
    own = LabStatistics((8.0, -0.1, 0.05), (0.5, 0.1, 0.02))
    colours = ReinhardMap.of(own, glass, reinhard.REFERENCE)
    flat = pixels.reshape(3, -1).astype(np.float64)
    to_lms, axes = reinhard._TO_LMS, reinhard._TO_AXES
    lab = axes @ np.log(to_lms @ (flat + 1))
    mean, std = (np.array(reinhard.REFERENCE[name])[:, None] for name in ("mean", "std"))
    aim = (lab - np.array(own.mean)[:, None]) / np.array(own.std)[:, None] * std + mean
    rgb = np.clip(np.linalg.inv(to_lms) @ np.exp(np.linalg.inv(axes) @ aim) - 1, 0, 255)
    dense = np.maximum(np.log((glass[:, None] + 1) / (flat + 1)), 0).mean(0)
    wanted = (255 - np.minimum(dense / 0.15, 1) * (255 - rgb)).reshape(pixels.shape)
    for strip in (1, 11, 54, 55, 56, 32_768):
        monkeypatch.setattr(reinhard, "STRIP_PX", strip)
        assert np.abs(colours(pixels) - wanted).max() < 0.6


def test_a_thousand_stained_pixels_are_enough() -> None:
    rng, glass = np.random.default_rng(2), np.full(3, 240, np.float32)
    tissue = rng.integers(50, 150, (3, 1000), dtype=np.uint8)
    pale = np.full((3, 500), 239, np.uint8)
    found = LabStatistics.of([tissue[:, :400], pale, tissue[:, 400:]], glass)
    lab = reinhard._TO_AXES @ np.log(reinhard._TO_LMS @ (tissue + 1.0))
    assert found is not None and found.mean == pytest.approx(lab.mean(1)) and found.std == pytest.approx(lab.std(1))
    assert LabStatistics.of([tissue[:, 1:], pale], glass) is None
    assert LabStatistics.of([np.full((3, 2000), 90, np.uint8)], glass) is None


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), max_size=8), st.integers(4, 40), st.integers(4, 40))
def test_shelves_are_filled_from_the_first(sizes: list[tuple[int, int]], height: int, width: int) -> None:
    """The first shelf that is high enough and has room, else a new one below all; in whole blocks of four."""
    shelves, plain, below = Shelves(height, width, 4), list[list[int]](), 0
    for h, w in sizes:
        place = None
        for shelf in plain:
            if place is None and h <= shelf[1] and shelf[2] + w <= width and shelf[0] + h <= height:
                place, shelf[2] = (shelf[0], shelf[2]), -(-(shelf[2] + w) // 4) * 4
        if place is None and below + h <= height and w <= width:
            place = (below, 0)
            plain.append([below, -(-h // 4) * 4, -(-w // 4) * 4])
            below += -(-h // 4) * 4
        assert shelves.place(h, w) == place
    boxes = [Box(50 * k, 50 * k + h, 0, w) for k, (h, w) in enumerate(sizes)]
    shelves, wanted = Shelves(height, width, 4), []
    for box in sorted(boxes, key=lambda box: (-box.height, -box.width, box)):
        wanted.append((box, shelves.place(box.height, box.width)))
    fits = all(place for _, place in wanted) and sum(box.area for box in boxes) <= height * width
    assert place_all(boxes, (height, width), 4) == (wanted if fits else None)
    assert len(place_most(boxes, [1] * len(boxes), (height, width), 4)) == len(boxes) or not fits


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 999), st.integers(1, 12), st.integers(1, 12), st.integers(1, 6))
def test_boxes_are_cut_into_squares_around_what_is_in_them(seed: int, height: int, width: int, side: int) -> None:
    occupied = np.random.default_rng(seed).random((height, width)) < 0.3
    box = Box(height // 4, height, width // 5, width)
    wanted = []
    for y, x in itertools.product(range(box.y0, box.y1, side), range(box.x0, box.x1, side)):
        inside = [
            (r, c)
            for r, c in np.argwhere(occupied).tolist()
            if y <= r < min(y + side, box.y1) and x <= c < min(x + side, box.x1)
        ]
        if inside:
            rows, columns = [r for r, _ in inside], [c for _, c in inside]
            wanted.append(Box(min(rows), max(rows) + 1, min(columns), max(columns) + 1))
    assert list(cut(box, occupied, side)) == wanted
    assert shrink(box, occupied & False).empty


@pytest.mark.parametrize("size_px", [(24, 40), (40, 24), (8, 64)])
@pytest.mark.parametrize("kind", ["pack", "crop"])
def test_views_of_a_slide_are_as_many_as_needed(kind: str, size_px: tuple[int, int]) -> None:
    """Windows of ``crop`` tile the tissue's extent, from its first block on."""
    mask = np.random.default_rng(3).random((25, 30)) < 0.2
    mask[:3] = mask[:, :4] = False
    grid = TissueGrid.under(mask, (4.0, 4.0), (100, 118), (1.0, 1.0))
    views = make_views(grid, size_px, kind, 8)  # type: ignore[arg-type]
    assert make_view(grid, size_px, kind, 8).flags == ("cropped",)  # type: ignore[arg-type]
    sources = [piece.source for view in views for piece in view.pieces]
    shown = np.zeros((100, 118), int)
    for source in sources:
        shown[source.slices()] += 1
    tissue = mask.repeat(4, 0).repeat(4, 1)[:100, :118]
    assert shown.max() == 1 and (shown[tissue] == 1).all()
    assert sum(view.coverage for view in views) == pytest.approx(1) and {view.tissue_px for view in views} == {
        tissue.sum()
    }
    if kind == "crop":
        ys, xs = np.nonzero(tissue)
        top, left = ys.min() // 8 * 8, xs.min() // 8 * 8
        windows = [
            Box(y, min(y + size_px[0], 100), x, min(x + size_px[1], 118))
            for y in range(top, ys.max() + 1, size_px[0])
            for x in range(left, xs.max() + 1, size_px[1])
        ]
        with_tissue = [window for window in windows if tissue[window.slices()].any()]
        assert len(views) == len(with_tissue) and all(len(view.pieces) == 1 for view in views)
        assert all(any(window.contains(source) for window in with_tissue) for source in sources)


def test_figures_at_the_limit_are_within_the_range() -> None:
    unit = {name: (1.0, 0.0, 0.0) for name in ("haematoxylin", "eosin")}
    trained = TrainedRange.of([SlideFigures(6.0, 0.5, unit), SlideFigures(12.0, 0.25, unit)])
    assert trained.numbers == {"area_mm2": (6.0, 12.0), "source_mpp": (0.25, 0.5)}
    for near in (SlideFigures(36.0), SlideFigures(2.0), SlideFigures(source_mpp=0.75), SlideFigures()):
        assert trained.describe_outside(near) == []
    for far, words in (
        (SlideFigures(36.1), "3 times the area of the largest training slide"),
        (SlideFigures(1.9), "0.32 times the area of the smallest training slide"),
        (SlideFigures(source_mpp=0.76), "1.5 times the microns per pixel of the file of the coarsest training slide"),
        (SlideFigures(source_mpp=0.1), "0.4 times the microns per pixel of the file of the finest training slide"),
    ):
        assert trained.describe_outside(far) == [words]
    across = SlideFigures(stains={"eosin": (0.0, 1.0, 0.0), "haematoxylin": (1.0, 0.0, 0.0)})
    (said,) = trained.describe_outside(across)
    assert said == "the colour of eosin is 90° from the mean of training, where 0° was the farthest"
    joined = StainRange.union([StainRange((1.0, 0.0), 3.0), StainRange((0.0, 1.0), 5.0)])
    assert joined.mean == pytest.approx((0.5**0.5, 0.5**0.5)) and joined.degrees == pytest.approx(50)
    spread = StainRange.of([(1.0, 0.0), (0.0, 1.0)])
    assert spread.mean == pytest.approx((0.5**0.5, 0.5**0.5)) and spread.degrees == pytest.approx(45)


def test_long_lists_are_named_in_part() -> None:
    for count, some in ((3, "a, b, c"), (4, "a, b, c …")):
        match = LabelMatch("case_id", {}, (), (), tuple("abcdef"[:count]), (), {})
        assert match.describe().splitlines()[2].split(maxsplit=5)[-1] == some
    for count in (10, 11):
        wrong = LabelMatch("case_id", {}, (), (), ("s",), tuple(f"z{k}" for k in range(count)), {})
        with pytest.raises(RequestError) as told:
            wrong.check("labels.csv", allow_unmatched=False)
        assert str(told.value).count("\n  z") == 10 and ("and 1 more" in str(told.value)) == (count == 11)
        assert "those of the store are like" not in str(told.value), "names of slides are no names of cases"


@pytest.mark.parametrize("text", ["1", "-1.5", "+2,", ",5", "1e5", "2.5E-3"])
def test_what_is_a_number(text: str) -> None:
    assert _is_number(text) and not _is_number(f"{text}x") and not _is_number(f"x{text}")


@pytest.mark.parametrize("finer", [1, 2, 7, 16])
def test_a_chunk_of_a_coarse_level_is_no_glass_if_the_finer_mask_has_tissue_in_it(finer: int) -> None:
    for row in range(48 * finer):
        mask = np.zeros((48 * finer, 16 * finer), bool)
        mask[row, 3] = True
        grid = TissueGrid.under(mask, (8.0, 8.0), (48, 16), (8.0 * finer, 8.0 * finer))
        glass = [grid.is_glass(Box(top, top + 16, 0, 16)) for top in (0, 16, 32)]
        assert not glass[row // (16 * finer)]
        # Only the two chunks at a border are doubtful.
        assert sum(glass) >= 1
