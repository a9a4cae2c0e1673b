"""The tissue search in strips, runs and 16 bits finds what the plain one finds."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage
from skimage.filters import gaussian
from skimage.measure import label
from skimage.morphology import remove_small_holes, remove_small_objects
from skimage.segmentation import clear_border

from data import components
from data.samples.colours import slide_colours
from hyfi_core.plan.box import Box
from pathology.ingest.level_reader import LevelReader, choose_level
from pathology.readers.sources import open_source
from pathology.tissue import density, morphology, smoothing
from pathology.tissue.tissue import TissueParameters, find_tissue
from tests.pathology.tissue import plain_tissue


def scene(rng: np.random.Generator, height: int, width: int, pen: bool, fat: bool) -> np.ndarray:
    """Return a slide ``(3, h, w)`` with pieces of tissue, marks of three pens, and a web of walls."""
    y, x = np.mgrid[:height, :width]
    tissue = np.zeros((height, width), bool)
    for _ in range(4):
        (cy, cx), (ry, rx) = rng.uniform(0, (height, width)), rng.uniform(0.05, 0.25, 2) * (height, width)
        tissue |= ((y - cy) / ry) ** 2 + ((x - cx) / rx) ** 2 < 1
    stain = np.array([0.10, 0.28, 0.12])[:, None, None] * rng.uniform(0.1, 1.6, (height, width))
    image = np.array([242, 240, 241])[:, None, None] * np.where(tissue, 10.0**-stain, 1)
    if fat:
        walls = ((y % 11 == 0) | (x % 10 == 0)) & (x < width // 2)
        image -= walls * np.array([18, 40, 22])[:, None, None]
    for ink in ((40, 60, 170), (25, 25, 28), (200, 30, 40)) if pen else ():
        top, left = rng.integers(0, height - 30), rng.integers(0, width - 60)
        image[:, top : top + 12, left : left + 50] = np.array(ink)[:, None, None]
    return (image + rng.normal(0, 1.5, image.shape)).clip(0, 255).astype(np.uint8)


def dice(a: np.ndarray, b: np.ndarray) -> float:
    return 1.0 if not (a | b).any() else float(2 * (a & b).sum() / (a.sum() + b.sum()))


@pytest.mark.parametrize("number", range(8))
def test_the_masks_of_drawn_slides_are_those_of_the_plain_search(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(density, "_STRIP_PX", 4000)
    monkeypatch.setattr(morphology, "_BAND_BYTES", 4000)
    monkeypatch.setattr(components, "_BAND_PX", 4000)
    monkeypatch.setattr(components, "_PAINTED_PX", 900)
    rng = np.random.default_rng(number)
    image = scene(rng, *rng.integers(70, 360, 2), pen=number % 2 == 1, fat=number % 3 != 2)
    mpp_um = (8.0, 7.3, 4.1, 12.0, 20.0, 8.0, 8.0, 5.0)[number]
    p = TissueParameters(pen="mask" if number < 5 else "flag")
    found, expected = find_tissue(image, mpp_um, p), plain_tissue.find_tissue(image, mpp_um, p)
    assert expected.tissue.any() and expected.pen.any() == (number % 2 == 1)
    # A pixel may lie on the threshold itself.
    assert dice(found.tissue, expected.tissue) > 0.9995 and dice(found.pen, expected.pen) > 0.9995


@pytest.mark.slides
@pytest.mark.parametrize("name", ["atlas_breast-lobular_HE_10x.svs", "CMU-1-Small-Region.svs"])
def test_the_mask_of_a_real_slide_is_that_of_the_plain_search(name: str, real_slides: Path) -> None:
    with closing(open_source(real_slides / name)) as slide:
        assert slide.mpp is not None
        choice = choose_level(slide, slide.mpp, 16.0)
        pixels = LevelReader(slide, choice, 0).read(Box.of_size(choice.height_px, choice.width_px))
    found, expected = find_tissue(pixels, 16.0), plain_tissue.find_tissue(pixels, 16.0)
    assert expected.tissue.any()
    assert dice(found.tissue, expected.tissue) > 0.9995 and dice(found.pen, expected.pen) > 0.9995


def test_pieces_are_those_of_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "_BAND_PX", 300)
    monkeypatch.setattr(components, "_PAINTED_PX", 50)
    rng = np.random.default_rng(0)
    for height, width in ((1, 1), (1, 40), (40, 1), (37, 53), (64, 64)):
        for share in (0, 0.1, 0.4, 0.6, 0.9, 1):
            mask = rng.random((height, width)) < share
            for corners, largest in ((False, 3), (True, 12)):
                expected = remove_small_objects(mask, max_size=largest, connectivity=2 if corners else 1)
                assert np.array_equal(components.without_small(mask, largest, corners), expected)
            filled = mask.copy()
            components.fill_small_holes(filled, 6)
            assert np.array_equal(filled, mask | clear_border(remove_small_holes(mask, max_size=6) & ~mask))
            seeds = mask & (rng.random(mask.shape) < 0.05)
            labels = label(mask)
            assert np.array_equal(components.joined_to(seeds, mask), np.isin(labels, np.unique(labels[seeds])) & mask)


def test_masks_grow_and_shrink_in_bands_as_they_do_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(morphology, "_BAND_BYTES", 200)
    rng = np.random.default_rng(1)
    for height, width, radius in ((1, 1, 1), (50, 30, 1), (90, 40, 3), (61, 20, 5)):
        mask = ndimage.binary_dilation(rng.random((height, width)) < 0.05)
        mask[: height // 3] = False
        inside = ~plain_tissue.dilated(~mask, radius)
        assert np.array_equal(morphology.dilated(mask, radius), plain_tissue.dilated(mask, radius))
        assert np.array_equal(morphology.opened(mask, radius), plain_tissue.dilated(inside, radius))
        assert np.array_equal(morphology.closed(mask, radius), plain_tissue.closed(mask, radius))
        for share in (0.01, 0.03, 0.1, 0.9):  # pixels so far apart that just the whole halo joins them
            sparse = rng.random((height, width)) < share
            inside = ~plain_tissue.dilated(~sparse, radius)
            assert np.array_equal(morphology.dilated(sparse, radius), plain_tissue.dilated(sparse, radius))
            assert np.array_equal(morphology.opened(sparse, radius), plain_tissue.dilated(inside, radius))
            assert np.array_equal(morphology.closed(sparse, radius), plain_tissue.closed(sparse, radius))


@pytest.mark.parametrize("sigma", [0, 0.4, 0.6, 1.0, 1.4, 2.7])
def test_smoothing_in_strips_is_a_convolution_with_a_bell_as_wide_as_a_gaussian(sigma: float) -> None:
    rng = np.random.default_rng(2)
    pairs = smoothing.passes_for(sigma)
    assert abs(pairs / 2 - sigma**2) <= 0.25
    for plane in (rng.integers(0, 256, (70, 9), dtype=np.uint8), rng.random((70, 9), dtype=np.float32)):
        strips = [smoothing.binomial_filter(plane, slice(a, b), sigma) for a, b in ((0, 3), (3, 70))]
        rows = np.concatenate([sums / weight for sums, weight in strips])
        exact = plane.dtype == np.uint8 and pairs <= 2
        assert np.abs(rows - plain_tissue.smoothed(plane, sigma)).max() <= (0 if exact else 1e-4)
    near = gaussian(plane.astype(np.float64), np.sqrt(pairs / 2), mode="nearest", preserve_range=True)
    assert np.abs(rows - near).max() < 0.07


def test_the_glass_of_a_large_picture_is_counted_on_some_of_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    image = rng.integers(190, 250, (3, 90, 20), dtype=np.uint8)
    assert np.array_equal(slide_colours.glass_colour(image), plain_tissue.glass_colour(image))
    monkeypatch.setattr(slide_colours, "_HISTOGRAM_PX", 600)
    assert np.array_equal(slide_colours.glass_colour(image), plain_tissue.glass_colour(image[:, ::3]))
