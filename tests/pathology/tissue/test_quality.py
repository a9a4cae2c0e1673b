from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from data.samples.colours.slide_colours import glass_colour
from data.store.layout import LevelSize
from hyfi_core.plan.box import Box
from pathology.ingest.pyramid import level_sizes
from pathology.readers.resample import halve
from pathology.synthetic.anatomy import SlideSpec, tissue_truth
from pathology.synthetic.artefacts import Artefacts
from pathology.synthetic.placing import make_anatomy
from pathology.synthetic.render import Renderer
from pathology.synthetic.sprites import EOSIN, HAEMATOXYLIN
from pathology.tissue.blur import OUT_OF_FOCUS, BlurMap
from pathology.tissue.density import density_of, row_strips
from pathology.tissue.morphology import closed, dilated, opened
from pathology.tissue.quality import Quality, QualityAccumulator, has_dark_ground, has_unlikely_colours
from pathology.tissue.quality_maps import blur_from_json, blur_to_json, pen_from_json, pen_to_json
from pathology.tissue.stain import StainSample, estimate_stains
from pathology.tissue.tissue import TissueMasks, TissueParameters, find_tissue

SIZE_PX = 2048
SPECS = [
    SlideSpec(seed=7, index=k, case=k, size_px=SIZE_PX, positive=False, mpp_um=1.0, pen=True, blur=True) for k in (0, 3)
]


@cache
def planes(spec: SlideSpec) -> np.ndarray:
    pixels = Renderer(make_anatomy(spec)).read(Box.of_size(SIZE_PX, SIZE_PX))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


@cache
def surveyed(spec: SlideSpec) -> Quality:
    sizes = level_sizes(SIZE_PX, SIZE_PX, 4)
    survey = QualityAccumulator(sizes, 1.0, TissueParameters(pen="mask"))
    block = planes(spec)
    for level in range(4):
        half = block.shape[1] // 2
        survey.add(level, 0, 0, block[:, :half])  # in two blocks, as a pyramid would come
        survey.add(level, half, 0, block[:, half:])
        block = halve(block)
    return survey.result()


def dice(found: np.ndarray, truth: np.ndarray) -> float:
    return float(2 * (found & truth).sum() / (found.sum() + truth.sum()))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"slide{s.index}")
def test_tissue_and_pen_are_where_they_were_drawn(spec: SlideSpec) -> None:
    found = surveyed(spec)
    ink = Artefacts(spec).inked(8.0, spec.mpp_um, SIZE_PX // 8)
    tissue = tissue_truth(make_anatomy(spec), 8.0)
    assert dice(found.masks.tissue, tissue & ~ink) >= 0.95
    assert (found.masks.pen & ink).sum() > 0.85 * ink.sum() and dice(found.masks.pen, ink) > 0.75
    assert found.flags["pen"] and not found.flags["no_tissue"]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"slide{s.index}")
def test_blur_is_where_it_was_drawn(spec: SlideSpec) -> None:
    blur = surveyed(spec).blur
    centres = Artefacts(spec).unsharp(128.0, spec.mpp_um, SIZE_PX // 128)
    inside, outside, core = dilated(centres, 1), ~dilated(centres, 1), ~dilated(~centres, 1)
    assert blur.patches > 60
    assert not blur.blurred[outside].any() and blur.blurred[core & np.isfinite(blur.values)].mean() > 0.9
    assert inside.any() and surveyed(spec).flags["blur"] == (blur.share > 0.08)
    sharp = BlurMap(SIZE_PX, SIZE_PX)
    sharp.add(0, 0, planes(SlideSpec(seed=7, index=0, case=0, size_px=SIZE_PX, positive=False, mpp_um=1.0)))
    assert sharp.share == 0 and sharp.median is not None and sharp.median > 3 * OUT_OF_FOCUS


def test_stains_are_those_that_were_mixed() -> None:
    found = surveyed(SPECS[0]).stains
    assert found is not None
    for vector, dye in ((found.haematoxylin, HAEMATOXYLIN), (found.eosin, EOSIN)):
        true = np.array(dye) / np.linalg.norm(dye)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6) and float(true @ vector) > 0.98
    assert found.strength[0] > 0.5 and found.to_json()["eosin"] == [round(v, 4) for v in found.eosin]


