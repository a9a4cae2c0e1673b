"""Tissue that the user gives at ingest: exported, edited, given again; or all of the slide; or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data.store.manifest import load_manifest
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.errors import RequestError
from pathology.ingest.archive import IngestOptions, IngestReport, Request, compare_with_store, ingest
from pathology.predict.options import PredictOptions
from pathology.tissue.given import GivenTissue
from tests.pathology.tiffs import stained, write_slide
from workflows.commands import inspect

SQUARE = [[400, 300], [1200, 300], [1200, 900], [400, 900], [400, 300]]
"""Level-0 pixels (x, y)."""


@pytest.fixture
def slides(tmp_path: Path) -> Path:
    folder = tmp_path / "slides"
    folder.mkdir()
    for seed, name in enumerate("ab"):
        write_slide(folder / f"{name}.tiff", stained(1300, 1610, seed), 0.5, 2, "jpeg")
    return folder


def ingested(slides: Path, store: Path, **options: object) -> IngestReport:
    return ingest(Request([slides], store, IngestOptions(**options)), workers=1)  # type: ignore[arg-type]


def mask_of(store: Path, slide_id: str = "a") -> np.ndarray:
    return SlideStore.open(slide_path(store, slide_id)).tissue()[0]


def save_square(path: Path, ring: object = SQUARE) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"type": "Polygon", "coordinates": [ring]}))
    return path


@pytest.mark.parametrize(
    "options", [{}, {"crop_tissue": True}, {"glass": "blank", "mpp": 0.5}, {"lossless": True}], ids=str
)
def test_exported_outlines_give_the_same_mask_and_edited_ones_another(
    slides: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    ingested(slides / "a.tiff", tmp_path / "found", **options)
    path = tmp_path / "a.geojson"
    assert inspect.run(slide_path(tmp_path / "found", "a"), None, False, geojson=path) == 0
    ingested(slides / "a.tiff", tmp_path / "same", given_tissue=str(path), **options)
    found = mask_of(tmp_path / "found")
    assert 0 < found.sum() < found.size and np.array_equal(mask_of(tmp_path / "same"), found)

    collection = json.loads(path.read_text())
    outer = np.array(collection["features"][0]["geometry"]["coordinates"][0])
    (x0, y0), (x1, y1) = outer.min(0), outer.max(0)
    x0 = (x0 + x1) / 2
    collection["features"][0]["geometry"]["coordinates"] = [[[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]]]
    path.write_text(json.dumps(collection))
    ingested(slides / "a.tiff", tmp_path / "half", given_tissue=str(path), **options)
    half = SlideStore.open(slide_path(tmp_path / "half", "a"))
    area_mm2 = (x1 - x0) * (y1 - y0) * 0.25 / 1e6
    assert half.attributes["tissue"]["area_mm2"] == pytest.approx(area_mm2, rel=0.05)
    assert half.attributes["flags"] == ["tissue_given"] and len(half.attributes["parameters"]["given_tissue"]) == 64
    of_prediction = PredictOptions(tissue=str(path)).opened(slide_path(tmp_path / "same", "a")).tissue()[0]
    if not options.get("crop_tissue"):
        assert np.array_equal(of_prediction, half.tissue()[0])


def test_off_makes_the_whole_slide_tissue_but_measures_only_tissue(slides: Path, tmp_path: Path) -> None:
    ingested(slides / "a.tiff", tmp_path / "found")
    ingested(slides / "a.tiff", tmp_path / "whole", given_tissue="off")
    found, whole = (SlideStore.open(slide_path(tmp_path / name, "a")) for name in ("found", "whole"))
    assert whole.tissue()[0].all() and whole.attributes["tissue"]["fraction"] == 1.0
    assert whole.attributes["parameters"]["given_tissue"] == "off"
    for name in ("sharpness", "blurred_share", "patches", "stains"):
        assert whole.attributes[name] == found.attributes[name]


def test_a_folder_has_outlines_for_some_slides(slides: Path, tmp_path: Path) -> None:
    drawn = save_square(tmp_path / "drawn" / "a.geojson").parent
    save_square(drawn / "c.geojson")
    plan = compare_with_store(Request([slides], tmp_path / "store", IngestOptions(given_tissue=str(drawn))))
    assert "no outlines for b, whose tissue is detected; no slide for c.geojson" in plan.note
    report = ingested(slides, tmp_path / "store", given_tissue=str(drawn))
    assert [record.flags for record in report.done] == [("tissue_given",), ()]
    mask = mask_of(tmp_path / "store")
    assert mask.sum() * 64 == pytest.approx(800 * 600 / 4, rel=0.05) and not mask[:18].any() and not mask[:, :24].any()
    assert ingested(slides, tmp_path / "store", given_tissue=str(drawn)).skipped == ["a", "b"]
    with pytest.raises(RequestError, match=r"a \(tissue outlines: \w{12} → detected\).*--overwrite"):
        ingested(slides, tmp_path / "store")


def test_outlines_of_another_slide_fail_that_slide_alone(slides: Path, tmp_path: Path) -> None:
    drawn = save_square(tmp_path / "drawn" / "a.geojson", [[x + 9000, y] for x, y in SQUARE]).parent
    save_square(drawn / "b.geojson", [[-20, -20], [1640, -20], [1640, 1320], [-20, 1320]])  # drawn around the edge
    ingested(slides, tmp_path / "store", given_tissue=str(drawn))
    first, second = load_manifest(tmp_path / "store")
    assert first["status"] == "failed"
    assert "reach from y 300, x 9400 to y 900, x 10200, but the slide has 1300 × 1610 pixels" in first["reason"]
    assert second["status"] == "done" and mask_of(tmp_path / "store", "b").all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere", "no such file or folder"),
        ("slides", r"no <slide_id>\.geojson for any of these slides, such as a\.geojson"),
        ("slides/a.tiff", "one file for 2 slides"),
        ("bad", "bad/a.geojson: it has no polygon of tissue"),
    ],
)
def test_what_cannot_be_outlines_is_refused_before_anything_is_written(
    slides: Path, tmp_path: Path, given: str, said: str
) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.geojson").write_text("{}")
    with pytest.raises(RequestError, match=said):
        ingested(slides, tmp_path / "store", given_tissue=str(tmp_path / given))
    assert not (tmp_path / "store").exists()
    with pytest.raises(RequestError, match="not GeoJSON"):
        GivenTissue(str(slides / "a.tiff")).check(["a"])


def test_outlines_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    missing = tmp_path / "a.geojson"
    with pytest.raises(RequestError) as caught:
        GivenTissue(str(missing)).of("a")
    assert str(caught.value) == f"--tissue {missing}: cannot be read (No such file or directory)"
    (tmp_path / "folder" / "a.geojson").mkdir(parents=True)
    with pytest.raises(RequestError, match=r"--tissue .*a\.geojson: cannot be read \(Is a directory\)"):
        GivenTissue(str(tmp_path / "folder")).of("a")
