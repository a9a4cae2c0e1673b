"""Colours become those of the reference, pixel by pixel; white stays white, and what cannot be measured is named."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.samples.augment import Augment
from data.samples.colours import macenko, reinhard
from data.samples.colours.reinhard import LabStatistics, ReinhardMap
from data.samples.colours.slide_colours import glass_of, stains_of, tissue_windows
from data.samples.colours.stain_normalisation import ColourMap, StainNormalisation, as_scanned_text
from data.samples.dataset import SlideDataset, SlideRef
from data.store.slide_store import StoreLevel
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box

GLASS = np.array([243, 240, 245])
OWN = {"haematoxylin": [0.70, 0.60, 0.387], "eosin": [0.17, 0.86, 0.481], "strength": [1.5, 0.8]}


@dataclass
class DrawnSlide:
    """A slide in memory: haematoxylin and eosin in random amounts, on glass; one level of 1 µm per pixel."""

    stains: dict[str, list[float]] | None = field(default_factory=lambda: OWN)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.amounts = np.zeros((2, 512, 640))
        self.amounts[:, 64:464, 64:576] = rng.uniform(0.1, 1.0, (2, 400, 512))
        vectors = np.array([OWN["haematoxylin"], OWN["eosin"]]).T
        light = (GLASS[:, None, None] + 1) * np.exp(-np.einsum("cs,syx->cyx", vectors, self.amounts)) - 1
        self.pixels = np.rint(np.clip(light, 0, 255)).astype(np.uint8)
        self.attributes = {"stains": self.stains}
        self.levels = (StoreLevel(512, 640, (1.0, 1.0), "0"),)

    def read(self, box, level=0, threads=1, out=None):
        out = np.empty((3, *box.shape), np.uint8) if out is None else out
        out[...] = self.pixels[(slice(None), *box.slices())]
        return out

    def tissue(self, mpp_um=None):
        return (self.amounts[0] > 0)[::8, ::8], (8.0, 8.0)


def map_of(method: str, slide: DrawnSlide) -> ColourMap:
    normalisation = StainNormalisation.of(method)  # type: ignore[arg-type]
    assert normalisation is not None
    colours = normalisation.of_slide(slide, "s")
    assert colours is not None
    return colours


@pytest.fixture(scope="module", params=["macenko", "reinhard"])
def colours(request: pytest.FixtureRequest) -> ColourMap:
    return map_of(request.param, DrawnSlide())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 230), st.integers(1, 230))
def test_any_box_is_a_slice_of_the_whole(colours: ColourMap, y0: int, x0: int, height: int, width: int) -> None:
    image = np.random.default_rng(1).integers(0, 256, (3, 230, 230), dtype=np.uint8)
    part = (slice(None), slice(y0, y0 + height), slice(x0, x0 + width))
    assert np.array_equal(colours(image[part]), colours(image)[part])


def test_glass_and_what_is_brighter_are_white(colours: ColourMap) -> None:
    bright = np.stack(np.meshgrid(*(range(value, 256) for value in GLASS), indexing="ij")).astype(np.uint8)
    before = bright.copy()
    assert (colours(bright) == 255).all() and np.array_equal(bright, before)


def test_amounts_of_macenko_are_those_of_least_squares_in_the_references_stains() -> None:
    slide = DrawnSlide()
    tissue = slide.pixels[:, 64:464, 64:576].reshape(3, -1)
    density = np.log((glass_of(slide)[:, None].astype(np.float64) + 1) / (tissue + 1.0))
    own, aim = (np.array([one["haematoxylin"], one["eosin"]]).T for one in (OWN, macenko.REFERENCE))
    amounts = np.linalg.lstsq(own, density, rcond=None)[0]
    amounts *= (np.array(macenko.REFERENCE["strength"]) / np.array(OWN["strength"]))[:, None]
    expected = np.clip(256 * np.exp(-aim @ amounts) - 1, 0, 255)
    off = np.abs(map_of("macenko", slide)(tissue) - expected)
    assert off.max() < 0.7  # rounding, and steps of the tables


def test_statistics_of_reinhard_become_the_references() -> None:
    slide = DrawnSlide()
    glass = glass_of(slide)
    assert np.abs(glass - GLASS).max() <= 2
    own = LabStatistics.of(tissue_windows(slide), glass)
    assert own is not None
    tissue = slide.pixels[:, 64:464, 64:576].reshape(3, -1)
    all_tissue = LabStatistics.of([tissue], glass)
    assert all_tissue is not None and own.mean == pytest.approx(all_tissue.mean, abs=0.01)
    aim = {"mean": [own.mean[0] - 0.2, own.mean[1] + 0.03, own.mean[2] - 0.01], "std": [0.8 * s for s in own.std]}
    mapped = LabStatistics.of([ReinhardMap.of(all_tissue, glass, aim)(tissue)], glass)
    assert mapped is not None
    assert mapped.mean == pytest.approx(aim["mean"], abs=0.01) and mapped.std == pytest.approx(aim["std"], rel=0.03)
    assert all(abs(a - b) > 0.005 for a, b in zip(mapped.mean, all_tissue.mean, strict=True))


def test_a_checkpoint_has_method_and_reference(colours: ColourMap) -> None:
    for method, reference in (("macenko", macenko.REFERENCE), ("reinhard", reinhard.REFERENCE)):
        normalisation = StainNormalisation.of(method)  # type: ignore[arg-type]
        assert normalisation is not None
        saved = normalisation.to_json()
        assert saved["reference"]["mean" if method == "reinhard" else "eosin"] in map(list, reference.values())
        assert StainNormalisation.from_json(saved) == normalisation
        with pytest.raises(RequestError, match="needed: "):
            StainNormalisation.from_json({**saved, "reference": {"mean": [0.0]}})
    assert StainNormalisation.of("none") is None and StainNormalisation.from_json(None) is None
    with pytest.raises(RequestError, match="'vahadane'; known are macenko, reinhard"):
        StainNormalisation.from_json({"method": "vahadane", "reference": {}})


def test_images_are_normalised_before_augmentation_in_any_boxes() -> None:
    slide = DrawnSlide()

    def images(augment: Augment | None = None, stain: StainNormalisation | None = None) -> SlideDataset:
        options = {"size_px": 512, "mpp": 1.0, "align_px": 32, "opener": lambda path: slide}
        return SlideDataset(".", [SlideRef("s")], augment=augment, stain=stain, **options)

    box, augment, stain = Box.of_size(512, 512), Augment(), StainNormalisation.of("macenko")
    plain, own = images().read(0, box), images(augment, stain)
    variation = own.variation(0, 3)
    assert variation is not None
    expected = variation.apply(map_of("macenko", slide)(plain))
    assert np.array_equal(own.read(0, box, 3), expected) and not np.array_equal(expected, variation.apply(plain))
    part = Box(100, 333, 47, 401)
    assert np.array_equal(own.read(0, part, 3), expected[(slice(None), *part.slices())])


def test_slides_that_cannot_be_measured_are_named_and_stay_as_they_are() -> None:
    alike = {**OWN, "eosin": [0.72, 0.58, 0.38]}  # 2° from haematoxylin
    slides = {"s": DrawnSlide(), "one-stain": DrawnSlide(stains=alike), "none": DrawnSlide(stains=None)}
    options = {"size_px": 512, "mpp": 1.0, "align_px": 32, "opener": lambda path: slides[path.stem]}
    refs = [SlideRef(name) for name in slides]
    images = SlideDataset(".", refs, stain=StainNormalisation.of("reinhard"), **options)
    box = Box.of_size(512, 512)
    assert images.as_scanned() == ["one-stain", "none"] and images.colour_map(1) is None
    assert np.array_equal(images.read(1, box), SlideDataset(".", refs, **options).read(1, box))
    assert not np.array_equal(images.read(0, box), images.read(1, box))
    assert "could not be measured (too little tissue, or one stain only): one-stain;" in as_scanned_text(["one-stain"])
    assert "a, b, c, d, e and 2 more" in as_scanned_text([*"abcdefg"])
    assert SlideDataset(".", refs, **options).as_scanned() == []
    pale = DrawnSlide()
    pale.pixels[...] = 240
    assert images.stain is not None
    with pytest.raises(RequestError, match="slide t has too little stained tissue"):
        images.stain.of_slide(pale, "t")


class MaskedSlide(DrawnSlide):
    """A slide of this tissue; ``boxes`` are those that were read."""

    def __init__(self, mask: np.ndarray, mask_mpp: float) -> None:
        super().__init__()
        self.mask, self.mask_mpp = mask, mask_mpp
        self.boxes: list[Box] = []

    def read(self, box: Box, level: int = 0) -> np.ndarray:
        self.boxes.append(box)
        return self.pixels[(slice(None), *box.slices())]

    def tissue(self, mpp_um: float | None = None) -> tuple[np.ndarray, tuple[float, float]]:
        return self.mask, (self.mask_mpp, self.mask_mpp)


def test_windows_are_around_tissue_and_read_its_pixels_alone() -> None:
    mask = np.zeros((64, 80), bool)
    mask[40, 20] = mask[2, 79] = True
    slide = MaskedSlide(mask, 8.0)
    at_the_corner, inside = tissue_windows(slide)
    assert slide.boxes == [Box(0, 80, 568, 640), Box(256, 384, 96, 224)]
    assert np.array_equal(at_the_corner, slide.pixels[:, 16:24, 632:640].reshape(3, -1))
    assert np.array_equal(inside, slide.pixels[:, 320:328, 160:168].reshape(3, -1))


def test_a_pixel_is_tissue_if_its_centre_is() -> None:
    """Row 1 of a mask of 2.5 µm is that from 2.5 to 5 µm: the centre of pixel 2 is in it, its corner is not."""
    mask = np.zeros((205, 256), bool)
    mask[1, 2] = True
    (inside,) = tissue_windows(MaskedSlide(mask, 2.5))
    assert np.array_equal(inside, MaskedSlide(mask, 2.5).pixels[:, 2:5, 5:7].reshape(3, -1))


def test_the_axes_of_reinhard_are_orthonormal_and_those_of_the_paper() -> None:
    axes = reinhard._TO_AXES
    assert np.allclose(axes @ axes.T, np.eye(3)) and np.allclose(axes[0], 3**-0.5)
    assert axes[1] @ [1, 1, -2] == pytest.approx(6**0.5) and axes[2] @ [1, -1, 0] == pytest.approx(2**0.5)
    assert LabStatistics.of([], np.full(3, 240, np.float32)) is None


def test_a_slide_has_two_stains_if_both_have_a_strength() -> None:
    assert stains_of(DrawnSlide()) == OWN
    for strength in ([0.0, 0.8], [1.5, 0.0], [-1.0, 0.8]):
        assert stains_of(DrawnSlide(stains={**OWN, "strength": strength})) is None


def test_the_glass_of_a_large_level_is_measured_in_strips_spread_over_its_height(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("data.samples.colours.slide_colours._OVERVIEW_PX", 32 * 4 * 640)
    slide, read = DrawnSlide(), list[Box]()
    monkeypatch.setattr(slide, "read", lambda box, level: read.append(box) or np.full((3, *box.shape), 241, np.uint8))
    assert np.abs(glass_of(slide) - 241).max() <= 2
    assert read == [Box(16 * k + 8, 16 * k + 12, 0, 640) for k in range(32)]


def test_densities_are_means_of_the_channels_relative_to_glass() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 500), dtype=np.uint8)
    glass = np.array([243, 200, 255], np.float32)
    channels = np.log((glass[:, None] + 1.0) / (pixels + 1.0))
    assert np.allclose(reinhard._densities(pixels, glass), np.maximum(channels, 0).mean(axis=0), atol=1e-6)