def test_stains_of_two_pure_dyes_are_exact() -> None:
    h, e = np.array([0.65, 0.70, 0.29]), np.array([0.07, 0.99, 0.11])
    rng = np.random.default_rng(0)
    amounts = np.concatenate(
        [rng.uniform(0.6, 1.6, (4000, 1)) * [1, 0.25], rng.uniform(0.6, 1.6, (4000, 1)) * [0.3, 1]]
    )
    light = 240 * np.exp(-amounts @ np.stack([h, e]))
    found = estimate_stains(np.clip(light, 0, 255).round().astype(np.uint8), np.full(3, 239, np.float32))
    assert found is not None
    for vector, made in ((found.haematoxylin, h + 0.25 * e), (found.eosin, 0.3 * h + e)):
        assert float(np.array(vector) @ made) / np.linalg.norm(made) > 0.999
    assert estimate_stains(np.full((5000, 3), 200, np.uint8), np.full(3, 240, np.float32)) is None
    assert estimate_stains(np.full((5000, 3), 90, np.uint8), np.full(3, 240, np.float32)) is None


def test_amounts_of_stains_are_those_of_least_squares() -> None:
    rng = np.random.default_rng(4)
    amounts = rng.uniform(0.5, 1.5, (6000, 2))
    pixels = np.clip(240 * np.exp(-amounts @ np.array([[0.65, 0.7, 0.29], [0.07, 0.99, 0.11]])), 0, 255).astype(
        np.uint8
    )
    found = estimate_stains(pixels, np.full(3, 240, np.float32))
    assert found is not None
    density = np.log(241 / (pixels + 1.0))
    density = density[(density > 0.15).all(1)]
    solved = np.linalg.lstsq(np.stack([found.haematoxylin, found.eosin]).T, density.T, rcond=None)[0]
    assert found.strength == pytest.approx(np.percentile(solved, 99, axis=1), rel=1e-4)


def test_sharpness_is_the_variance_of_the_laplacian_by_that_of_the_pixels() -> None:
    green = np.random.default_rng(5).integers(40, 200, (128, 100), dtype=np.uint8)
    blur = BlurMap(128, 100)
    blur.add(0, 0, np.stack([green] * 3))
    v = green.astype(float)
    laplacian = 4 * v[1:-1, 1:-1] - v[:-2, 1:-1] - v[2:, 1:-1] - v[1:-1, :-2] - v[1:-1, 2:]
    assert blur.values.shape == (1, 1) and blur.values[0, 0] == pytest.approx(laplacian.var() / v.var(), rel=1e-4)


def test_patches_that_are_mostly_tissue_and_without_ink_are_kept() -> None:
    """Four patches of 10 x 10 mask pixels: 40 and 60 of tissue, all, and all with 4 of ink; 2 of ink are no reason."""
    blur = BlurMap(256, 256)
    blur.values[:] = 1.0
    tissue, pen = np.ones((20, 20), bool), np.zeros((20, 20), bool)
    tissue[:10, :6], tissue[:10, 14:18] = False, False
    pen[12, 12:16] = pen[12, :2] = True
    blur.restrict_to(tissue, pen)
    assert np.array_equal(np.isfinite(blur.values), [[False, True], [True, False]])


def test_a_sample_picks_the_same_pixels_from_any_blocks() -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (3, 1100, 1300), dtype=np.uint8)
    samples = [StainSample(1100, 1300) for _ in range(2)]
    samples[0].add(0, 0, image)
    for y, x in np.ndindex(5, 6):
        samples[1].add(y * 256, x * 256, image[:, y * 256 : (y + 1) * 256, x * 256 : (x + 1) * 256])
    assert (
        np.array_equal(samples[0]._pixels, samples[1]._pixels) and (samples[0]._pixels[:, 0, 0] == image[:, 0, 0]).all()
    )
    assert np.array_equal(samples[0]._pixels, image[:, ::2, ::2])


