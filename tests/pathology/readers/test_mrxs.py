"""MRXS from end to end: slides of known pixels in 3DHISTECH's layout, read, staged, damaged, ingested, predicted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image

from data.store.manifest import DONE, FAILED, load_records
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.ingest.archive import IngestOptions, Request, ingest, ingest_slide
from pathology.ingest.identity import SourceStamp, source_digest
from pathology.ingest.staging import files_of, staged
from pathology.predict.cohort import predict_slides
from pathology.predict.inputs import find_inputs
from pathology.predict.options import PredictOptions
from pathology.readers.openslide_source import OpenSlideSource
from pathology.readers.slide_source import SlideSource
from pathology.readers.source_level import RGB
from pathology.readers.sources import open_source
from tests.pathology.readers.mrxs_files import SLIDE_ID, Mirax, write_mirax
from tests.pathology.readers.scanners import soft
from tests.pathology.readers.test_processes import in_children
from tests.pathology.slides import FOCUS, Darkness, draw_slide, member_of

FILL = (240, 230, 220)
PLAIN = Mirax(fill=FILL, left_out=((3, 4), (7, 9)))
SHAKEN = Mirax((6, 7), (1, 1, 4, 4), tile_px=100, divisions=2, overlap_px=20, shake_px=7, fill=FILL)
LAYOUTS = {"plain": PLAIN, "shaken": SHAKEN}
NAME, DAY, BARCODE = "Jane-Doe-1961", "17/05/2019 08:30:00", "B-99-Q-BARCODE"
PERSONAL = {"SLIDE_NAME": NAME, "SLIDE_CREATIONDATETIME": DAY, "PROJECT_NAME": BARCODE}


def picture_of(how: Mirax) -> RGB:
    """Return a slide's pixels: soft colours where photos were taken, glass elsewhere."""
    shapes, picture = soft(*how.size_px), np.full((*how.size_px, 3), how.fill, np.uint8)
    for place in how.photos():
        y, x = how.position(place)
        part = slice(y, y + how.photo_px), slice(x, x + how.photo_px)
        picture[part] = shapes[part]
    return picture


@pytest.fixture(scope="module", params=LAYOUTS)
def slide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mirax]:
    how = LAYOUTS[request.param]
    return write_mirax(tmp_path_factory.mktemp("mirax") / "schön – 良い.b.mrxs", picture_of(how), how), how


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_mirax(tmp_path / "archive" / "a.mrxs", picture_of(PLAIN), PLAIN)


def whole(source: SlideSource, level: int) -> RGB:
    size = source.levels[level]
    return source.read(Box.of_size(size.height_px, size.width_px), level)


