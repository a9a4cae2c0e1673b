"""A mask that is exported and imported is the same mask; what was drawn in QuPath is what counts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from data.components import label
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.errors import RequestError
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.predict.options import PredictOptions
from pathology.tissue.geojson import read_areas
from pathology.tissue.outlines import SlideGrid, mask_of_areas, mask_to_geojson, outline, signed_area
from tests.pathology.tiffs import MakeSlide

GRID = SlideGrid(np.array([[15.9, 0.0, 37.5], [0.0, 16.1, -3.25]]))
SQUARE = [[0, 0], [40, 0], [40, 40], [0, 40], [0, 0]]


def feature(ring: object, name: str = "", kind: str = "Polygon") -> dict[str, object]:
    classification = {"classification": {"name": name}} if name else {}
    return {"type": "Feature", "geometry": {"type": kind, "coordinates": ring}, "properties": classification}


def saved(folder: Path, content: object) -> Path:
    path = folder / "a.geojson"
    path.write_text(json.dumps(content))
    return path


def mask_of_geojson(path: Path, grid: SlideGrid, shape: tuple[int, int]) -> np.ndarray:
    return mask_of_areas(path, read_areas(path, path.read_bytes()), grid, shape)


def imported(folder: Path, content: object) -> np.ndarray:
    return mask_of_geojson(saved(folder, content), SlideGrid(np.eye(2, 3)), (50, 60))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_what_is_exported_comes_back_pixel_by_pixel(share: float, tmp_path: Path) -> None:
    mask = np.random.default_rng(3).random((61, 83)) < share
    mask[20:40, 30:60] = True
    mask[25:30, 40:50] = False
    path = saved(tmp_path, mask_to_geojson(mask, GRID, "slide"))
    assert np.array_equal(mask_of_geojson(path, GRID, mask.shape), mask)


def test_polygons_of_the_class_tissue_count_or_all_where_there_is_none(tmp_path: Path) -> None:
    inner = [[10, 10], [20, 10], [20, 20], [10, 20], [10, 10]]
    far = [[50, 45], [60, 45], [60, 50], [50, 50], [50, 45]]
    both = {"type": "FeatureCollection", "features": [feature([SQUARE, inner], "tissue"), feature([far], "Tumor")]}
    mask = imported(tmp_path, both)
    assert mask.sum() == 40 * 40 - 10 * 10 and mask[9, 15] and not mask[10, 10] and not mask[46, 55]
    unnamed = [feature([[SQUARE], [far]], kind="MultiPolygon")]
    assert imported(tmp_path, unnamed).sum() == 40 * 40 + 5 * 10
    ignored = [*unnamed, feature([[[0, 40], [40, 40], [40, 50], [0, 50], [0, 40]]], "Ignore*")]
    assert imported(tmp_path, ignored).sum() == 40 * 40 + 5 * 10
    assert imported(tmp_path, feature([[[-9, -9], [99, -9], [99, 99], [-9, 99], [-9, -9]]])).all()
    high = [[x + 15, y, 7.5] for x, y in SQUARE]  # GeoJSON allows a height
    assert imported(tmp_path, feature([high]))[:40, 15:55].all()
    assert np.array_equal(SlideGrid(np.eye(2, 3)).from_level0(high[:2]), [[0, 15], [0, 55]])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"type": "FeatureCollection", "features": []}, "no polygon"),
        (feature([1.0, 2.0], kind="Point"), "no polygon"),
        (feature([[["x", 0], [1, 2], [3, 4]]]), "invalid polygon"),
        (feature([[[1, 0], [1, 2]]]), "fewer than three points"),
        (feature([[[1, 0], [1, float("nan")], [9, 9]]]), "invalid polygon .a coordinate that is not a finite number"),
        (feature([SQUARE], "Ignore*"), "no polygon"),
        (feature([]), "only 1 empty"),
        (feature([[[0.1, 0.1], [0.2, 0.1], [0.2, 0.2]]]), "cover no part"),
        ("text", "no polygon"),
    ],
)
def test_what_holds_no_polygon_is_refused(content: object, why: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=why):
        imported(tmp_path, content)
    for text in ("not json", "[" * 100_000):
        (tmp_path / "b.geojson").write_text(text)
        with pytest.raises(RequestError, match="not GeoJSON"):
            mask_of_geojson(tmp_path / "b.geojson", GRID, (5, 5))


def test_prediction_opens_a_slide_with_the_tissue_that_is_given(tmp_path: Path, make_slide: MakeSlide) -> None:
    ingest_slide(make_slide(mpp=0.5), tmp_path / "store", IngestOptions(mpp=1.0))
    path = slide_path(tmp_path / "store", "a")
    slide = SlideStore.open(path)
    found, mpp = slide.tissue()
    assert PredictOptions().opened(path).tissue()[0].sum() == found.sum() and 0.2 < found.mean() < 0.4
    assert PredictOptions(tissue="off").opened(path).tissue()[0].all()
    drawn = saved(tmp_path, feature([[[0, 0], [160, 0], [160, 320], [0, 320], [0, 0]]]))
    given = PredictOptions(tissue=str(drawn)).opened(path)
    assert given.tissue()[1] == mpp and given.tissue()[0][:20, :10].all() and given.tissue()[0].sum() == 200
    drawn.rename(tmp_path / "other.geojson")
    assert PredictOptions(tissue=str(tmp_path)).tissue_given("a") is None
    options = PredictOptions(tissue=str(tmp_path / "other.geojson"))
    assert len(options.tissue_given("a") or "") == 64
    with pytest.raises(RequestError, match="one file for 2 slides"):
        options.check_tissue(["a", "b"])
    with pytest.raises(RequestError, match="no such file"):
        PredictOptions(tissue="nowhere").check_tissue(["a"])
    with pytest.raises(RequestError, match=r"as c\.geojson"):
        PredictOptions(tissue=str(tmp_path)).check_tissue(["c"])


@pytest.mark.parametrize("seed", range(6))
def test_rings_have_the_area_of_their_cells_and_turn_at_each_corner(seed: int) -> None:
    groups = label(np.random.default_rng(seed).random((12, 15)) < 0.6)
    for number in range(1, int(groups.max()) + 1):
        outer, *holes = outline(np.nonzero(groups == number))  # type: ignore[arg-type]
        areas = [signed_area(outer), *map(signed_area, holes)]
        assert sum(areas) == (groups == number).sum() and areas[0] > 0 and all(area < 0 for area in areas[1:])
        for ring in (outer, *holes):
            steps = np.diff(ring, axis=0)
            assert ring[0] == ring[-1] and ((steps == 0).sum(axis=1) == 1).all()
            assert ((steps[1:] * steps[:-1]).sum(axis=1) == 0).all(), "each point is a corner"


def test_polygons_may_reach_beyond_the_slide_by_a_twentieth(tmp_path: Path) -> None:
    grid = SlideGrid(np.eye(2, 3), (40, 60))
    for corner, fits in (((-2, 20), True), ((-2.1, 20), False), ((10, -3), True), ((10, -3.1), False),
                         ((42, 20), True), ((42.1, 20), False), ((10, 63), True), ((10, 63.1), False)):  # fmt: skip
        y, x = corner
        path = saved(tmp_path, feature([[[5, 5], [30, 5], [30, 30], [x, y], [5, 5]]]))
        if fits:
            assert mask_of_geojson(path, grid, (40, 60)).any()
        else:
            with pytest.raises(RequestError, match="polygons reach from"):
                mask_of_geojson(path, grid, (40, 60))


def test_the_time_of_an_outline_grows_with_its_edges_not_with_their_square() -> None:
    holes = np.ones((320, 320), bool)
    holes[2:-2:4, 2:-2:4] = False
    begin_s = time.process_time()
    rings = outline(np.nonzero(holes))  # type: ignore[arg-type]
    # 6241 holes: half a second, and a minute where each ring was looked for among all edges.
    assert len(rings) == 1 + 79**2 and time.process_time() - begin_s < 15


def test_a_slide_without_tissue_has_no_outlines() -> None:
    assert mask_to_geojson(np.zeros((4, 5), bool), GRID, "slide")["features"] == []
