"""Each step of the search for tissue, fat and ink against its definition, on random masks and pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import ndimage
from skimage.filters import threshold_otsu
from skimage.measure import label
from skimage.morphology import remove_small_objects

from hyfi_core.errors import RequestError
from pathology.tissue import density, fat, pen, strokes, tissue
from tests.pathology.tissue import plain_tissue

GLASS = np.array([240, 238, 236], np.float32)


def picture(seed: int, height: int, width: int) -> np.ndarray:
    """(3, h, w): smooth tissue with grain and thin dark lines, and some of glass brighter than its usual colour."""
    rng = np.random.default_rng(seed)
    ground = ndimage.gaussian_filter(rng.random((3, height, width)), (0, 6, 6)) * 240 + 70
    ground[:, :: rng.integers(7, 12)] -= 40
    ground[:, :, :: rng.integers(9, 14)] -= 30
    return (ground + rng.normal(0, 4, ground.shape)).clip(0, 255).astype(np.uint8)


def blobs(rng: np.random.Generator, shape: tuple[int, int], share: float, size: float = 2.0) -> np.ndarray:
    """A mask of pieces about as wide as ``size``, which cover a share of it."""
    values = ndimage.gaussian_filter(rng.random(shape), size)
    return values > np.quantile(values, 1 - share)


@pytest.mark.parametrize("half", [0, 1, 2, 3, 5, 8])
def test_extremes_over_squares(half: int) -> None:
    values = np.random.default_rng(half).random((23, 31), dtype=np.float32)
    for pick, of in ((np.maximum, ndimage.maximum_filter), (np.minimum, ndimage.minimum_filter)):
        found = fat._square_filter(values, half, pick)
        assert np.array_equal(found, of(values, 2 * half + 1, mode="nearest"))


@pytest.mark.parametrize("block", [1, 2, 3, 15, 16, 17])
def test_blocks_have_the_means_of_their_pixels_and_come_back_as_pixels(block: int) -> None:
    rng = np.random.default_rng(block)
    mask = rng.random((5 * block + 1, 7 * block + block // 2)) < 0.7
    mask[:block] = True
    assert np.allclose(fat._block_fractions(mask, block), plain_tissue.means(mask, block))
    small = blobs(rng, (9, 12), 0.4, 1.0)
    smooth = plain_tissue.between(plain_tissue.between(small.astype(np.float32), block).T, block).T
    shape = (9 * block - block // 2, 12 * block)
    found = fat._upsampled(small, block, shape)
    clear = np.abs(smooth - 0.5)[: shape[0], : shape[1]] > 1e-6
    assert found.shape == shape and np.array_equal(found[clear], (smooth >= 0.5)[: shape[0], : shape[1]][clear])


@pytest.mark.parametrize("mpp_um", [4.0, 8.0, 13.0])
def test_walls_are_thin_and_denser_than_what_is_around(mpp_um: float) -> None:
    image, width = picture(3, 60, 40), 2 * round(40 / mpp_um / 2) + 1
    dense = np.maximum(np.log10((GLASS[:, None, None] + 1) / (image + 1.0)), 0).mean(0)
    contrast = dense - ndimage.grey_opening(dense, (width, width), mode="nearest")
    clear = np.abs(contrast - 0.02) > 1e-5
    assert 0.1 < (contrast > 0.02).mean() < 0.9
    for rows in (slice(0, 60), slice(0, 7), slice(20, 33), slice(50, 60)):
        found = fat._thin_and_dense(image, GLASS, rows, mpp_um, 0.02)
        assert np.array_equal(found[clear[rows]], (contrast > 0.02)[rows][clear[rows]])


def test_walls_are_counted_beside_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(density, "_STRIP_PX", 500)
    image, block = picture(4, 50, 43), 4
    known = blobs(np.random.default_rng(1), (50, 43), 0.2)
    near = plain_tissue.dilated(known, 4)
    wall = fat._thin_and_dense(image, GLASS, slice(0, 50), 8.0, 0.02) & ~near
    dense = np.maximum(np.log10((GLASS[:, None, None] + 1) / (image + 1.0)), 0)
    mean, colour = dense.mean(0), dense.max(0) - dense.min(0)
    shown = [wall, np.where(wall, np.minimum(mean, 0.08), 0), np.where(wall, np.minimum(colour, 0.08), 0), ~near, known]
    assert all(values.any() for values in shown) and (mean[wall] > 0.08).any() and (colour[wall] < 0.08).any()
    for found, values in zip(fat._block_means(image, GLASS, known, block, 8.0, 0.02), shown, strict=True):
        assert np.allclose(found, plain_tissue.means(values, block), atol=1e-6)


def test_walls_are_not_looked_for_above_16_um_and_their_contrast_has_bounds() -> None:
    image, none = np.full((3, 60, 60), 240, np.uint8), np.zeros((60, 60), bool)
    image[:, ::3] = image[:, :, ::3] = np.array([200, 170, 200])[:, None, None]
    assert fat.find_fat(image, GLASS, none, 16.0, 0.01).any()
    assert not fat.find_fat(image, GLASS, none, 16.1, 0.01).any()
    assert [fat.wall_contrast(x) for x in (0.0, 0.05, 1.0)] == pytest.approx([0.006, 0.0095, 0.014])


@pytest.mark.parametrize("seed", range(3))
def test_clear_cells_within_webs_and_between_these_and_tissue_are_fat(seed: int) -> None:
    rng = np.random.default_rng(seed)
    webs, known = blobs(rng, (40, 50), 0.15, 1.5), blobs(rng, (40, 50), 0.15, 2.0)
    for mpp_um, cell in ((32.0, 2), (64.0, 1), (200.0, 1)):
        near = plain_tissue.closed(webs | known, cell) & plain_tissue.dilated(webs, cell) & ~known
        assert np.array_equal(fat._with_cells(webs, known, mpp_um), webs | near)


@pytest.mark.parametrize("most", [100, 997, 1_000_000])
def test_thresholds_are_otsus_of_some_pixels_that_are_not_excluded(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tissue, "_THRESHOLD_PX", most)
    rng = np.random.default_rng(0)
    levels = np.where(rng.random((60, 41)) < 0.4, rng.normal(9000, 900, (60, 41)), rng.normal(3000, 500, (60, 41)))
    levels = levels.clip(0, 65535).astype(np.uint16)
    for excluded in (np.zeros(levels.shape, bool), rng.random(levels.shape) < 0.3, np.ones(levels.shape, bool)):
        usable = levels[~excluded]
        expected = usable[:: 1 + usable.size // most]
        assert np.array_equal(tissue._sampled(levels, excluded), expected)
        for bounds in ((0.0, 1.0), (0.0, 0.01), (0.1, 0.2)):
            step = float(tissue._STEP)
            wanted = np.clip(threshold_otsu(expected * tissue._STEP), *bounds) if expected.size else bounds[0]
            assert abs(int(tissue._threshold(levels, excluded, bounds)) - int(min(wanted, 0.5) / step)) <= 1
    assert tissue._threshold(np.full((4, 4), 900, np.uint16), np.zeros((4, 4), bool), (0.1, 0.2)) == int(0.1 / step)


def test_levels_are_rounded_and_have_a_most() -> None:
    values = np.array([0.0, 0.4, 0.6, 1.0, 65534.6, 65535.0, 9e9], np.float32) * tissue._STEP
    assert tissue._levels(values).tolist() == [0, 0, 1, 1, 65535, 65535, 65535]
    some = np.random.default_rng(0).integers(0, 65536, (30, 30)).astype(np.uint16)
    features = tissue._PixelFeatures(some, some, np.zeros((30, 30), np.uint8))
    mask = some > 20000
    median = float(np.median(some[mask])) * float(tissue._STEP)
    assert features.median_density(mask) == pytest.approx(median, abs=3e-3)
    assert features.median_density(np.zeros((30, 30), bool)) == 0.0


def test_areas_in_pixels() -> None:
    assert [tissue._pixels(area, 8.0) for area in (1.0, 64.0, 95.0, 97.0, 6400.0)] == [1, 1, 1, 2, 100]


def test_colours_of_ink() -> None:
    """By the definitions of ``plain_tissue.pen_marks``, for densities of every hue."""
    found = np.random.default_rng(5).gamma(1.0, 0.25, (3, 4000)).astype(np.float32)
    found[:, ::5] = found[0, ::5] * np.random.default_rng(6).uniform(0.9, 1.1, (3, 800)).astype(np.float32)
    red, green, blue = found
    mean, colour = found.mean(0), found.max(0) - found.min(0)
    core, certain, faint = pen.classify_ink(found, mean, colour)
    is_red = (blue > 0.75 * green) & (red < 0.25 * green)
    kinds = ((red > 1.1 * green) & (red > 0.12), is_red & (green > 0.4), (mean > 0.2) & (colour < 0.25 * mean))
    assert all(20 < kind.sum() < 3000 for kind in kinds) and np.array_equal(core, np.logical_or.reduce(kinds))
    only_red, green_ink = red > 2.5 * green, (red > 1.6 * green) & (red > 3.5 * blue)
    assert np.array_equal(certain, (red > 0.3) & (only_red | green_ink)) and (certain & ~only_red).sum() > 20
    paler = (red > green) | (colour < 0.2 * mean) | is_red
    assert np.array_equal(faint, paler & (mean > 0.02)) and (paler & ~faint).any() and (is_red & ~core).any()


def small_removed(mask: np.ndarray, area_px: int, corners: bool = False) -> np.ndarray:
    return remove_small_objects(mask, max_size=area_px, connectivity=2 if corners else 1)


def touching(seeds: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The pieces of a mask that hold a seed; pieces join at corners, too."""
    pieces = label(mask, connectivity=2)
    return np.isin(pieces, np.unique(pieces[seeds & mask])) & mask


