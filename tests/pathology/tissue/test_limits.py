"""Values that are exactly at a limit: each threshold of the search for tissue, ink, blur and stains says which side."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.store.layout import LevelSize
from hyfi_core.errors import RequestError
from pathology.tissue import blur, fat, pen, quality, smoothing, stain, stain_reference, strokes, tissue
from pathology.tissue.blur import PATCH_PX, BlurMap
from pathology.tissue.density import density_of

GLASS = np.full(3, 245, np.float32)
f32 = np.float32


def inks(red: float, green: float, blue: float, **given: float) -> list[bool]:
    """Return (core, certain, faint) of one pixel; its mean and colour may be given."""
    density = np.array([red, green, blue], np.float32)[:, None]
    mean, colour = density.mean(0), density.max(0) - density.min(0)
    mean = np.array([given["mean"]], np.float32) if "mean" in given else mean
    colour = np.array([given["colour"]], np.float32) if "colour" in given else colour
    return [bool(mask[0]) for mask in pen.classify_ink(density, mean, colour)]


def above(value: float) -> float:
    return float(np.nextafter(f32(value), f32(9)))


def test_colours_at_the_limits_of_ink() -> None:
    rest: dict[str, float] = {"mean": 0.15, "colour": 0.1}  # neither black nor grey
    core = lambda *pixel, **given: inks(*pixel, **{**rest, **given})[0]  # noqa: E731
    certain = lambda *pixel: inks(*pixel)[1]  # noqa: E731
    faint = lambda *pixel, **given: inks(*pixel, **{**rest, **given})[2]  # noqa: E731
    # Bluish: red above 1.1 times green, and above 0.12.
    limit = float(f32(1.1) * f32(0.5))
    assert not core(limit, 0.5, 0.0) and core(above(limit), 0.5, 0.0)
    assert not core(0.12, 0.0, 0.0) and core(above(0.12), 0.0, 0.0)
    # Red: blue above 0.75 times green, red below a quarter of it, green above 0.4.
    assert not core(0.0, 1.0, 0.75) and core(0.0, 1.0, above(0.75))
    assert not core(0.25, 1.0, 1.0) and core(0.2499, 1.0, 1.0)
    assert not core(0.0, 0.4, 1.0) and core(0.0, above(0.4), 1.0)
    # Black: a mean above 0.2, and a difference below a quarter of it.
    assert not core(0.1, 0.2, 0.1, mean=0.2, colour=0.01) and core(0.1, 0.2, 0.1, mean=above(0.2), colour=0.01)
    assert not core(0.1, 0.2, 0.1, mean=0.5, colour=0.125) and core(0.1, 0.2, 0.1, mean=0.5, colour=0.1249)
    # Certain: red above 0.3, and above 2.5 times green, or above 1.6 times green and 3.5 times blue.
    assert not certain(0.3, 0.0, 1.0) and certain(above(0.3), 0.0, 1.0)
    assert not certain(2.5, 1.0, 2.0) and certain(above(2.5), 1.0, 2.0)
    limit = float(f32(1.6) * f32(1.0))
    assert not certain(limit, 1.0, 0.1) and certain(above(limit), 1.0, 0.1)
    assert not certain(1.75, 1.0, 0.5) and certain(above(1.75), 1.0, 0.5)
    # Faint: red above green, or grey, or red ink; a mean above 0.02.
    assert not faint(0.5, 0.5, 0.0) and faint(above(0.5), 0.5, 0.0)
    limit = float(f32(0.2) * f32(0.5))
    assert not faint(0.1, 0.5, 0.1, mean=0.5, colour=limit) and faint(0.1, 0.5, 0.1, mean=0.5, colour=0.099)
    assert not faint(0.0, 1.0, 0.75) and faint(0.0, 1.0, above(0.75))
    assert not faint(0.0, 0.0, 0.5), "yellow is not the rim of red ink"
    assert not faint(0.5, 0.1, 0.1, mean=0.02) and faint(0.5, 0.1, 0.1, mean=above(0.02))


def test_glass_has_no_smooth_ink_and_the_share_of_smooth_pixels_has_to_be_larger() -> None:
    assert not pen.without_texture(np.full((3, 9, 9), 245, np.uint8), GLASS, slice(0, 9), 8.0).any()
    core = np.ones((9, 9), bool)
    assert pen._mostly_smooth(core, core, 8.0).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pen, "_SMOOTH_FRACTION", 1.0)
        assert not pen._mostly_smooth(core, core, 8.0).any()


def patch_of(values: list[int], shares: list[int]) -> np.ndarray:
    """A patch with so many sixteenths of its pixels of each value, mixed."""
    pixels = np.repeat(np.array(values, np.uint8), np.array(shares) * PATCH_PX**2 // 16)
    return np.random.default_rng(0).permutation(pixels).reshape(PATCH_PX, PATCH_PX)


def measured(green: np.ndarray) -> bool:
    found = BlurMap(*green.shape)
    found.add(0, 0, np.stack([green] * 3))
    return bool(np.isfinite(found.values).all())


def test_patches_at_the_limits_of_what_is_measured() -> None:
    at_limit = patch_of([92, 108, 100], [7, 7, 2])
    assert at_limit.var() == 56 and not measured(at_limit)
    rest = np.flatnonzero(at_limit == 100)
    at_limit.reshape(-1)[rest[:512]], at_limit.reshape(-1)[rest[512:1024]] = 92, 108
    assert at_limit.var() == 60 and at_limit.mean() == 100 and measured(at_limit)
    pale = patch_of([214, 246, 240], [4, 4, 8])
    assert pale.mean() == 235 and measured(pale)
    pale[0, 0] = 255
    assert not measured(pale)
    assert measured(patch_of([214, 240], [8, 8])) and not measured(patch_of([215, 240], [8, 8]))


def test_patches_at_the_limits_of_focus_tissue_and_number() -> None:
    found = BlurMap(PATCH_PX, 4 * PATCH_PX)
    found.values[:] = [[f32(blur.OUT_OF_FOCUS), np.nextafter(f32(blur.OUT_OF_FOCUS), f32(0)), 1.0, 1.0]]
    assert found.blurred.tolist() == [[False, True, False, False]]
    assert found.patches == 4 and found.share == 0.25 and found.median is not None
    found.values[0, 0] = np.nan
    assert found.patches == 3 and found.share == 0.0 and found.median is None
    half = BlurMap(PATCH_PX, 2 * PATCH_PX)
    half.values[:] = 1.0
    tissue_mask = np.zeros((10, 20), bool)
    tissue_mask[:5, :10] = tissue_mask[:4, 10:] = True
    half.restrict_to(tissue_mask, np.zeros((10, 20), bool))
    assert np.isfinite(half.values).tolist() == [[True, False]], "half of a patch is enough tissue"
    for rows in (255, 256, 257):  # sums of a patch's rows do not overflow
        fine = BlurMap(PATCH_PX, PATCH_PX)
        fine.values[:] = 1.0
        fine.restrict_to(np.ones((rows, 3), bool), np.zeros((rows, 3), bool))
        assert np.isfinite(fine.values).all()


def zigzag(height: int, width: int) -> np.ndarray:
    """A line of one pixel that fills a box and is far longer than its diagonal."""
    line = np.zeros((height, width), bool)
    line[::4] = True
    line[::8, -1] = line[4::8, -1] = False
    for turn, row in enumerate(range(0, height - 4, 4)):
        line[row : row + 5, -1 if turn % 2 == 0 else 0] = True
    line[-1, 0] = line[-1, -1] = True
    return line


def found_strokes(dark: np.ndarray, mpp_um: float, ink: int = 60) -> bool:
    image = np.stack([np.where(dark, ink, 245).astype(np.uint8)] * 3)
    found = strokes.thin_strokes(image, GLASS, dark, mpp_um)
    assert not found.any() or np.array_equal(found, dark)
    return bool(found.any())


def test_pieces_of_a_stroke_are_joined_over_two_pixels_at_low_resolution() -> None:
    """Pieces of 60 µm each: alone too short."""
    for gap, joined in ((1, True), (2, True), (3, False)):
        pieces = np.zeros((9, 20), bool)
        pieces[4, 5:8] = pieces[4, 8 + gap : 11 + gap] = True
        assert found_strokes(pieces, 20.0) == joined, gap


def test_strokes_at_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert np.hypot(33, 44) == 55
    assert found_strokes(np.pad(zigzag(33, 44), 3), 1.0), "a curved stroke of a diagonal of 55 µm"
    line = np.zeros((9, 130), bool)
    line[4, 10:120] = True
    assert found_strokes(line, 1.0) and not found_strokes(np.roll(line, 1) & line, 1.0), "110 µm and 109 µm"
    short = np.zeros((5, 12), bool)
    short[2, 3:8] = True
    assert found_strokes(short, 60.0) and not found_strokes(short, 60.01), "60 µm wide, and wider"
    image = np.stack([np.where(short, 60, 245).astype(np.uint8)] * 3)
    density = density_of(image, GLASS, slice(0, 5)).mean(0)[short]
    assert density.std() == 0
    monkeypatch.setattr(strokes, "_MIN_RIDGE_DENSITY", float(density[0]))
    assert not found_strokes(short, 60.0) and found_strokes(short, 60.0, ink=59)
    monkeypatch.undo()
    monkeypatch.setattr(strokes, "_MAX_RIDGE_VARIATION", 0.0)
    assert not found_strokes(short, 60.0)


def test_walls_are_denser_and_webs_have_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    even = np.full((3, 12, 12), 200, np.uint8)
    assert not fat._thin_and_dense(even, GLASS, slice(0, 12), 8.0, 0.0).any()
    means = {"walls": 0.5, "density": 0.1, "colour": 0.05}
    shape, known = (8, 8), np.zeros((32, 32), bool)
    blocks = [np.full(shape, value, np.float32) for value in (*means.values(), 1.0 - fat._MIN_WEIGHT, 0.0)]
    monkeypatch.setattr(fat, "_block_means", lambda *_: tuple(block.copy() for block in blocks))
    find = lambda: fat.find_fat(even, GLASS, known, 8.0, 0.01).all()  # noqa: E731
    assert find()
    total = f32(1.0 - fat._MIN_WEIGHT) + fat._MIN_WEIGHT
    for name, limit in (("WALL_FRACTION", f32(0.5) / total), ("_COLOUR_TO_DENSITY", f32(0.5))):
        monkeypatch.setattr(fat, name, float(limit))
        assert not find()
        monkeypatch.setattr(fat, name, 0.0)
    blocks[4][:] = 0.5  # half of each block is known: it is no fat of its own, but the webs are
    seen = []
    monkeypatch.setattr(fat, "_with_cells", lambda webs, known_blocks, _: seen.append(known_blocks.all()) or webs)
    assert find() and seen == [True]


def test_stains_at_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    amounts = rng.uniform(0.5, 1.5, (1000, 2))
    amounts[:500, 0] *= 0.2
    light = 240 * np.exp(-amounts @ np.array([[0.65, 0.7, 0.29], [0.25, 0.99, 0.31]]))
    pixels, glass = light.clip(0, 255).astype(np.uint8), np.full(3, 240, np.float32)
    assert (np.log(241 / (pixels + 1.0)) > 0.15).all()
    assert stain.estimate_stains(pixels, glass) is not None and stain.estimate_stains(pixels[:999], glass) is None
    density = np.log((glass[:, None] + 1) / (pixels.T.astype(np.float32) + 1)).min(0)
    monkeypatch.setattr(stain, "MIN_DENSITY", float(density.min()))
    assert stain.estimate_stains(pixels, glass) is None, "one pixel has just this density"
    assert stain._direction(np.array([1.0, -1.0, 0.0])).tolist() == [1.0, 0.0, 0.0]


def colours(red: list[int], green: list[int], blue: list[int]) -> bool:
    return quality.has_unlikely_colours(np.array([red * 25, green * 25, blue * 25], np.uint8))


def test_colours_at_the_limits_of_what_is_likely() -> None:
    plain, wide = [128, 128], [100, 140]
    assert colours(wide, plain, plain) and not quality.has_unlikely_colours(
        np.array([wide * 25, plain * 25, plain * 25], np.uint8)[:, :49]
    )
    assert not colours(wide, [163, 163], plain) and colours(wide, [162, 162], plain), "35 from 128"
    assert not colours(wide, plain, [93, 93]) and colours(wide, plain, [94, 94])
    assert not colours([100, 116], plain, plain) and colours([100, 118], plain, plain), "a spread of 8"
    assert not colours([80, 120], [119, 137], plain) and colours([80, 120], [120, 136], plain), "0.45 of a spread of 20"
    dark, bright = [100, 254, 100, 100], [254, 254, 100, 100]
    assert not colours(dark, [10] * 4, [10] * 4) and colours(bright, [10] * 4, [10] * 4), "a quarter is saturated"
    assert not colours([253, 253, 100, 100], [10] * 4, [10] * 4)
    # A mean of 177 in red, 60 and 61 above that of green.
    assert not colours(bright, [117] * 4, [10] * 4) and colours(bright, [116] * 4, [10] * 4)


def test_stained_pixels_are_above_both_thresholds() -> None:
    limits = (0.012, 0.018)
    p = tissue.TissueParameters(density=(limits[0],) * 2, colour=(limits[1],) * 2)
    levels = [int(np.uint16(limit / tissue._STEP)) for limit in limits]
    density = np.array([[levels[0], levels[0] + 1, levels[0] + 1]], np.uint16)
    colour = np.array([[levels[1] + 1, levels[1], levels[1] + 1]], np.uint16)
    features = tissue._PixelFeatures(density, colour, np.full((1, 3), tissue._COLOURED, np.uint8))
    assert tissue._stained(features, np.zeros((1, 3), bool), p).tolist() == [[False, False, True]]


def test_unscanned_areas_at_their_limits() -> None:
    image = np.full((3, 50, 100), 200, np.uint8)
    image[:, 10, 10:14] = 0
    image[:, 0, 0] = 0  # five of five thousand
    assert (tissue._without_unscanned(image, GLASS)[:, 0, 0] == 245).all()
    for missing, rectangle in ((0, True), (1, False)):  # 20 of 20, and 19: 0.95
        image[:, 20:24, 30:35] = 0
        image[:, 20, 30] = 200 * missing
        assert (tissue._without_unscanned(image, GLASS)[0, 22, 32] == 245) == rectangle
    for side, rectangle in ((2, False), (3, True)):
        image[:] = 200
        image[:, 20 : 20 + side, 30:60] = 0
        assert (tissue._without_unscanned(image, GLASS)[0, 20, 40] == 245) == rectangle


def test_greys_are_not_coloured() -> None:
    image = np.full((3, 4, 4), 245, np.uint8)
    features = tissue._PixelFeatures.of(image, GLASS, 8.0, tissue.TissueParameters())
    assert not features.has(tissue._COLOURED).any(), "glass has neither density nor colour"


@pytest.mark.parametrize(("sigma", "scale"), [(0.0, 1), (0.5**0.5, 16), (1.0, 256), (1.5**0.5, 1)])
def test_two_passes_over_bytes_are_exact(sigma: float, scale: int) -> None:
    plane = np.full((5, 6), 255, np.uint8)
    smoothed, divisor = smoothing.binomial_filter(plane, slice(1, 4), sigma)
    assert divisor == scale and smoothed.dtype == (np.uint16 if scale > 1 else np.float32)
    assert np.array_equal(smoothed, np.full((3, 6), 255 * scale))


def test_a_sample_has_no_more_pixels_than_its_most() -> None:
    for height, width, step in ((1000, 1000, 1), (1000, 1001, 2), (2000, 2000, 2), (2001, 2000, 3)):
        assert stain.StainSample(height, width)._step == step


@pytest.mark.parametrize("order", permutations(range(3)))
def test_stains_do_not_depend_on_which_channel_is_which(order: tuple[int, ...]) -> None:
    """Nor on the signs that the eigenvectors happen to have."""
    rng = np.random.default_rng(1)
    amounts = np.concatenate([rng.uniform(0.6, 1.6, (2000, 1)) * mix for mix in ([1, 0.25], [0.3, 1])])
    light = 241 * np.exp(-amounts @ np.array([[0.65, 0.70, 0.29], [0.17, 0.95, 0.21]])) - 1
    pixels, glass = light.clip(0, 255).round().astype(np.uint8), np.full(3, 240, np.float32)
    plain, turned = (stain.estimate_stains(np.ascontiguousarray(p), glass) for p in (pixels, pixels[:, order]))
    assert plain is not None and turned is not None
    wanted = sorted([[vector[at] for at in order] for vector in (plain.haematoxylin, plain.eosin)])
    assert np.allclose(sorted([list(turned.haematoxylin), list(turned.eosin)]), wanted, atol=2e-3)


def test_a_slide_of_few_levels_is_judged_on_its_last() -> None:
    """At 0.25 µm per pixel, sharpness is that of the third level, if there is one."""
    for count, level in ((1, 0), (2, 1), (3, 2), (4, 2)):
        sizes = [LevelSize(512 >> k, 512 >> k) for k in range(count)]
        survey = quality.QualityAccumulator(sizes, 0.25, tissue.TissueParameters(mpp_um=0.25))
        assert survey._sharp_level == level


def test_pictures_for_stains_have_at_most_2_to_26_pixels(tmp_path: Path) -> None:
    Image.new("1", (8193, 8192)).save(tmp_path / "a.png")
    with pytest.raises(RequestError, match="8193 × 8192 px; give a part of at most 67,108,864 px"):
        stain_reference._picture(tmp_path / "a.png", tmp_path, "key")


def test_what_is_nearly_black_is_scanned() -> None:
    assert quality.has_dark_ground(np.full((3, 2, 2), 1, np.uint8))
    assert not quality.has_dark_ground(np.zeros((3, 2, 2), np.uint8))


@pytest.mark.parametrize("edge", [np.s_[0, 30:45], np.s_[-1, 30:45], np.s_[20:35, 0], np.s_[20:35, -1]], ids=str)
def test_black_lines_along_any_border_are_unscanned_and_others_are_not(edge: tuple[int | slice, int | slice]) -> None:
    image = np.full((3, 50, 100), 200, np.uint8)
    image[:, 10:25, 50] = 0
    image[:, *edge] = 0
    found = tissue._without_unscanned(image, GLASS)
    assert (found[:, *edge] == 245).all() and (found[:, 10:25, 50] == 0).all()