def test_density_in_strips_has_no_seams() -> None:
    rng = np.random.default_rng(1)
    image = rng.integers(90, 250, (3, 1200, 40), dtype=np.uint8)
    glass = glass_colour(image)
    strips = np.concatenate([density_of(image, glass, rows, 2.0) for rows in row_strips(1200, 40 * 200)], axis=1)
    middle = density_of(image[:, 400:800], glass, slice(0, 400), 2.0)
    assert np.abs(strips[:, 420:780] - middle[:, 20:-20]).max() < 1e-5


def test_fat_is_tissue_and_a_veil_is_not() -> None:
    rng = np.random.default_rng(2)
    image = np.full((3, 300, 300), 242.0)
    image[:, 20:110, 20:200] = np.array([190, 110, 160])[:, None, None]  # stroma
    walls = np.zeros((90, 180), bool)
    walls[::11] = walls[:, ::10] = True
    image[:, 110:200, 20:200] -= walls * np.array([18, 40, 22])[:, None, None]  # fat below it
    image[:, 20:200, 215:290] -= np.array([4, 9, 5])[:, None, None]  # a veil of stain
    image[:, 230:232, 10:290] = 150  # a hair
    image = (image + rng.normal(0, 1.5, image.shape)).clip(0, 255).astype(np.uint8)
    found = find_tissue(image, 8.0).tissue
    assert found[120:190, 30:190].mean() > 0.95
    assert found[20:200, 225:290].mean() < 0.02 and found[220:].mean() < 0.01
    without = find_tissue(image, 8.0, TissueParameters(fat=False)).tissue
    assert without[125:190, 30:190].mean() < 0.1 and without[30:100, 30:190].all()


def test_octagons_grow_and_shrink() -> None:
    mask = np.zeros((41, 41), bool)
    mask[20, 20] = True
    y, x = np.mgrid[-20:21, -20:21]
    for radius in (1, 2, 5, 9):
        grown = dilated(mask, radius)
        assert (grown[np.hypot(y, x) <= 0.9 * radius]).all() and not grown[np.hypot(y, x) > 1.19 * radius + 0.5].any()
        assert np.array_equal(grown, grown.T) and np.array_equal(~dilated(~grown, radius), mask)
    blocks = np.zeros((41, 41), bool)
    blocks[10:30, 5:15] = blocks[10:30, 21:35] = True
    assert closed(blocks, 4)[14:26, 5:35].all() and not closed(blocks, 2)[20, 18]
    assert np.array_equal(opened(blocks | mask, 3)[14:26], blocks[14:26]) and not opened(mask, 1).any()
    edge = np.ones((5, 5), bool)
    assert opened(edge, 2).all()


def test_maps_survive_their_json() -> None:
    rng = np.random.default_rng(3)
    blur = BlurMap(700, 500)
    blur.values = rng.uniform(0.01, 1.0, blur.values.shape).astype(np.float32)
    blur.values[0, 0] = np.nan
    values, mpp = blur_from_json(blur_to_json(blur, 1.5))
    assert mpp == 192 and np.isnan(values[0, 0]) and np.nanmax(np.abs(values - blur.values)) <= 0.0026
    assert (
        np.array_equal(values < OUT_OF_FOCUS, blur.values < OUT_OF_FOCUS)
        or np.nanmin(np.abs(blur.values - OUT_OF_FOCUS)) < 0.0026
    )
    pen = np.zeros((37, 50), bool)
    pen[10:13, 20:49] = True
    found, mpp = pen_from_json(pen_to_json(pen, 8.0))
    assert mpp == 32 and found.shape == (10, 13) and found[2, 5:13].all() and found.sum() == 16


def test_small_slides_are_surveyed_too() -> None:
    sizes = (LevelSize(3, 5), LevelSize(2, 3), LevelSize(1, 2), LevelSize(1, 1))
    survey = QualityAccumulator(sizes, 1.0, TissueParameters())
    for level, size in enumerate(sizes):
        survey.add(level, 0, 0, np.full((3, size.height_px, size.width_px), 240, np.uint8))
    found = survey.result()
    assert [flag for flag, applies in found.flags.items() if applies] == ["no_tissue"] and found.stains is None
    assert found.to_json()["sharpness"] is None


