"""Annotations as QuPath, its versions and its users write them: the right area, and names for what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.store.slide_store import SlideStore, slide_path
from hyfi_core.errors import RequestError
from pathology.tissue.geojson import read_areas
from pathology.tissue.outlines import SlideGrid, mask_of_areas
from tests.conftest import Hyfi
from tests.pathology.tiffs import MakeSlide


def square(x0: int, y0: int, x1: int, y1: int) -> list[list[int]]:
    return [[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]]


def area(*rings: object) -> dict[str, Any]:
    return {"type": "Polygon", "coordinates": list(rings)}


def feature(geometry: object, classification: object = None) -> dict[str, Any]:
    return {"type": "Feature", "geometry": geometry, "properties": {"classification": classification}}


BIG, SMALL, FAR = area(square(0, 0, 40, 40)), area(square(10, 10, 20, 20)), area(square(50, 0, 60, 10))
LINE = {"type": "LineString", "coordinates": [[1, 1], [5, 5]]}
INNER = {"type": "GeometryCollection", "geometries": [FAR]}
COLLECTION = {"type": "GeometryCollection", "geometries": [SMALL, LINE, INNER]}
EMPTY = {"type": "MultiPolygon", "coordinates": []}
ISLAND = [[square(0, 0, 40, 40), square(10, 10, 30, 30)], [square(15, 15, 25, 25)]]
TUMOR = {"name": "Tumor"}
IGNORE, TISSUE = {"name": "Ignore*"}, {"name": "Tissue", "color": [1, 2, 3]}


@pytest.mark.parametrize(
    ("content", "pixels", "left_out"),
    [
        (BIG, 1600, ""),
        ([BIG, FAR], 1700, ""),
        (feature(COLLECTION), 200, "1 LineString"),
        (COLLECTION, 200, "1 LineString"),
        ({"type": "FeatureCollection", "features": [feature(BIG, IGNORE), feature(FAR)]}, 100, ""),
        ([feature(BIG), feature(SMALL, IGNORE)], 1500, ""),
        ([feature(SMALL, "Ignore*"), feature(BIG, "Tissue")], 1500, ""),
        ([feature(BIG, {"names": ["Tissue"]}), feature(SMALL, {"names": ["Ignore*"]})], 1500, ""),
        ([feature(BIG, TISSUE), feature(FAR, TUMOR), FAR], 1600, "1 of the class tumor, 1 of the class (none)"),
        ([feature(BIG, {"name": "Tumor"}), feature(FAR, {"name": "Necrosis"})], 1700, ""),
        ([feature(BIG), feature(FAR, {"name": "Region*"})], 1600, "1 of the class region*"),
        ([feature(BIG, {"names": ["Tumor", "Positive"]})], 1600, ""),
        ([feature(area()), feature(None), feature(area([])), feature(EMPTY), feature(BIG)], 1600, "4 empty"),
        ([feature(area(square(0, 0, 40, 40), [])), feature({"type": "Point", "coordinates": [1, 2]})], 1600, "1 Point"),
        (feature({"type": "MultiPolygon", "coordinates": ISLAND}), 1300, ""),
        (feature(area([[0, 0], [40, 40], [40, 0], [0, 40], [0, 0]])), pytest.approx(800, abs=41), ""),
        (feature(area([[x, y, 0] for x, y in square(0, 0, 40, 40)])), 1600, ""),
    ],
)  # fmt: skip
def test_areas_are_what_was_drawn(content: Any, pixels: int, left_out: str) -> None:
    areas = read_areas(Path("a.geojson"), b"\xef\xbb\xbf" + json.dumps(content).encode())
    mask = mask_of_areas(Path("a.geojson"), areas, SlideGrid(np.eye(2, 3)), (50, 60))
    assert (int(mask.sum()), areas.left_out) == (pixels, left_out)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (feature(LINE), r"no polygon of tissue \(only 1 LineString\)"),
        (feature(BIG, IGNORE), r"only areas of the class Ignore\*"),
        (feature(BIG, {"name": "Region*"}), r"only 1 of the class region\*"),
        ({}, "no polygon of tissue; draw"),
        (feature(area([[0, 0], [1, 1]])), "fewer than three points"),
        (feature(area([[0, 0], [1, None], [2, 2]])), "invalid polygon"),
        (feature(area([[0, 0], [1, 10**400], [2, 2]])), "invalid polygon"),
        (feature({"type": "Polygon", "coordinates": "x"}), "invalid polygon"),
        ([feature({"type": "MultiPolygon", "coordinates": 7})], "invalid polygon"),
    ],
)
def test_what_has_no_area_is_refused(content: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_areas(Path("a.geojson"), json.dumps(content).encode())


def test_ignored_areas_are_no_tissue_of_a_store(hyfi_here: Hyfi, make_slide: MakeSlide, tmp_path: Path) -> None:
    make_slide("a.tiff", (1024, 1024))
    drawn = [feature(area(square(200, 200, 800, 800)), "Tissue"), feature(area(square(400, 400, 600, 600)), IGNORE)]
    (tmp_path / "a.geojson").write_text(json.dumps([*drawn, feature(LINE), feature(FAR, "Tumor")]))
    done = hyfi_here(
        "ingest", "slides/a.tiff", "--out", "store", "--mpp", "0.5", "--tissue", "a.geojson", "--workers", "1"
    )
    assert done.returncode == 0, done.stderr
    assert "note: a.geojson: left out 1 LineString, 1 of the class tumor" in done.stderr
    mask = SlideStore.open(slide_path(tmp_path / "store", "a")).tissue()[0]
    assert mask.mean() == pytest.approx((600**2 - 200**2) / 1024**2, rel=0.05)
