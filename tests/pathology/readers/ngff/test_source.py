"""OME-Zarr as slides: right whatever program wrote it; what is no slide is refused by what it is."""

from __future__ import annotations

import json
import pickle
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import open_store
from data.location import location
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.ingest.archive import Request, ingest
from pathology.ingest.discover import find_jobs
from pathology.ingest.identity import SourceStamp, source_digest
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.predict.inputs import find_inputs
from pathology.readers.facts.pictures import Pick
from pathology.readers.slide_source import SlideSource
from pathology.readers.source_level import BadTile
from pathology.readers.sources import open_source, scene_count
from tests.data.store.test_object_store import serve_folder
from tests.object_server import bucket, copy_to, server
from tests.pathology.readers.facts.test_levels import textured
from tests.pathology.readers.ngff_stores import (
    PROGRAMS,
    in_axes,
    pyramid,
    write_arrays,
    write_by,
    write_plain,
    write_series,
)
from tests.pathology.tiffs import RGB, MakeSlide, stained

__all__ = ["bucket", "server"]

IMAGE = textured(390, 520)
LEVELS = pyramid(IMAGE, 3)


def whole(slide: SlideSource, level: int = 0) -> RGB:
    return slide.read(Box.of_size(slide.levels[level].height_px, slide.levels[level].width_px), level)


def notes(path: Path) -> str:
    with closing(open_source(path)) as slide:
        return "; ".join(note.text for note in slide.facts.notes)


@pytest.mark.parametrize("program", PROGRAMS)
def test_pixels_levels_and_pixel_size_are_those_that_any_program_wrote(tmp_path: Path, program: str) -> None:
    path = write_by(program, tmp_path / "a.ome.zarr", IMAGE)
    with closing(open_source(path)) as slide:
        assert np.array_equal(whole(slide), IMAGE)
        assert [level.downsample for level in slide.levels] == [(1, 1), (2, 2), (4, 4)]
        assert slide.mpp == (0.5, 0.5) and not slide.facts.notes and not slide.facts.mpp_doubt
        box = Box(100, 301, 77, 400)
        assert np.array_equal(slide.read(box, 0), IMAGE[box.slices()])
        assert np.array_equal(pickle.loads(pickle.dumps(slide)).read(box, 0), IMAGE[box.slices()])
    record = ingest_slide(path, tmp_path / "store", IngestOptions(native=True))
    assert record.status == "done", record.reason
    stored = open_store(tmp_path / "store", record.slide_id)
    assert np.array_equal(stored.read(Box.of_size(*IMAGE.shape[:2])).transpose(1, 2, 0), IMAGE)


@pytest.mark.parametrize("axes", ["tczyx", "czyx", "cyx", "yxc", "cxy", "zyxc"])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_axes_may_have_any_order(tmp_path: Path, axes: str, zarr_format: Any) -> None:
    path = write_plain(tmp_path / "a.zarr", LEVELS, axes, zarr_format=zarr_format)
    with closing(open_source(path)) as slide:
        assert all(np.array_equal(whole(slide, k), level) for k, level in enumerate(LEVELS))


def test_shards_are_read(tmp_path: Path) -> None:
    with closing(open_source(write_plain(tmp_path / "a.zarr", LEVELS, "cyx", shard_px=256))) as slide:
        assert np.array_equal(whole(slide), IMAGE) and slide.levels[0].tile_px == (128, 128)


def test_grey_pixels_are_read(tmp_path: Path) -> None:
    grey = np.repeat(IMAGE[..., :1], 3, 2)
    with closing(open_source(write_arrays(tmp_path / "a.zarr", [IMAGE[..., 0]], "yx", [0.5]))) as slide:
        assert np.array_equal(whole(slide), grey)