@pytest.mark.parametrize("mpp_um", [4.0, 8.0, 26.0, 90.0])
@pytest.mark.parametrize("seed", range(4))
def test_marks_are_strokes_with_the_faint_ink_around_them(seed: int, mpp_um: float) -> None:
    rng, shape = np.random.default_rng(seed), (70, 90)
    faint = blobs(rng, shape, 0.35, 3.0)
    core = blobs(rng, shape, 0.3, 3.0) & (faint | (rng.random(shape) < 0.9))
    smooth = core & blobs(rng, shape, 0.4, 5.0)
    certain, thin = blobs(rng, shape, 0.04), blobs(rng, shape, 0.01, 1.0)
    if seed == 3:
        core, certain, thin = core & False, certain & False, thin & False
    pixel_um2, stroke, rim = mpp_um**2, max(1, round(8 / mpp_um)), max(1, round(40 / mpp_um))
    smallest = max(1, round(6000 / pixel_um2))

    def opened(mask: np.ndarray) -> np.ndarray:
        return plain_tissue.dilated(~plain_tissue.dilated(~mask, stroke), stroke)

    side = 2 * round(36 / mpp_um) + 1
    means = [ndimage.uniform_filter(m.astype(np.float64), side, mode="constant") for m in (smooth, core)]
    even = means[0] > np.maximum(0.12 * means[1], 1e-6)
    marks = small_removed(opened(core) & even, smallest) | small_removed(certain, smallest, corners=True) | thin
    near = plain_tissue.dilated(marks, rim)
    wide = opened(faint & ~marks)
    beyond = touching(small_removed(wide & ~near, smallest), wide)
    expected = marks | (touching(marks, (faint & ~beyond) | marks) & near)
    assert np.array_equal(pen.pen_marks(core, smooth, certain, faint, thin, mpp_um), expected)
    assert expected.any() == (seed < 3)


