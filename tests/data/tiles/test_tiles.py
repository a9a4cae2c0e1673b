"""Tiles of a stored slide: which there are, and that their pixels are those of the slide, reduced exactly."""

from __future__ import annotations

import pickle
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.samples.augment import Augment
from data.samples.colours import macenko
from data.samples.colours.macenko import MacenkoMap
from data.store.slide_store import SlideStore
from data.tiles.reader import StoreTiles
from data.tiles.resample import covered, reduced
from data.tiles.tiling import Tiling
from data.tiles.tissue_tiles import NoTilesError, tissue_tiles
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from hyfi_core.tiles.source import TileSource, read_tiles
from tests.data.tiles.stored import AFFINE, write_slide


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> SlideStore:
    mask = np.random.default_rng(8).random((138, 538)) > 0.6
    mask[:40, :200] = False
    return write_slide(tmp_path_factory.mktemp("store"), "s", mask)


def whole(slide: SlideStore, level: int = 0, margin: int = 600) -> np.ndarray:
    """All pixels of a level, with white around the lower and right border."""
    size = slide.levels[level]
    return slide.read(Box(0, size.height_px + margin, 0, size.width_px + margin), level)


def brute_share(slide: SlideStore, y: int, x: int, size: int, mpp: float, length: tuple[int, int]) -> float:
    """Tissue pixels of a tile, one by one, by the mask's pixel under each centre."""
    mask, mask_mpp = slide.tissue()
    ys, xs = (np.arange(start, min(start + size, end)) for start, end in zip((y, x), length, strict=True))
    rows = np.minimum(((ys + 0.5) * mpp / mask_mpp[0]).astype(int), mask.shape[0] - 1)
    columns = np.minimum(((xs + 0.5) * mpp / mask_mpp[1]).astype(int), mask.shape[1] - 1)
    return float(mask[np.ix_(rows, columns)].sum() / size**2)