def test_what_the_bounds_hold_is_read_as_it_was_drawn(slide: tuple[Path, Mirax]) -> None:
    path, how = slide
    source = open_source(path)
    y0, y1, x0, x1 = how.bounds
    assert isinstance(source, OpenSlideSource) and source.vendor == "mirax" and source.objective_power == 40
    assert source.mpp == (0.25, 0.25) and source.bounds == Box(y0, y1, x0, x1) and y0 > 0 < x0
    assert source.to_file_px == ((1.0, 0.0, y0), (0.0, 1.0, x0))
    drawn = picture_of(how)[y0:y1, x0:x1].astype(int)
    assert [v.downsample for v in source.levels] == [(f, f) for f in (1, 2, 4, 8)]
    for level, size in enumerate(source.levels):
        factor = 2**level
        height, width = drawn.shape[0] // factor, drawn.shape[1] // factor
        assert (size.height_px, size.width_px) == (-(-drawn.shape[0] // factor), -(-drawn.shape[1] // factor))
        cut = drawn[: height * factor, : width * factor].reshape(height, factor, width, factor, 3)
        apart = np.abs(whole(source, level)[:height, :width] - cut.mean((1, 3)))
        # Coarse pixels of two photos meet in between pixels; the picture's own steps are as high as 255.
        assert apart.mean() < 1 + level and np.quantile(apart, 0.99) < 8 + 5 * level


def test_every_box_shows_what_openslide_shows_over_the_glass(slide: tuple[Path, Mirax]) -> None:
    path, how = slide
    source, rng = open_source(path), np.random.default_rng(0)
    with openslide.OpenSlide(path) as theirs:
        glass = theirs.properties[openslide.PROPERTY_NAME_BACKGROUND_COLOR]
        for level, size in enumerate(source.levels):
            factor = 2**level
            corner = (source.bounds.x0, source.bounds.y0)
            region = theirs.read_region(corner, level, (size.width_px, size.height_px))
            under = Image.new("RGBA", region.size, f"#{glass}")
            expected = np.asarray(Image.alpha_composite(under, region).convert("RGB")).astype(int)
            found = whole(source, level)
            assert np.abs(found - expected).max() <= 1  # of a seam that lets some glass through
            opaque = np.asarray(region)[..., 3] == 255
            assert np.array_equal(found[opaque], expected[opaque]) and opaque.mean() > 0.9
            for y, x in rng.integers(0, 600 // factor, (4, 2)):
                box = Box(y, y + 120 // factor, x, x + 90 // factor)
                # In between pixels OpenSlide rounds halves up or down, as its region begins.
                apart = np.abs(source.read(box, level) - found[box.slices()].astype(int)).max()
                assert apart <= (level > 0 and how is SHAKEN)
    y, x = how.position((3, 4)) if how is PLAIN else (0, 0)
    hole = Box(y, y + 128, x, x + 128).shift(-source.bounds.y0, -source.bounds.x0)
    assert how is SHAKEN or (source.read(hole, 0) == FILL).all()


def test_factors_are_the_scanners_where_sizes_do_not_tell(tmp_path: Path) -> None:
    how = Mirax((5, 5), (1, 1, 3, 3), tile_px=83, levels=5)
    source = open_source(write_mirax(tmp_path / "a.mrxs", picture_of(how), how))
    assert [v.downsample for v in source.levels] == [(f, f) for f in (1, 2, 4, 8, 16)]


def test_readers_in_threads_and_children_show_the_same(tmp_path: Path) -> None:
    paths = [write_mirax(tmp_path / f"{name}.mrxs", picture_of(how), how) for name, how in LAYOUTS.items()]
    sources: list[SlideSource] = [open_source(path) for path in paths]
    assert in_children(sources, [whole(source, 0) for source in sources], workers=1, reads=20) == [0] * 3


def twin(path: Path, mpp: float = 0.25) -> Path:
    """Write what a slide's bounds hold as a TIFF of a single level."""
    pixels, per_cm = whole(open_source(path), 0), 1e4 / mpp
    tiff = path.with_suffix(".tiff")
    how = {"resolution": (per_cm, per_cm), "resolutionunit": "CENTIMETER", "metadata": None}
    tifffile.imwrite(tiff, pixels, tile=(128, 128), photometric="rgb", compression="deflate", **how)
    return tiff


def test_the_store_holds_what_the_bounds_hold(slide: tuple[Path, Mirax], tmp_path: Path) -> None:
    path, _ = slide
    for name, source in (("mrxs", path), ("tiff", twin(path))):
        assert ingest_slide(source, tmp_path, IngestOptions(mpp=0.25), slide_id=name).status == DONE
    ours, theirs = (SlideStore.open(slide_path(tmp_path, name)) for name in ("mrxs", "tiff"))
    bounds = open_source(path).bounds
    assert (ours.levels[0].height_px, ours.levels[0].width_px) == bounds.shape and ours.levels == theirs.levels
    for level, size in enumerate(ours.levels):
        box = Box.of_size(size.height_px, size.width_px)
        assert np.array_equal(ours.read(box, level), theirs.read(box, level))
    assert ours.attributes["source"]["bounds"] == {"y0": bounds.y0, "y1": bounds.y1, "x0": bounds.x0, "x1": bounds.x1}
    assert ours.attributes["affine"] == [[1, 0, bounds.y0], [0, 1, bounds.x0]]


@pytest.mark.parametrize("mpp", [0.5, 0.9, 2.0])
def test_coarser_stores_are_in_register(slide: tuple[Path, Mirax], tmp_path: Path, mpp: float) -> None:
    path, _ = slide
    for name, source in (("mrxs", path), ("tiff", twin(path))):
        record = ingest_slide(source, tmp_path, IngestOptions(mpp=mpp), slide_id=name)
        assert record.status == DONE and record.source_mpp == pytest.approx(0.25) and record.store_mpp == mpp
    ours, theirs = (SlideStore.open(slide_path(tmp_path, name)) for name in ("mrxs", "tiff"))
    size = ours.levels[0]
    assert ours.levels == theirs.levels
    assert ours.attributes["source"]["level_used"] == {0.5: 1, 0.9: 1, 2.0: 3}[mpp]
    a, b = (store.read(Box.of_size(size.height_px, size.width_px), 0).astype(float).mean(0) for store in (ours, theirs))
    inside = (slice(4, -4), slice(4, -4))
    still = np.abs(a - b)[inside].mean()
    moved = [np.abs(np.roll(a, step, axis) - b)[inside].mean() for axis in (0, 1) for step in (-1, 1)]
    assert still < 0.35 * min(moved)  # half a pixel off would be as far as a pixel off the other way


def corners_of(features: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    return np.concatenate([ring for f in features for ring in f["geometry"]["coordinates"]])


def test_annotations_and_heatmaps_count_from_the_bounds(tmp_path: Path) -> None:
    how = Mirax((6, 10), (1, 1, 4, 8), tile_px=250, levels=1, mpp=(0.5, 0.5))
    glass: RGB = np.full((*how.size_px, 3), 243, np.uint8)
    glass[250:1250, 250:2250] = draw_slide()
    inputs = find_inputs([write_mirax(tmp_path / "one.mrxs", glass, how)])
    predict_slides((member_of(Darkness()),), inputs, tmp_path / "out", AloneCommunicator(), PredictOptions())
    dark = tifffile.imread(tmp_path / "out" / "one" / "heatmap.tiff")[
        3  # contributions stand behind the scores of both classes
    ]
    assert dark.shape == (-(-500 // 32), -(-1000 // 32))  # of the bounds, at 1 µm in cells of 32 px
    cells = np.argwhere(dark > 0.9 * np.nanmax(dark)) * 64
    y0, y1, x0, x1 = FOCUS
    assert len(cells) and (cells > (y0 - 64, x0 - 64)).all() and (cells < (y1, x1)).all()
    features = json.loads((tmp_path / "out" / "one" / "regions.geojson").read_text())["features"]
    contours = [f for f in features if "density" in f["properties"]["classification"]["name"]]
    # The tissue that was drawn, (x, y) from (60, 100) to (1880, 840), give or take a cell of 64 px.
    corners = corners_of([f for f in features if f not in contours])
    assert (corners.min(0) >= (0, 36)).all() and corners.min(0)[0] <= 124
    assert (corners.max(0) <= (1944, 904)).all() and corners.max(0)[0] >= 1816
    # A contour runs between the middles of cells, so up to half a cell beyond the last.
    assert (corners_of(contours).min(0) >= (-32, 4)).all() and (corners_of(contours).max(0) <= (1976, 936)).all()


def test_a_crop_lies_inside_of_the_bounds(tmp_path: Path) -> None:
    how = Mirax((8, 14), (1, 1, 6, 12), tile_px=256, levels=1, mpp=(0.5, 0.5))
    glass: RGB = np.full((*how.size_px, 3), 243, np.uint8)
    glass[1256:1556, 2656:3056] = soft(300, 400) // 4 + (120, 40, 90)
    path = write_mirax(tmp_path / "a.mrxs", glass.astype(np.uint8), how)
    for name, crop in (("part", True), ("whole", False)):
        options = IngestOptions(mpp=0.5, crop_tissue=crop)
        assert ingest_slide(path, tmp_path / "store", options, slide_id=name).status == DONE
    part, whole_slide = (SlideStore.open(slide_path(tmp_path / "store", name)) for name in ("part", "whole"))
    crop = part.attributes["crop"]
    assert (crop["y0"], crop["x0"]) == (512, 2048) and part.attributes["source"]["bounds"]["y0"] == 256
    assert part.attributes["affine"] == [[1, 0, 256 + 512], [0, 1, 256 + 2048]]
    box = Box(crop["y0"], crop["y1"], crop["x0"], crop["x1"])
    assert np.array_equal(part.read(Box.of_size(*box.shape), 0), whole_slide.read(box, 0))


def test_a_staged_slide_comes_with_its_folder(slide: tuple[Path, Mirax], tmp_path: Path) -> None:
    path, _ = slide
    with staged(path, tmp_path / "cache") as local:
        assert local != path and np.array_equal(whole(open_source(local), 0), whole(open_source(path), 0))
    record = ingest_slide(path, tmp_path / "store", IngestOptions(mpp=0.5, cache=tmp_path / "cache"))
    assert record.status == DONE and list((tmp_path / "cache").iterdir()) == []
    assert record.identity["sha256"] == source_digest(path)


def test_a_change_of_a_data_file_is_a_change_of_the_slide(plain: Path, tmp_path: Path) -> None:
    request, data = Request([plain], tmp_path / "store", IngestOptions(mpp=0.5)), plain.with_suffix("") / "Data0002.dat"
    before = SourceStamp.of(plain)
    assert len(ingest(request, workers=1).done) == 1 and ingest(request, workers=1).skipped == ["a"]
    content = bytearray(data.read_bytes())
    content[:4] = b"data"  # before the first tile: the slide looks the same
    data.write_bytes(content)
    os.utime(data, ns=(0, 0))  # copied from elsewhere, as old as it was there
    assert data in files_of(plain) and SourceStamp.of(plain) != before
    assert len(ingest(request, workers=1).done) == 1


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def overwrite(path: Path, start: int, length: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:start] + bytes(length) + content[start + length :])


def replaced(path: Path, old: str, new: str) -> None:
    content = path.read_bytes()
    assert old.encode() in content
    path.write_bytes(content.replace(old.encode(), new.encode()))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no data file": (lambda folder: (folder / "Data0001.dat").unlink(), "Data0001.dat"),
    "no index": (lambda folder: (folder / "Index.dat").unlink(), "Index.dat"),
    "no folder": (lambda folder: folder.rename(folder.with_name("elsewhere")), "no folder"),
    "cut index": (lambda folder: cut(folder / "Index.dat", 0.5), "Index.dat"),
    "cut slidedat": (lambda folder: cut(folder / "Slidedat.ini", 0.5), "Slidedat.ini"),
    "zero index": (lambda folder: overwrite(folder / "Index.dat", 100, 400), "Index.dat"),
    "cut data": (lambda folder: cut(folder / "Data0002.dat", 0.3), "a data file in its folder"),
    "a hole": (lambda folder: overwrite(folder / "Data0000.dat", 3000, 600), "of level 0"),
    "other index": (lambda folder: replaced(folder / "Index.dat", SLIDE_ID, SLIDE_ID[::-1]), "Index.dat"),
    "no mpp": (lambda folder: replaced(folder / "Slidedat.ini", "PIXEL_X = 0.25", "PIXEL_X = 0"), "--slide-mpp"),
}


def test_each_damage_is_named_and_the_good_ones_are_done(tmp_path: Path, hyfi: Callable[..., object]) -> None:
    folder = tmp_path / "archive"
    how = Mirax((4, 5), (1, 1, 2, 3), tile_px=96, levels=3)
    for name in ("good", *DAMAGES):
        write_mirax(folder / f"{name}.mrxs", picture_of(how), how)
    for name, (damage, _) in DAMAGES.items():
        damage(folder / name)
    told = hyfi("ingest", folder, "--out", "store", "--mpp", "0.25", "--workers", "1", "--json")
    assert told.returncode == 1 and "Traceback" not in told.stderr, told.stderr  # type: ignore[attr-defined]
    records = load_records(tmp_path / "store")
    assert {name for name, r in records.items() if r.status == DONE} == {"good"}
    assert records.keys() == {"good", *DAMAGES}
    for name, (_, words) in DAMAGES.items():
        assert words in records[name].reason, (name, records[name].reason)
        assert records[name].reason in told.stderr  # type: ignore[attr-defined]
    verified = hyfi("verify", "store")
    assert verified.returncode == 0, verified  # type: ignore[attr-defined]


def test_a_bad_tile_is_counted_and_the_others_are_read(plain: Path, tmp_path: Path) -> None:
    good = whole(open_source(plain), 0)
    overwrite(plain.with_suffix("") / "Data0000.dat", 9000, 600)
    with pytest.raises(TileError, match="level 0"):
        whole(open_source(plain), 0)
    record = ingest_slide(plain, tmp_path / "store", IngestOptions(mpp=0.25, max_bad=0.1))
    assert record.status == DONE and record.bad_tiles == 1 and record.tiles == 42
    store = SlideStore.open(slide_path(tmp_path / "store", "a"))
    pixels = store.read(Box.of_size(*good.shape[:2]), 0)
    differs = (pixels != good.transpose(2, 0, 1)).any(0)
    rows, columns = np.flatnonzero(differs.any(1)), np.flatnonzero(differs.any(0))
    assert differs.any() and rows[0] // 128 == rows[-1] // 128 and columns[0] // 128 == columns[-1] // 128
    assert (pixels[:, differs] == 255).all()


def test_the_ending_is_small(tmp_path: Path, plain: Path) -> None:
    large = plain.rename(plain.with_suffix(".MRXS"))
    with pytest.raises(SlideError, match=r"extension \.mrxs"):
        open_source(large)


def test_lossless_says_why_not(plain: Path, tmp_path: Path) -> None:
    record = ingest_slide(plain, tmp_path / "store", IngestOptions(mpp=0.5, lossless=True))
    assert record.status == FAILED and "mirax. Ingest it without --lossless" in record.reason


def test_nothing_that_tells_of_a_person_reaches_the_store(tmp_path: Path) -> None:
    how = replace(PLAIN, general=PERSONAL)
    folder = tmp_path / "archive" / "Ward-Seven-B"
    for name in ("good", "bad"):
        write_mirax(folder / f"{NAME}-{name}.mrxs", picture_of(how), how)
    ini = folder / f"{NAME}-bad" / "Slidedat.ini"
    ini.write_bytes(ini.read_bytes().replace(b"[GENERAL]", f"[GENERAL]\r\n{NAME} born {DAY}".encode()))
    request = Request([folder.parent], tmp_path / "store", IngestOptions(mpp=0.5), pseudonyms=tmp_path / "key.csv")
    report = ingest(request, workers=1)
    assert len(report.done) == len(report.failed) == 1
    assert "not a key-value pair" in report.failed[0].reason
    told = [NAME, "Jane", DAY, DAY[:10], BARCODE, SLIDE_ID, "Ward-Seven-B", "label picture", "Slidedat.ini.."]
    for file in (tmp_path / "store").rglob("*"):
        text = str(file.relative_to(tmp_path)).encode() + (file.read_bytes() if file.is_file() else b"")
        assert not [word for word in told if word.lower().encode() in text.lower()], file