def test_every_scene_is_a_slide_and_labels_are_none(tmp_path: Path) -> None:
    other = textured(300, 280, 5)
    series = [(IMAGE, "tissue"), (other, "second tissue"), (textured(96, 64, 3), "label image")]
    path = write_series(tmp_path / "in" / "a.zarr", series)
    shutil.copytree(path / "2" / "0", path / "0" / "labels" / "cells")
    assert scene_count(path) == 2
    report = ingest(Request([tmp_path / "in"], tmp_path / "store", IngestOptions(mpp=0.5)), workers=1)
    assert [record.slide_id for record in report.done] == ["a_scene1", "a_scene2"] and not report.failed
    for record, image in zip(report.done, (IMAGE, other), strict=True):
        stored = open_store(tmp_path / "store", record.slide_id).read(Box.of_size(*image.shape[:2]))
        assert np.array_equal(stored.transpose(1, 2, 0), image) and "several_scenes" in record.flags
    with closing(open_source(path / "1")) as slide:
        assert np.array_equal(whole(slide), other)
    with pytest.raises(SlideError, match="no scene 3"):
        open_source(path, Pick(scene=3))


@pytest.mark.parametrize("xml", [True, False])
def test_a_series_that_is_missing_is_noticed_where_something_names_it(tmp_path: Path, xml: bool) -> None:
    path = write_series(tmp_path / "a.zarr", [(IMAGE, ""), (textured(300, 280), "")], xml=xml)
    shutil.rmtree(path / "1")
    if xml:
        with pytest.raises(SlideError, match="describes 2 images, but it has 1"):
            open_source(path)
    else:
        assert scene_count(path) == 1


@pytest.mark.parametrize("name", ["../b.zarr/0", "/srv/b.zarr/0", "0/../../b.zarr/0"])
def test_names_that_lead_out_of_the_store_are_refused(tmp_path: Path, name: str) -> None:
    """Another slide would be shown under this one's name."""
    path, _ = (write_series(tmp_path / f"{stem}.zarr", [(IMAGE, "")], xml=False) for stem in "ab")
    (path / "OME").mkdir()
    (path / "OME" / ".zattrs").write_text(json.dumps({"series": [name]}))
    with pytest.raises(SlideError, match="is not inside of it"):
        open_source(path)
    (path / "OME" / ".zattrs").unlink()
    attributes = json.loads((path / "0" / ".zattrs").read_text())
    attributes["multiscales"][0]["datasets"][0]["path"] = f"../{name}"
    (path / "0" / ".zattrs").write_text(json.dumps(attributes))
    with pytest.raises(SlideError, match="is not inside of it"):
        open_source(path / "0")


def test_planes_are_refused_or_picked(tmp_path: Path) -> None:
    planes = np.stack([in_axes(IMAGE, "cyx"), in_axes(textured(390, 520, 9), "cyx")], 1)
    path = write_arrays(tmp_path / "z.zarr", [planes], "czyx", [0.5])
    with pytest.raises(SlideError, match=r"2 focal planes.*--plane N"):
        open_source(path)
    with closing(open_source(path, Pick(plane=2))) as slide:
        assert np.array_equal(whole(slide), textured(390, 520, 9))


DYES = [{"label": label} for label in ("DAPI", "FITC", "Cy3")]