@pytest.mark.parametrize(("mpp", "size", "stride"), [(None, 224, None), (2.0, 96, 64), (1.25, 100, 100), (3.0, 64, 80)])
def test_tiles_are_those_with_enough_tissue(
    slide: SlideStore, mpp: float | None, size: int, stride: int | None
) -> None:
    grid = tissue_tiles(slide, Tiling(size, stride, mpp, min_tissue=0.3))
    step, plane_mpp = stride or size, mpp or 1.0
    length = grid.plane.size_px
    assert length == tuple(
        -(-n * 2**grid.plane.level // plane_mpp) for n in slide.images[str(grid.plane.level)].shape[1:]
    )
    shares = {
        (y, x): brute_share(slide, y, x, size, plane_mpp, length)
        for y in range(0, int(max(1, length[0] - size + step)), step)
        for x in range(0, int(max(1, length[1] - size + step)), step)
    }
    chosen = {corner: share for corner, share in shares.items() if share >= 0.3}
    assert {tuple(corner) for corner in grid.corners.tolist()} == set(chosen) and 0 < len(chosen) < len(shares)
    assert [chosen[tuple(corner)] for corner in grid.corners.tolist()] == pytest.approx(grid.tissue.tolist())
    # The whole slide is covered, and what is read of it lies in the boxes.
    assert max(y for y, _ in shares) + step >= length[0] - (size - step) * (size > step)
    assert all(box.contains(grid.level_box(corner)) for box, corner in zip(grid.boxes, grid.corners, strict=True))


def test_a_file_of_the_store_is_finished_before_the_next(slide: SlideStore) -> None:
    grid = tissue_tiles(slide, Tiling(128, min_tissue=0))
    files = (grid.corners[:, 1] // 4096).tolist()
    assert files == sorted(files) and set(files) == {0, 1}
    first = grid.corners[np.array(files) == 0].tolist()
    assert first == sorted(first)


@pytest.mark.parametrize("mpp", [1.0, 1.01, 2.0, 3.98])
def test_a_level_of_this_mpp_is_cut_as_it_is(slide: SlideStore, mpp: float) -> None:
    tiles = StoreTiles(slide, tissue_tiles(slide, Tiling(96, mpp=mpp)))
    level = {1.0: 0, 1.01: 0, 2.0: 1, 3.98: 2}[mpp]
    pixels = whole(slide, level)
    assert tiles.tiles.plane.level == level and tiles.tiles.plane.is_level
    read = tiles.read(range(len(tiles)))
    for tile, (y, x) in zip(read, tiles.tiles.corners.tolist(), strict=True):
        assert np.array_equal(tile, pixels[:, y : y + 96, x : x + 96])


@pytest.mark.parametrize(("mpp", "level"), [(1.25, 0), (1.7, 0), (3.0, 1), (17.0, 2)])
def test_between_levels_tiles_are_cut_from_the_reduced_slide(slide: SlideStore, mpp: float, level: int) -> None:
    size = 96 if mpp < 10 else 16
    tiles = StoreTiles(slide, tissue_tiles(slide, Tiling(size, mpp=mpp)), threads=1 + level)
    plane = tiles.tiles.plane
    assert plane.level == level and not plane.is_level
    height, width = (int(n) + size for n in plane.size_px)
    rows, columns = covered(0, height, plane.step[0])[1], covered(0, width, plane.step[1])[1]
    pixels = np.full((3, rows, columns), 255, np.uint8)
    stored = whole(slide, level, 0)
    pixels[:, : stored.shape[1], : stored.shape[2]] = stored
    slow = reduced(pixels, (0, 0), (height, width), plane.step)
    for tile, (y, x) in zip(tiles.read(range(len(tiles))), tiles.tiles.corners.tolist(), strict=True):
        assert np.array_equal(tile, slow[:, y : y + size, x : x + size])


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 50), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_a_reduced_pixel_is_the_mean_of_its_area(p: int, q: int, start: int, length: int, seed: int) -> None:
    step = Fraction(max(p, q), min(p, q))
    y0, y1 = covered(start, start + length, step)
    values = np.random.default_rng(seed).integers(0, 256, (1, y1 - y0, y1 - y0), dtype=np.uint8)
    result = reduced(values, (start, start), (length, length), (step, step))
    # In units of 1/denominator every new pixel is a whole number of units.
    units = values[0].astype(np.int64).repeat(step.denominator, 0).repeat(step.denominator, 1)
    first, side = start * step.numerator - y0 * step.denominator, step.numerator
    units = units[first : first + length * side, first : first + length * side]
    total = units.reshape(length, side, length, side).sum((1, 3))
    assert result[0].tolist() == [[int(Fraction(int(n), side**2) + Fraction(1, 2)) for n in row] for row in total]


def test_coords_are_those_of_the_slide_that_was_ingested(slide: SlideStore) -> None:
    grid = tissue_tiles(slide, Tiling(100, mpp=1.25))
    assert np.array_equal(grid.coords, np.rint(grid.corners * 1.25 * 2.5 + [40, 7]).astype(int))
    assert grid.coords.dtype == np.int64 and grid.source_size_px == pytest.approx((312.5, 312.5))


def test_coords_of_a_turned_slide_are_its_upper_left_corner(slide: SlideStore) -> None:
    slide.attributes["affine"] = [[-2.0, 0.0, 3000.0], [0.0, 2.0, 10.0]]
    try:
        grid = tissue_tiles(slide, Tiling(100))
    finally:
        slide.attributes["affine"] = AFFINE
    assert np.array_equal(
        grid.coords, np.stack([3000 - 2 * (grid.corners[:, 0] + 100), 2 * grid.corners[:, 1] + 10], 1)
    )


@pytest.mark.parametrize(("cache_bytes", "threads"), [(0, 1), (0, 3), (2**20, 2), (2**26, 1)])
def test_each_chunk_is_decoded_once_for_a_call(
    slide: SlideStore, cache_bytes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = StoreTiles(slide, tissue_tiles(slide, Tiling(96)), cache_bytes=cache_bytes, threads=threads)
    decoded: Counter[Box] = Counter()
    read = SlideStore.read

    def counted(self: SlideStore, box: Box, level: int = 0) -> np.ndarray:
        decoded[box] += 1
        return read(self, box, level)

    monkeypatch.setattr(SlideStore, "read", counted)
    once = tiles.read(range(len(tiles)))
    assert set(decoded.values()) == {1} and all(box.y0 % 512 == 0 and box.x0 % 512 == 0 for box in decoded)
    again = torch.cat([tiles.read([index]) for index in reversed(range(len(tiles)))]).flip(0)
    assert torch.equal(once, again)
    assert (set(decoded.values()) == {1}) == (cache_bytes == 2**26)


def test_it_is_a_tile_source_and_can_be_sent_to_another_process(slide: SlideStore) -> None:
    tiles = StoreTiles(slide, tissue_tiles(slide, Tiling(64)))
    assert isinstance(tiles, TileSource) and tiles.coords.shape == (len(tiles), 2)
    copy = pickle.loads(pickle.dumps(tiles))
    assert torch.equal(read_tiles(copy, 0, [5, 3]), tiles.read([5, 3])) and read_tiles(tiles, 0, []).shape[0] == 0
    with pytest.raises(IndexError):
        tiles.read([len(tiles)])


def test_tiles_are_drawn_by_seed_epoch_and_slide(slide: SlideStore) -> None:
    grid = tissue_tiles(slide, Tiling(96))
    draws = [grid.drawn(20, seed, epoch) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))]
    sets = [[tuple(corner) for corner in draw.corners.tolist()] for draw in draws]
    everything = [tuple(corner) for corner in grid.corners.tolist()]
    assert sets[0] == sets[1] and sets[0] not in sets[2:] and {len(one) for one in sets} == {20}
    assert sets[0] == [corner for corner in everything if corner in sets[0]]
    assert grid.drawn(None, 0, 0) is grid and grid.drawn(10**6, 0, 0) is grid
    assert draws[0].digest() == draws[1].digest() != draws[2].digest() and grid.digest() != draws[0].digest()
    with pytest.raises(RequestError, match="at most 0 tiles"):
        grid.drawn(0, 0, 0)


