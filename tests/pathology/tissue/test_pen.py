"""Pen marks are ink; blue and brown tissue is not. Fat is fat whatever the stain."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from scipy import ndimage

from data.samples.colours.slide_colours import glass_colour
from hyfi_core.plan.box import Box
from pathology.readers.resample import halve, make_taps, resample, target_size
from pathology.synthetic.anatomy import SlideSpec
from pathology.synthetic.artefacts import Artefacts
from pathology.synthetic.placing import make_anatomy
from pathology.synthetic.render import Renderer
from pathology.tissue.density import density_of
from pathology.tissue.morphology import dilated
from pathology.tissue.pen import without_texture
from pathology.tissue.quality import PEN_SHARE
from pathology.tissue.tissue import TissueMasks, TissueParameters, find_tissue
from tests.pathology.tissue.drawn_slides import BLUE_HAEMATOXYLIN, GLASS, HAEMATOXYLIN, PENS, Drawn, draw

STAINS = ("he", "ihc", "negative")
MASK = TissueParameters(pen="mask")


@cache
def drawn(stain: str, pen: str | None = None) -> Drawn:
    return draw(stain, pen=pen)


def overview(slide: Drawn) -> np.ndarray:
    return halve(halve(halve(slide.image)))


def at_8_um(mask: np.ndarray) -> np.ndarray:
    return mask[4::8, 4::8]


def dice(a: np.ndarray, b: np.ndarray) -> float:
    return float(2 * (a & b).sum() / (a.sum() + b.sum()))


def found(stain: str, pen: str | None, parameters: TissueParameters) -> TissueMasks:
    return find_tissue(overview(drawn(stain, pen)), 8.0, parameters)


@pytest.mark.parametrize("stain", STAINS)
def test_tissue_without_ink_is_all_found_and_none_of_it_is_pen(stain: str) -> None:
    slide, masks = drawn(stain), found(stain, None, MASK)
    assert not masks.pen.any()
    assert dice(masks.tissue, at_8_um(slide.tissue)) > 0.98
    assert masks.tissue[at_8_um(slide.follicles)].all() and masks.tissue[at_8_um(slide.fat)].mean() > 0.93


@pytest.mark.parametrize(("stain", "pen"), [("he", pen) for pen in PENS] + [("ihc", "blue"), ("ihc", "red")])
def test_pen_is_found_flagged_and_masked_only_where_asked(stain: str, pen: str) -> None:
    slide = drawn(stain, pen)
    ink, tissue = at_8_um(slide.ink), at_8_um(slide.tissue)
    masked, flagged, ignored = (found(stain, pen, TissueParameters(pen=mode)) for mode in ("mask", "flag", "off"))
    on_glass = ink & ~tissue
    assert masked.pen[on_glass].mean() > 0.95 and (masked.pen & tissue & ~ink).sum() < 0.02 * tissue.sum()
    assert dice(masked.tissue, tissue & ~ink) > 0.97 and not (masked.tissue & masked.pen).any()
    assert np.array_equal(flagged.pen, masked.pen) and np.array_equal(flagged.tissue, ignored.tissue)
    assert flagged.tissue[tissue & ~ink].mean() > 0.97 and not ignored.pen.any()


@pytest.mark.parametrize("stain", STAINS)
def test_the_area_of_tissue_is_the_same_at_any_resolution(stain: str) -> None:
    slide = drawn(stain)
    areas = []
    for mpp_um in (5.7, 7.0, 8.0, 9.3, 11.3):
        taps = make_taps(0, target_size(1280, mpp_um), mpp_um, 1280)
        pixels = resample(slide.image[:, taps.first : taps.end, taps.first : taps.end], taps, taps)
        areas.append(float(find_tissue(pixels, mpp_um).tissue.sum()) * mpp_um**2 / 1e6)
    assert all(abs(area / areas[2] - 1) < 0.02 for area in areas), areas


def block_means(image: np.ndarray, side_px: int) -> np.ndarray:
    n = image.shape[0] // side_px
    small = image.reshape(n, side_px, n, side_px, 3).mean((1, 3)).round().astype(np.uint8)
    return np.ascontiguousarray(small.transpose(2, 0, 1))


def test_thin_strokes_of_a_rendered_slide_are_pen() -> None:
    spec = SlideSpec(seed=1, index=1, case=1, size_px=2048, positive=False, pen=True)  # 1 mm, with a stroke of 23 µm
    ink = Artefacts(spec).inked(8.0, 0.5, 128)
    image = block_means(Renderer(make_anatomy(spec)).read(Box.of_size(2048, 2048)), 16)
    assert_thin_pen(image, ink, 0.6)


@pytest.mark.parametrize("index", [1, 3, 6])  # blue, black, green
@pytest.mark.parametrize("mpp_um", [0.5, 1.0, 2.0])
def test_short_strokes_of_a_small_slide_are_pen_whatever_the_stores_resolution(index: int, mpp_um: float) -> None:
    spec = SlideSpec(seed=0, index=index, case=index, size_px=1024, positive=False, pen=True)  # 0.5 mm: 150 to 250 µm
    stored = block_means(small_slide(index), round(mpp_um / 0.5))
    image = block_means(np.ascontiguousarray(stored.transpose(1, 2, 0)), round(8 / mpp_um))
    marks, ink = find_tissue(image, 8.0).pen, Artefacts(spec).inked(8.0, 0.5, 64)
    assert marks[ink].mean() > 0.35 and marks.mean() > PEN_SHARE
    assert (marks & ~dilated(ink, 3)).sum() < 0.1 * ink.sum()


@cache
def small_slide(index: int) -> np.ndarray:
    spec = SlideSpec(seed=0, index=index, case=index, size_px=1024, positive=False, pen=True)
    return Renderer(make_anatomy(spec)).read(Box.of_size(1024, 1024))


@pytest.mark.parametrize("pen", PENS)
@pytest.mark.parametrize("width_um", [20.0, 40.0])
def test_thin_strokes_are_pen(pen: str, width_um: float) -> None:
    inside = line(width_um)
    through = np.array(PENS[pen])[:, None, None] / 245
    image = GLASS[:, None, None] * np.where(inside, through, 1)
    image += np.random.default_rng(0).normal(0, 1.5, image.shape)
    assert_thin_pen(block_means(image.clip(0, 255).astype(np.uint8).transpose(1, 2, 0), 8), inside[4::8, 4::8], 0.7)


def assert_thin_pen(image: np.ndarray, ink: np.ndarray, recall: float) -> None:
    marks = find_tissue(image, 8.0).pen
    assert marks[ink].mean() > recall and marks.mean() > PEN_SHARE
    assert (marks & ~dilated(ink, 3)).sum() < 0.05 * ink.sum()
    assert not (find_tissue(image, 8.0, MASK).tissue & marks).any()
    assert not find_tissue(image, 8.0, TissueParameters(pen="off")).pen.any()


def line(width_um: float, length_um: int = 900) -> np.ndarray:
    """Return a curved line at 1 µm per pixel."""
    y, x = np.mgrid[:1024, :1024].astype(np.float32)
    curve = np.abs(y - 512 - 60 * np.sin(x / 150))
    found: np.ndarray = (curve < width_um / 2) & (np.abs(x - 512) < length_um / 2)
    return found


def strand(stain: str, width_um: float, seed: int = 0, length_um: int = 900) -> np.ndarray:
    """Return glass at 8 µm per pixel with a strand of tissue, as of an epithelium: dense, blue or purple."""
    rng = np.random.default_rng(seed)
    inside = line(width_um, length_um)
    spots = ndimage.gaussian_filter((rng.random((1024, 1024)) < 0.012 * inside).astype(np.float32), 2.5) * 40
    dye = HAEMATOXYLIN if stain == "he" else BLUE_HAEMATOXYLIN
    light = np.minimum(spots, 1.3) * 1.1 * dye[:, None, None] + 0.1 * inside * dye[:, None, None]
    image = GLASS[:, None, None] * np.exp(-light) + rng.normal(0, 1.5, (3, 1024, 1024))
    return block_means(image.clip(0, 255).astype(np.uint8).transpose(1, 2, 0), 8)


@pytest.mark.parametrize("stain", ["he", "negative"])
@pytest.mark.parametrize("width_um", [20.0, 35.0, 60.0])
@pytest.mark.parametrize("length_um", [140, 900])
def test_strands_of_tissue_are_not_pen(stain: str, width_um: float, length_um: int) -> None:
    for seed in range(3):
        assert not find_tissue(strand(stain, width_um, seed, length_um), 8.0).pen.any()


def test_ink_is_smooth_and_nuclei_are_not() -> None:
    slide = drawn("ihc", "blue")
    image = overview(slide)
    even = without_texture(image, glass_colour(image), slice(0, image.shape[1]), 8.0)
    assert even[at_8_um(slide.ink)].mean() > 0.5
    assert even[at_8_um(slide.follicles)].mean() < 0.05


@pytest.mark.parametrize(("mpp_um", "half"), [(32.0, 1), (8.0, 1), (4.0, 3), (2.2, 5)])
def test_texture_is_measured_in_windows_of_24_um(mpp_um: float, half: int) -> None:
    rng = np.random.default_rng(3)
    image = np.kron(rng.integers(110, 170, (3, 6, 7)), np.ones((1, half + 1, half + 1))).astype(np.uint8)
    glass = np.array([240.0, 240.0, 240.0], np.float32)
    rows = slice(0, image.shape[1])
    density = density_of(image, glass, rows).mean(0)
    windows = np.lib.stride_tricks.sliding_window_view(density, (2 * half + 1, 2 * half + 1))
    variation = windows.std((2, 3)) / windows.mean((2, 3))
    clear = np.abs(variation - 0.08) > 1e-4
    assert np.unique(variation < 0.08).size == 2
    found = without_texture(image, glass, rows, mpp_um)[half:-half, half:-half]
    assert np.array_equal(found[clear], (variation < 0.08)[clear])
