"""Levels, sizes and names of what is measured of a slide, by their formulas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.store.layout import LevelSize
from hyfi_core.plan.box import Box
from pathology.tissue import given, stain
from pathology.tissue.blur import PATCH_PX, BlurMap
from pathology.tissue.outlines import SlideGrid
from pathology.tissue.quality import Quality, QualityAccumulator, mask_level
from pathology.tissue.quality_maps import blur_from_json, blur_to_json
from pathology.tissue.stain import StainSample, estimate_stains
from pathology.tissue.tissue import TissueMasks, TissueParameters


@pytest.mark.parametrize(
    ("mpp_um", "mask", "sharp"), [(0.25, 5, 2), (0.5, 4, 1), (1.0, 3, 0), (3.0, 1, 0), (8.0, 0, 0), (20.0, 0, 0)]
)
def test_masks_and_blur_are_measured_at_the_nearest_levels(mpp_um: float, mask: int, sharp: int) -> None:
    sizes = [LevelSize(-(-1000 // 2**k), -(-700 // 2**k)) for k in range(6)]
    survey = QualityAccumulator(sizes, mpp_um, TissueParameters())
    assert (mask_level(mpp_um, TissueParameters()), survey.mask_level) == (mask, mask)
    noise = np.random.default_rng(0).integers(60, 200, (3, 1000, 700), dtype=np.uint8)
    for level, size in enumerate(sizes):
        survey.add(level, 0, 0, noise[:, : size.height_px, : size.width_px])
    everywhere = np.ones((sizes[mask].height_px, sizes[mask].width_px), bool)
    found = survey.result(TissueMasks(everywhere, ~everywhere))
    assert (found.mpp_um, found.blur_mpp_um) == (mpp_um * 2**mask, mpp_um * 2**sharp)
    assert found.overview.shape[1:] == everywhere.shape
    assert found.blur.values.shape == (-(-sizes[sharp].height_px // PATCH_PX), -(-sizes[sharp].width_px // PATCH_PX))


def test_measures_as_json() -> None:
    tissue, pen = np.zeros((40, 50), bool), np.zeros((40, 50), bool)
    tissue[:10], pen[0, :8] = True, True
    blur = BlurMap(256, 384)
    blur.values[:] = [[0.05, 0.5, 0.7], [0.9, np.nan, 0.05]]
    found = Quality(np.zeros((3, 40, 50), np.uint8), TissueMasks(tissue, pen), 8.0, blur, 1.0, None).to_json()
    assert found["tissue"] == {"fraction": 0.25, "mpp": 8.0, "area_mm2": 0.032, "pen_fraction": 0.004}
    assert (found["sharpness"], found["blurred_share"], found["patches"]) == (pytest.approx(0.5), 0.4, 5)
    assert found["stains"] is None


def test_blur_maps_have_255_levels_and_none() -> None:
    blur = BlurMap(128, 128 * 5)
    blur.values[:] = [[0.0, 0.0024, 0.0076, 1.275, 9.0]]
    values, mpp = blur_from_json(blur_to_json(blur, 0.5))
    assert values.tolist() == [pytest.approx([0.005, 0.005, 0.01, 1.275, 1.275])] and mpp == 64


def test_outlines_are_in_pixels_of_the_slide_within_its_bounds() -> None:
    affine = ((2.0, 0.0, 100.0), (0.0, 4.0, 50.0))
    attributes = {"source": {"bounds": {"y0": 30, "y1": 830, "x0": 10, "x1": 610}}, "affine": affine}
    grid = SlideGrid.of(attributes, (1.0, 0.5), (8.0, 2.0))
    assert np.allclose(grid.affine, [[16.0, 0.0, 70.0], [0.0, 16.0, 40.0]]) and grid.size_px == (800, 600)
    assert np.array_equal(SlideGrid.within(Box(30, 830, 10, 610), affine, (1.0, 0.5), (8.0, 2.0)).affine, grid.affine)
    assert grid.to_level0([(1.0, 2.0), (0.0, 0.004)]) == [[56.0, 102.0], [40.0, 70.06]]
    assert np.allclose(grid.from_level0([[56.0, 102.0], [40.0, 70.0]]), [[2.0, 1.0], [0.0, 0.0]])


def test_of_many_names_three_are_said() -> None:
    assert given._named(["a"]) == "a" and given._named(list("abc")) == "a, b, c"
    assert given._named(list("abcde")) == "a, b, c and 2 more"
    files = {name: "1 Point" for name in "abcde"}
    assert given._left_out({"a": "1 Point"}) == "a: left out 1 Point"
    assert given._left_out(dict(list(files.items())[:3])).count("left out") == 3
    assert (
        given._left_out(files) == "a: left out 1 Point; b: left out 1 Point; c: left out 1 Point; and of 2 more files"
    )


def test_outlines_of_a_folder_are_compared_with_its_slides(tmp_path: Path) -> None:
    square = '{"type": "Polygon", "coordinates": [[[0, 0], [9, 0], [9, 9], [0, 0]]]}'
    line = '{"type": "LineString", "coordinates": [[1, 1], [5, 5]]}'
    for name in "ab":
        (tmp_path / f"{name}.geojson").write_text(f"[{square}, {line}]" if name == "b" else square)
    folder = given.GivenTissue(str(tmp_path))
    assert folder.check(["a", "b"]) == "b.geojson: left out 1 LineString"
    assert folder.check(["a"]) == f"--tissue {tmp_path}: no slide for b.geojson"
    assert folder.check(["b", "c"]) == (
        f"--tissue {tmp_path}: no outlines for c, whose tissue is detected; no slide for a.geojson; "
        "b.geojson: left out 1 LineString"
    )
    one = given.GivenTissue(str(tmp_path / "a.geojson"))
    assert one.check(["x"]) == "" and given.GivenTissue("off").check(["x", "y"]) == ""
    tissue = folder.of("a")
    assert tissue is not None and tissue.path == tmp_path / "a.geojson" and folder.of("c") is None
    assert given.GivenTissue("off").of("x") == given.SlideTissue("off")


@pytest.mark.parametrize(
    ("height", "width", "most", "step"), [(10, 10, 100, 1), (10, 10, 99, 2), (11, 30, 40, 3), (30, 11, 400, 1)]
)
def test_a_sample_is_a_grid_of_at_most_so_many_pixels(
    monkeypatch: pytest.MonkeyPatch, height: int, width: int, most: int, step: int
) -> None:
    monkeypatch.setattr(stain, "_MAX_PX", most)
    taken: list[np.ndarray] = []
    monkeypatch.setattr(stain, "estimate_stains", lambda pixels, glass: taken.append(pixels))
    image = np.random.default_rng(0).integers(0, 255, (3, height, width), dtype=np.uint8)
    tissue = np.random.default_rng(1).random((-(-height // 2), -(-width // 2))) < 0.5
    sample = StainSample(height, width)
    sample.add(0, 0, image[:, :7])
    sample.add(7, 0, image[:, 7:])
    sample.estimate(tissue, np.full(3, 255, np.float32))
    wanted = [
        image[:, y, x]
        for y in range(0, height, step)
        for x in range(0, width, step)
        if tissue[y * tissue.shape[0] // height, x * tissue.shape[1] // width]
    ]
    assert np.array_equal(taken[0], wanted)


def test_a_thousand_stained_pixels_have_stains() -> None:
    rng, glass = np.random.default_rng(3), np.full(3, 240, np.float32)
    amounts = rng.uniform(0.4, 1.5, (1000, 2))
    light = 241 * np.exp(-amounts @ np.array([[0.65, 0.7, 0.29], [0.27, 0.9, 0.31]])) - 1
    pixels = light.clip(0, 255).astype(np.uint8)
    pale = np.full((400, 3), 215, np.uint8)  # a density of 0.11
    found = estimate_stains(np.concatenate([pale, pixels]), glass)
    assert found is not None and found.haematoxylin[0] > found.eosin[0]
    assert found == estimate_stains(pixels, glass)
    assert estimate_stains(np.concatenate([pale, pixels[1:]]), glass) is None
    density = np.log(241 / (pixels + 1.0))
    strong = np.percentile(
        np.linalg.lstsq(np.array([found.haematoxylin, found.eosin]).T, density.T, rcond=None)[0], 99, 1
    )
    assert found.strength == pytest.approx(strong, rel=1e-3)