@pytest.mark.parametrize(
    ("pixels", "axes", "how", "reason"),
    [
        (np.stack([in_axes(IMAGE, "cyx")] * 2), "tcyx", {}, "2 times"),
        (np.repeat(in_axes(IMAGE, "cyx"), 2, 0), "cyx", {}, "6 channels .*fluorescence"),
        (in_axes(IMAGE, "cyx"), "cyx", {"channels": DYES}, "3 channels .*fluorescence"),
        (in_axes(IMAGE // 6, "cyx"), "cyx", {}, "ground is dark"),
        (in_axes(IMAGE, "cyx"), "cyx", {"plate": {}}, "a plate"),
        (in_axes(IMAGE, "cyx"), "cyx", {"image-label": {}}, "a label image"),
        (in_axes(IMAGE, "cyx"), "qyx", {}, "axis 'q'"),
        (in_axes(IMAGE, "cyx"), "zyx", {}, "3 focal planes"),
    ],
)
def test_what_is_no_slide_is_refused_by_what_it_is(
    tmp_path: Path, pixels: np.ndarray[Any, Any], axes: str, how: dict[str, Any], reason: str
) -> None:
    path = write_arrays(tmp_path / "a.zarr", [pixels], axes.replace("q", "c"), [0.5], **how)
    if "q" in axes:
        document = json.loads((path / "zarr.json").read_text())
        document["attributes"]["ome"]["multiscales"][0]["axes"][0] = {"name": "q", "type": "other"}
        (path / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(SlideError, match=reason):
        open_source(path)


def test_an_axis_of_another_name_is_refused_also_where_axes_are_names_only(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "a.zarr", [in_axes(IMAGE, "cyx")], "cyx", [0.5])
    text = (path / "zarr.json").read_text()
    for axes, reason in ((["q", "y", "x"], "its axis 'q' is none of"), (["c", "y", "x"], "")):
        document = json.loads(text)
        document["attributes"]["ome"]["multiscales"][0]["axes"] = axes
        (path / "zarr.json").write_text(json.dumps(document))
        if reason:
            with pytest.raises(SlideError, match=reason):
                open_source(path)
        else:
            open_source(path).close()


def test_channels_named_in_another_order_are_read_by_their_names(tmp_path: Path) -> None:
    channels = [{"label": label} for label in ("Blue", "Green", "Red")]
    path = write_plain(tmp_path / "a.zarr", [level[..., ::-1] for level in LEVELS], "cyx", channels=channels)
    with closing(open_source(path)) as slide:
        assert np.array_equal(whole(slide), IMAGE) and "names" in slide.facts.notes[0].text


@pytest.mark.parametrize(
    ("kind", "true"),
    [
        (lambda a: a.astype(np.uint16) * 16, lambda a: a),
        (lambda a: (a.astype(np.int16) - 128).astype(np.int8), lambda a: a),
        (lambda a: (a / 255).astype(np.float32), lambda a: a),
    ],
)
@pytest.mark.parametrize("axes", ["cyx", "tczyx", "yxc"])
def test_other_samples_are_refused_with_a_command_that_works(tmp_path: Path, kind: Any, true: Any, axes: str) -> None:
    path = write_arrays(tmp_path / "IN.zarr", [kind(in_axes(IMAGE, axes))], axes, [0.5])
    with pytest.raises(SlideError, match="unsigned 8-bit") as refused:
        open_source(path)
    code = str(refused.value).partition('python -c "')[2].rstrip('"')
    exec(code.replace("IN.zarr", str(path)).replace("OUT.tif", str(tmp_path / "OUT.tif")))
    with closing(open_source(tmp_path / "OUT.tif")) as slide:
        assert np.abs(whole(slide).astype(int) - true(IMAGE)).max() <= 1


@pytest.mark.parametrize(
    ("how", "mpp", "said"),
    [
        ({"unit": "nanometer", "mpp": 500.0}, 0.5, ""),
        ({"unit": "millimeter", "mpp": 0.0005}, 0.5, ""),
        ({"unit": ""}, None, "0.5 in no unit"),
        ({"unit": "parsec"}, None, "the unit 'parsec'"),
        ({"scales": [0.5, 2.0, 4.0]}, None, "the scale of level 1"),
        ({"scales": [1.0, 1.0, 2.0]}, None, "the scale of level 1"),
        ({"unit": "Âµm"}, 0.5, "garbled"),
    ],
)
def test_scales_and_units_are_compared(tmp_path: Path, how: dict[str, Any], mpp: float | None, said: str) -> None:
    with closing(open_source(write_plain(tmp_path / "a.zarr", LEVELS, "cyx", **how))) as slide:
        assert slide.mpp == (None if mpp is None else (mpp, mpp))
        assert said in slide.facts.mpp_doubt + " ".join(note.text for note in slide.facts.notes)


def test_scales_are_compared_with_ome_xml(tmp_path: Path) -> None:
    with closing(open_source(write_series(tmp_path / "a.zarr", [(IMAGE, "")], stated_mpp=5.0))) as slide:
        assert slide.mpp is None and "OME-XML says 5 µm/px (ten times)" in slide.facts.mpp_doubt


def test_a_level_that_shows_something_else_is_left_out(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "a.zarr", [LEVELS[0], LEVELS[1][::-1], LEVELS[2]], "cyx")
    with closing(open_source(path)) as slide:
        assert [level.downsample[0] for level in slide.levels] == [1, 4]
        assert np.array_equal(whole(slide, 1), LEVELS[2]) and "level 1" in slide.facts.notes[0].text


def test_levels_that_are_missing_or_in_another_order_are_refused(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "a.zarr", LEVELS, "cyx")
    shutil.rmtree(path / "1")
    with pytest.raises(SlideError, match="level 1 is missing"):
        open_source(path)
    with pytest.raises(SlideError, match="not listed from the finest"):
        open_source(write_plain(tmp_path / "b.zarr", LEVELS[::-1], "cyx", scales=[2.0, 1.0, 0.5]))


def test_a_chunk_that_got_lost_is_a_damaged_tile_and_an_empty_one_is_noted(tmp_path: Path) -> None:
    image = IMAGE.copy()
    image[128:256, 256:384] = 0
    path = write_plain(tmp_path / "a.zarr", pyramid(image, 3), "yxc")
    (path / "0/c/1/2/0").unlink(missing_ok=True)
    assert "lacks 1 of its files" in notes(path) and "not complete" not in notes(path)
    (path / "0/c/0/1/2").unlink()
    assert "not complete" in notes(path)
    with closing(open_source(path)) as slide:
        assert not slide.read(Box(128, 256, 256, 384), 0).any()
        with pytest.raises(TileError, match="not stored, but a coarser level shows them"):
            whole(slide)
        bad: list[BadTile] = []
        out = np.zeros_like(image)
        slide.read_into(Box.of_size(*image.shape[:2]), 0, out, bad)
        assert [tile.box for tile in bad] == [Box(0, 128, 128, 256)] and (out[:128, 128:256] == 255).all()
        image[:128, 128:256] = 255
        assert np.array_equal(out, image)


def test_a_damaged_chunk_is_one_damaged_tile(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "a.zarr", LEVELS[:1], "yxc")
    (path / "0/c/1/1/0").write_bytes(b"damaged")
    record = ingest_slide(path, tmp_path / "store", IngestOptions(native=True))
    assert record.status == "failed" and "cannot be decoded" in record.reason
    record = ingest_slide(path, tmp_path / "store", IngestOptions(native=True, max_bad=0.2))
    assert record.status == "done" and record.bad_tiles == 1


def test_our_own_slides_are_slides(tmp_path: Path, make_slide: MakeSlide) -> None:
    source = make_slide("a.tiff", mpp=0.5)
    first = ingest(Request([source], tmp_path / "one", IngestOptions(native=True)), workers=1)
    again = ingest(Request([tmp_path / "one"], tmp_path / "two", IngestOptions(native=True)), workers=1)
    assert [record.slide_id for record in again.done] == ["a"] and first.done[0].source_mpp == again.done[0].source_mpp
    box = Box.of_size(700, 900)
    assert np.array_equal(*(open_store(tmp_path / name, "a").read(box) for name in ("one", "two")))
    assert find_inputs([tmp_path / "one" / "a.zarr"])[0].stored and find_inputs([tmp_path / "one"])[0].stored
    shard = next(path for path in (tmp_path / "one/a.zarr/0/c").rglob("*") if path.is_file())
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(SlideError, match="the shard has"):
        open_source(tmp_path / "one" / "a.zarr")


def test_stores_are_found_by_content_and_our_stores_are_not_searched_for_copies(
    tmp_path: Path, make_slide: MakeSlide
) -> None:
    folder = make_slide("a.tiff").parent
    write_plain(folder / "deep" / "b.ome.zarr", LEVELS, "cyx")
    write_plain(folder / "no ending", LEVELS, "cyx")
    write_plain(folder / "a.zarr", LEVELS, "cyx")
    (folder / "table.zarr").mkdir()
    (folder / "table.zarr" / ".zgroup").write_text('{"zarr_format": 2}')
    (folder / "table.zarr" / ".zattrs").write_text('{"encoding-type": "anndata"}')
    names = sorted(job.slide_id for job in find_jobs([folder], {}))
    assert names == ["a.tiff", "a.zarr", "b", "no ending"]
    inputs = find_inputs([folder / "deep"])
    assert [(one.slide_id, one.stored) for one in inputs] == [("b", False)]


def test_a_store_among_slides_is_not_ingested_again(tmp_path: Path, make_slide: MakeSlide) -> None:
    source = make_slide("a.tiff", mpp=0.5)
    ingest(Request([source], tmp_path / "store", IngestOptions(native=True)), workers=1)
    shutil.move(tmp_path / "store", source.parent / "store")
    assert [job.slide_id for job in find_jobs([source.parent], {})] == ["a"]
    own = source.parent / "store"
    with pytest.raises(RequestError, match="no slide in this folder"):
        find_jobs([own], {}, store=own)
    with pytest.raises(RequestError, match="is one of its slides"):
        ingest(Request([own / "a.zarr"], own, IngestOptions(native=True)), workers=1)


def test_a_changed_chunk_is_a_changed_slide(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "a.zarr", LEVELS, "yxc")
    request = Request([path], tmp_path / "store", IngestOptions(native=True))
    assert len(ingest(request, workers=1).done) == 1 and len(ingest(request, workers=1).skipped) == 1
    before = SourceStamp.of(path)
    write_plain(tmp_path / "b.zarr", pyramid(textured(390, 520, 3), 3), "yxc")
    shutil.copy(tmp_path / "b.zarr/0/c/1/1/0", path / "0/c/1/1/0")
    assert SourceStamp.of(path) != before and len(ingest(request, workers=1).done) == 1


def test_stores_in_a_bucket_and_on_a_web_server_are_those_of_a_folder(tmp_path: Path, bucket: str) -> None:
    path = write_by("bioformats2raw 0.4", tmp_path / "web" / "a.zarr", stained(390, 520))
    copy_to(path, location(f"{bucket}/slides/a.zarr"))
    copy_to(write_by("ngff-zarr 0.5", tmp_path / "b.zarr", IMAGE), location(f"{bucket}/slides/b.ome.zarr"))
    (location(bucket) / "slides" / "readme.txt").write_bytes(b"text")
    (tmp_path / "slides.csv").write_text(f"path,slide_id\n{bucket}/slides/b.ome.zarr,named\n")
    with serve_folder(tmp_path / "web") as address:
        places = [location(f"{bucket}/slides"), location(f"{address}/a.zarr")]
        request = Request([places[0], tmp_path / "slides.csv"], tmp_path / "store", IngestOptions(native=True))
        report = ingest(request, workers=1)
        assert [record.slide_id for record in report.done] == ["a", "named"] and not report.failed
        assert ingest(request, workers=1).skipped == ["a", "named"]
        served = ingest(Request(places[1:], tmp_path / "served", IngestOptions(native=True)), workers=1)
        assert [record.slide_id for record in served.done] == ["a"]
        assert not find_inputs(places[1:])[0].stored and not find_inputs(places[:1])[0].stored
    for store, name, image in (("store", "a", stained(390, 520)), ("store", "named", IMAGE), ("served", "a", None)):
        stored = open_store(tmp_path / store, name).read(Box.of_size(390, 520)).transpose(1, 2, 0)
        assert np.array_equal(stored, stained(390, 520) if image is None else image)
    assert source_digest(places[0] / "a.zarr") != source_digest(places[0] / "b.ome.zarr")
    with pytest.raises(RequestError, match="no OME-Zarr store at this address"):
        find_jobs([location(f"{bucket}/nothing")], {})
