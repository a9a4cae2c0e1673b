from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pathology.tissue.outlines import SlideGrid
from pathology.view.annotations import NO_FILE, AnnotationError, AnnotationFile, ChangedMeanwhileError, parsed

# Shown at half of the file's resolution, turned by a quarter, and 100 and 300 pixels from its corner.
GRID = SlideGrid(np.array([[0.0, 2.0, 100.0], [2.0, 0.0, 300.0]]))


def collection(*geometries: dict[str, Any]) -> dict[str, Any]:
    features = [
        {"type": "Feature", "id": str(k), "geometry": one, "properties": {"classification": {"name": "Tumor"}}}
        for k, one in enumerate(geometries)
    ]
    return {"type": "FeatureCollection", "features": features}


SQUARE = {"type": "Polygon", "coordinates": [[[10, 20], [30, 20], [30.5, 41], [10, 20]]]}


def test_what_is_saved_counts_as_qupath_does_and_is_loaded_as_it_was_drawn(tmp_path: Path) -> None:
    file = AnnotationFile(tmp_path / "notes" / "a.geojson", GRID)
    assert file.load() == (collection(), NO_FILE)
    drawn = collection(
        SQUARE,
        {"type": "Point", "coordinates": [3, 4]},
        {"type": "MultiPolygon", "coordinates": [SQUARE["coordinates"], SQUARE["coordinates"]]},
        {"type": "LineString", "coordinates": [[0, 0], [1, 2]]},
    )
    state = file.save(json.dumps(drawn).encode(), NO_FILE)
    written = json.loads((tmp_path / "notes" / "a.geojson").read_text())
    # (x, y) shown is (column, row): y of level 0 is 2 x + 100, x of level 0 is 2 y + 300
    assert written["features"][0]["geometry"]["coordinates"] == [[[340, 120], [340, 160], [382, 161], [340, 120]]]
    assert written["features"][1]["geometry"]["coordinates"] == [308, 106]
    assert written["features"][0]["properties"] == drawn["features"][0]["properties"]
    assert file.load() == (drawn, state)
    assert list((tmp_path / "notes").iterdir()) == [tmp_path / "notes" / "a.geojson"]


def test_what_somebody_else_saved_meanwhile_is_not_lost(tmp_path: Path) -> None:
    file = AnnotationFile(tmp_path / "a.geojson", GRID)
    first = file.save(json.dumps(collection(SQUARE)).encode(), NO_FILE)
    second = file.save(json.dumps(collection(SQUARE, SQUARE)).encode(), first)
    kept = file.path.read_bytes()
    for state in (first, NO_FILE, ""):
        with pytest.raises(ChangedMeanwhileError, match="changed by somebody else"):
            file.save(json.dumps(collection()).encode(), state)
    assert file.path.read_bytes() == kept
    file.save(json.dumps(collection()).encode(), second)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "is not GeoJSON"),
        (b"[" * 100_000, "is not GeoJSON"),
        (b'"text"', "not a feature collection"),
        (b'{"type": "FeatureCollection", "features": 3}', "not a feature collection"),
        (b'[{"type": "Feature", "geometry": null}]', "has the geometry None"),
        (b'[{"type": "Feature", "geometry": {"type": "Circle", "coordinates": [1, 2]}}]', "the geometry Circle"),
        (
            b'[{"type": "Feature", "geometry": {"type": "Point", "coordinates": [1]}}]',
            "coordinates for a Point",
        ),
        (
            b'[{"type": "Feature", "geometry": {"type": "Point", "coordinates": [1, NaN]}}]',
            "coordinates for a Point",
        ),
        (
            b'[{"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [[1, 2], [3, 4]]}}]',
            "coordinates for a Polygon",
        ),
        (
            b'{"type": "Feature", "geometry": {"type": "Point", "coordinates": [1, 1' + b"0" * 400 + b"]}}",
            "for a Point",
        ),
    ],
)
def test_what_is_no_geojson_is_named_and_not_written(tmp_path: Path, data: bytes, words: str) -> None:
    file = AnnotationFile(tmp_path / "a.geojson", GRID)
    with pytest.raises(AnnotationError, match=words):
        file.save(data, NO_FILE)
    assert list(tmp_path.iterdir()) == []


def test_features_without_a_collection_are_read_as_one() -> None:
    one = collection(SQUARE)["features"][0]
    for data in (one, [one]):
        assert parsed(json.dumps(data).encode(), "a") == collection(SQUARE)