@pytest.mark.parametrize(
    ("length", "width", "ink", "found"),
    [
        (16, 3, 90, True),
        (40, 6, 90, True),
        (40, 8, 90, False),  # wider than 60 µm
        (12, 3, 90, False),  # shorter than 110 µm
        (40, 3, 140, False),  # paler than 0.3
        (40, 3, 110, True),
    ],
)
def test_strokes_are_long_thin_and_dense(length: int, width: int, ink: int, found: bool) -> None:
    """At 8 µm per pixel, along either axis, beside another stroke that is one, and at the border."""
    for turned in (False, True):
        dark = np.zeros((70, 80), bool)
        dark[40 : 40 + width, 30 : 30 + length] = True
        other = np.zeros((70, 80), bool)
        other[0:3, 0:30] = True
        image = np.where(dark, ink, np.where(other, 80, 240)).astype(np.uint8)
        image, masks = np.stack([image] * 3), (dark, other)
        if turned:
            image, masks = np.ascontiguousarray(image.transpose(0, 2, 1)), (dark.T, other.T)
        both = strokes.thin_strokes(image, GLASS, masks[0] | masks[1], 8.0)
        assert np.array_equal(both, (masks[0] | masks[1]) if found else masks[1])


def test_strokes_are_even_along_their_middle() -> None:
    dark = np.zeros((30, 80), bool)
    dark[10:13, 10:70] = True
    for spread, found in ((10, True), (70, False)):
        values = np.where(np.arange(80) % 2, 80 - spread, 80 + spread)
        image = np.stack([np.where(dark, values, 240).astype(np.uint8)] * 3)
        assert strokes.thin_strokes(image, GLASS, dark, 8.0).any() == found