def test_the_share_of_blurred_patches_is_of_those_measured() -> None:
    blur = BlurMap(512, 512)
    blur.values[:] = np.nan
    blur.values.flat[:5] = [OUT_OF_FOCUS / 2, OUT_OF_FOCUS * 2, OUT_OF_FOCUS * 2, OUT_OF_FOCUS * 2, np.nan]
    assert (blur.patches, blur.share, blur.median) == (4, 0.25, pytest.approx(OUT_OF_FOCUS * 2))
    blur.values.flat[3] = np.nan
    assert blur.share == 0.0 and blur.median is None, "too few patches to judge a slide by"


def of_two_values(mean: tuple[float, ...], spread: tuple[float, ...], pixels: int = 50) -> np.ndarray:
    """Pixels whose channels have exactly this mean and standard deviation."""
    signs = np.where(np.arange(pixels) % 2, 1, -1)
    return np.array(mean)[:, None] + np.array(spread)[:, None] * signs


@pytest.mark.parametrize(
    ("mean", "spread", "unlikely"),
    [
        ((150, 128, 128), (20, 8, 8), True),
        ((150, 128, 128), (20, 9.5, 3), False),  # green varies nearly half as much as red
        ((150, 128, 128), (20, 3, 9.5), False),
        ((150, 128, 128), (8.5, 3, 3), True),
        ((150, 128, 128), (7.5, 3, 3), False),  # nothing varies
        ((150, 162, 94), (20, 8, 8), True),
        ((150, 164, 128), (20, 8, 8), False),  # not near 128
        ((150, 128, 92), (20, 8, 8), False),
    ],
)
def test_colours_are_unlikely_if_green_and_blue_are_chroma(
    mean: tuple[float, ...], spread: tuple[float, ...], unlikely: bool
) -> None:
    assert has_unlikely_colours(of_two_values(mean, spread)) == unlikely
    assert not has_unlikely_colours(of_two_values(mean, spread)[:, :48]), "too few pixels"


@pytest.mark.parametrize(
    ("share", "red", "green", "unlikely"),
    [
        (0.26, 254, 150, True),
        (0.24, 255, 150, False),
        (0.26, 253, 150, False),
        (1.0, 255, 194, True),
        (1.0, 255, 196, False),
    ],
)
def test_colours_are_unlikely_if_red_is_saturated(share: float, red: int, green: int, unlikely: bool) -> None:
    tissue = np.full((3, 100), green, np.uint8)
    tissue[1:] += np.where(np.arange(100) % 2, 20, 236).astype(np.uint8)  # ± 20
    tissue[0] = 220
    tissue[0, : round(100 * share)] = red
    assert has_unlikely_colours(tissue) == unlikely


def test_ground_is_dark_if_half_of_what_is_not_black_is() -> None:
    overview = np.zeros((3, 10, 10), np.uint8)
    assert not has_dark_ground(overview), "nothing is scanned"
    overview[1, 5:] = 63
    assert has_dark_ground(overview)
    overview[2, 5:] = 64
    assert not has_dark_ground(overview)


def test_flags_are_raised_above_their_shares_not_at_them() -> None:
    blur = BlurMap(1280, 1280)
    blur.values[:] = 1.0
    pen, tissue = np.zeros((50, 50), bool), np.ones((50, 50), bool)
    overview = np.full((3, 50, 50), 200, np.uint8)
    for blurred, inked, black in ((8, 5, 25), (9, 6, 26)):
        blur.values.flat[:blurred] = 0.0
        pen.flat[:inked] = True
        overview.reshape(3, -1)[:, :black] = 0
        flags = Quality(overview, TissueMasks(tissue, pen), 8.0, blur, 1.0, None).flags
        assert (flags["blur"], flags["pen"], flags["black"]) == (blurred > 8, inked > 5, black > 25)


def test_what_is_dark_in_two_channels_is_not_black() -> None:
    overview = np.full((3, 50, 50), 200, np.uint8)
    overview[:2, :25] = 0
    masks = TissueMasks(np.ones((50, 50), bool), np.zeros((50, 50), bool))
    assert not Quality(overview, masks, 8.0, BlurMap(1280, 1280), 1.0, None).flags["black"]
