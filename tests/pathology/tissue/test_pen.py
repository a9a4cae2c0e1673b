"""Pen marks are ink; blue and brown tissue is not. Fat is fat whatever the stain."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from pathology.readers.resample import halve, make_taps, resample, target_size
from pathology.tissue.density import glass_colour
from pathology.tissue.pen import without_texture
from pathology.tissue.tissue import TissueMasks, TissueParameters, find_tissue
from tests.pathology.tissue.drawn_slides import PENS, Drawn, draw

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


def test_ink_is_smooth_and_nuclei_are_not() -> None:
    slide = drawn("ihc", "blue")
    image = overview(slide)
    even = without_texture(image, glass_colour(image), slice(0, image.shape[1]), 8.0)
    assert even[at_8_um(slide.ink)].mean() > 0.5
    assert even[at_8_um(slide.follicles)].mean() < 0.05