def test_strips_cover_all_rows_and_densities_are_logarithms() -> None:
    for height, width, multiple in ((100, 7, 1), (1000, 2**16, 5), (33, 0, 16), (5, 2**20, 4), (3000, 2000, 1)):
        strips = density.row_strips(height, width, multiple)
        assert [row for strip in strips for row in range(strip.start, strip.stop)] == list(range(height))
        assert all(strip.start % multiple == 0 for strip in strips)
        rows = max(16, 2**19 // max(1, width))
        assert all(rows <= strip.stop - strip.start < rows + multiple for strip in strips[:-1])
    image = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(3, 0)
    wanted = np.maximum(np.log10((GLASS[:, None, None] + 1) / (image + 1.0)), 0)
    assert np.allclose(density.density_of(image, GLASS, slice(0, 16)), wanted, atol=1e-5)
    y, x = np.divmod(np.arange(0, 256, 5), 16)
    assert np.allclose(density.density_of_pixels(image, GLASS, y, x), wanted[:, y, x], atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_exact_black_is_unscanned_at_the_border_and_in_rectangles(seed: int) -> None:
    rng = np.random.default_rng(seed)
    image = rng.integers(1, 250, (3, 60, 70)).astype(np.uint8)
    black = np.zeros((60, 70), bool)
    for _ in range(4):
        (y, x), (h, w) = rng.integers(0, 58, 2), rng.integers(1, 9, 2)
        black[y : y + h, x : x + w] = True
    black[20:30, 30:40] = True
    black[24, 34] = seed % 2 == 0  # of a hundred, one missing is still a rectangle
    black |= ndimage.binary_dilation(np.eye(60, 70, 5, bool) & (np.arange(70) < 15) & (np.arange(70) > 8))
    image[:, black] = 0
    # A rectangle of one pure colour is none of black.
    pure = np.s_[40:50, 40:50]
    image[:, *pure], image[seed % 3, *pure], black[pure] = 0, 200, False
    unscanned = np.zeros_like(black)
    pieces = label(black, connectivity=1)
    for number in range(1, pieces.max() + 1):
        y, x = np.nonzero(pieces == number)
        sides = (np.ptp(y) + 1, np.ptp(x) + 1)
        at_border = y.min() == 0 or x.min() == 0 or y.max() == 59 or x.max() == 69
        if at_border or (min(sides) > 2 and len(y) > 0.95 * sides[0] * sides[1]):
            unscanned |= pieces == number
    assert unscanned.any() and (black & ~unscanned).any()
    wanted = np.where(plain_tissue.dilated(unscanned, 2), GLASS.astype(np.uint8)[:, None, None], image)
    assert np.array_equal(tissue._without_unscanned(image, GLASS), wanted)
    few = np.maximum(image, 1)
    few[:, 0, :4] = 0  # 4 of 4200 pixels are fewer than one in a thousand; 5 are not
    assert tissue._without_unscanned(few, GLASS) is few
    few[:, 0, 4] = 0
    assert (tissue._without_unscanned(few, GLASS)[:, 0, :5] == GLASS.astype(np.uint8)[:, None]).all()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("smooth_um=0", 0.0), ("density=0,0", (0.0, 0.0)), ("colour=0.1,0.2", (0.1, 0.2)), ("fat=true", True)],
)
def test_settings_that_are_allowed(setting: str, value: Any) -> None:
    assert getattr(tissue.TissueParameters().with_settings([setting]), setting.partition("=")[0]) == value


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("smooth_um=-1", "expected numbers ≥ 0"),
        ("smooth_um=inf", "expected numbers ≥ 0"),
        ("smooth_um=1,2", "expected one number; smooth_um=8.0 is the default"),
        ("density=1,2,3", "expected two numbers"),
        ("fat=1", "expected true or false; fat=true is the default"),
        ("mpp_um=8", "with a name of"),
    ],
)
def test_settings_that_are_not(setting: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        tissue.TissueParameters().with_settings([setting])