def test_augmentation_depends_on_the_tile_alone(slide: SlideStore) -> None:
    grid = tissue_tiles(slide, Tiling(96))
    plain, varied = (StoreTiles(slide, grid, augment=augment, seed=3) for augment in (None, Augment()))
    few = StoreTiles(slide, grid.drawn(10, 0, 0), augment=Augment(), seed=3)
    places = [grid.corners.tolist().index(corner) for corner in few.tiles.corners.tolist()]
    assert torch.equal(few.read(range(10)), varied.read(places)) and not torch.equal(
        varied.read(places), plain.read(places)
    )
    later = StoreTiles(slide, grid, augment=Augment(), seed=3, epoch=1)
    assert not torch.equal(later.read(places), varied.read(places))


def test_stains_are_normalised_before_augmentation(slide: SlideStore) -> None:
    grid, glass = tissue_tiles(slide, Tiling(96)), np.array([240, 241, 239], np.float32)
    colours = MacenkoMap.of(macenko.REFERENCE, glass, {**macenko.REFERENCE, "strength": (1.0, 1.5)}, "to another")
    plain, own = StoreTiles(slide, grid), StoreTiles(slide, grid, colours=colours)
    assert np.array_equal(own.read_array([3])[0], colours(plain.read_array([3])[0]))
    assert own.identity not in ("", plain.identity) and own.identity.endswith("to another")
    varied = StoreTiles(slide, grid, colours=colours, augment=Augment(flips=False), seed=3).read_array([3])[0]
    y, x = grid.corners[3].tolist()
    variation = Augment(flips=False).draw(3, 0, f"{slide.slide_id}@{y},{x}", (96, 96))
    assert np.array_equal(varied, variation.apply(own.read_array([3])[0]))


def test_what_cannot_be_had_is_named(slide: SlideStore, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"slide s has 1 µm/px at its finest level; .*hyfi ingest --mpp 0\.5"):
        tissue_tiles(slide, Tiling(mpp=0.5))
    tissue_tiles(slide, Tiling(mpp=0.985))
    with pytest.raises(NoTilesError, match=r"slide s: none of its \d+ tiles of 224 px at 1 µm/px is tissue to 99%"):
        tissue_tiles(slide, Tiling(min_tissue=0.99))
    for wrong in ({"size_px": 0}, {"stride_px": 0}, {"mpp": 0.0}, {"min_tissue": 1.5}):
        with pytest.raises(RequestError, match="tiles"):
            Tiling(**wrong)


def test_a_slide_smaller_than_a_tile_is_one_tile_with_white(slide: SlideStore) -> None:
    tiles = StoreTiles(slide, tissue_tiles(slide, Tiling(5000, min_tissue=0)))
    (tile,) = tiles.read([0])
    stored = whole(slide, 0, 0)
    assert np.array_equal(tile[:, :1101, :4301], stored) and (tile[:, 1101:] == 255).all() and len(tiles) == 1
