"""CZI from end to end: the pixels that OpenSlide shows where it can, and those that it cannot (JPEG XR)."""

from __future__ import annotations

import math
import pickle
import struct
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.store.manifest import DONE, FAILED
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.ingest.archive import IngestOptions, Request, ingest, ingest_slide
from pathology.readers import czi_source
from pathology.readers.czi_file import CziBlock
from pathology.readers.czi_source import CziSource
from pathology.readers.openslide_source import OpenSlideSource
from pathology.readers.source_level import RGB, BadTile
from pathology.readers.sources import open_source
from tests.pathology.readers.czi_files import write_czi
from tests.pathology.readers.scanners import soft
from tests.pathology.readers.test_mrxs import twin, whole
from tests.pathology.readers.test_processes import in_children
from tests.pathology.tiffs import halved

SCENES = [(0, 400, 0, 320), (120, 640, 480, 896)]
NAME = "Jane-Doe-1961"


def test_a_file_that_is_refused_does_not_stay_open(tmp_path: Path) -> None:
    path = tmp_path / "x.czi"
    path.write_bytes(b"ZISRAWFILE" + bytes(500))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(SlideError, match="truncated or damaged"):
            open_source(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def seen() -> RGB:
    """Return the scenes on white glass."""
    picture, glass = soft(640, 896), np.full((640, 896, 3), 255, np.uint8)
    for y0, y1, x0, x1 in SCENES:
        glass[y0:y1, x0:x1] = picture[y0:y1, x0:x1]
    return glass


@pytest.fixture(scope="module", params=["none", "zstd", "jpegxr"])
def slide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("czi") / f"{request.param}.czi"
    return write_czi(path, soft(640, 896), SCENES, request.param, person=NAME)


def test_scenes_are_shown_on_white_glass(slide: Path) -> None:
    source = open_source(slide)
    assert isinstance(source, CziSource) and source.icc is None
    assert source.vendor == "zeiss" and source.objective_power == 40 and source.mpp == pytest.approx((0.25, 0.25))
    assert [level.downsample for level in source.levels] == [(1, 1), (2, 2), (4, 4)]
    found = whole(source, 0)
    assert np.abs(found - seen().astype(int)).max() <= (4 if slide.stem == "jpegxr" else 0)
    if slide.stem == "jpegxr":
        assert in_children([source], [found], workers=1, reads=12) == [0] * 3


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_both_readers_show_the_same_pixels(tmp_path: Path, codec: str) -> None:
    path = write_czi(tmp_path / "a.czi", soft(640, 896), SCENES, codec, tile_px=128)
    ours, theirs = CziSource(path), OpenSlideSource(path)
    assert [(v.height_px, v.width_px, v.downsample) for v in ours.levels] == [
        (v.height_px, v.width_px, v.downsample) for v in theirs.levels
    ]
    assert (ours.mpp, ours.objective_power, ours.vendor) == (theirs.mpp, theirs.objective_power, theirs.vendor)
    assert (ours.bounds, ours.to_file_px) == (theirs.bounds, theirs.to_file_px)
    rng = np.random.default_rng(0)
    for level, size in enumerate(ours.levels):
        expected = whole(theirs, level)
        assert np.array_equal(whole(ours, level), expected)
        for y, x in rng.integers(0, (size.height_px - 60, size.width_px - 70), (6, 2)):
            assert np.array_equal(ours.read(Box(y, y + 60, x, x + 70), level), expected[y : y + 60, x : x + 70])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_where_blocks_overlap_the_highest_is_seen(tmp_path: Path, order: tuple[int, int]) -> None:
    scenes = [(0, 400, 0, 320), (120, 640, 200, 896)]
    picture = soft(640, 896)
    source = open_source(write_czi(tmp_path / "a.czi", picture, scenes, tile_px=128, levels=1, order=order))
    shared = Box(120, 400, 200, 320)
    expected = picture[shared.slices()] if order[0] else 255 - picture[shared.slices()]
    assert np.array_equal(source.read(shared, 0), expected)


@pytest.mark.parametrize("wrong", ["other picture", "other place"])
def test_a_level_that_shows_something_else_is_left_out(tmp_path: Path, wrong: str) -> None:
    change = {"other picture": lambda part: soft(*part.shape[:2], seed=9), "other place": lambda part: part[::-1]}
    picture, scenes = soft(1024, 1024), [(0, 1024, 0, 1024)]
    path = write_czi(tmp_path / "a.czi", picture, scenes, levels=4, changed={1: change[wrong]})
    with closing(open_source(path)) as source:
        assert [level.downsample for level in source.levels] == [(1, 1), (4, 4), (8, 8)]
        assert np.array_equal(whole(source, 0), picture)
        assert np.array_equal(whole(source, 1), halved(halved(picture)))
        (note,) = source.facts.notes
        assert note.flag == "levels_left_out" and "level 1 of 512 × 512 px" in note.text
        again = pickle.loads(pickle.dumps(source))
        assert again.levels == source.levels and np.array_equal(whole(again, 2), whole(source, 2))
    assert ingest_slide(path, tmp_path, IngestOptions(mpp=0.5)).status == DONE
    store = SlideStore.open(slide_path(tmp_path, "a"))
    assert np.abs(store.read(Box.of_size(512, 512), 0).astype(int) - halved(picture).transpose(2, 0, 1)).max() <= 1


def test_few_blocks_are_kept_and_each_shows_the_same(slide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(czi_source, "_CACHE_BYTES", 1)
    source, again = CziSource(slide), CziSource(slide)
    assert np.array_equal(whole(source, 0), whole(again, 0)) and np.array_equal(whole(source, 0), whole(again, 0))
    assert len(source._cache) == 2


def test_an_ingest_decodes_each_block_once(slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, decoded = czi_source._decode, []

    def counted(block: CziBlock, data: bytes) -> RGB:
        decoded.append(block)
        return decode(block, data)

    monkeypatch.setattr(czi_source, "_decode", counted)
    assert ingest_slide(slide, tmp_path, IngestOptions(mpp=0.37)).status == DONE
    assert len(decoded) == len(set(decoded))  # those of coarser levels are compared when the file is opened
    assert sum(block.downsample == 1 for block in decoded) == 4 + 6


@pytest.mark.parametrize("mpp", [0.25, 1.0])
def test_the_store_holds_the_slide(slide: Path, tmp_path: Path, mpp: float) -> None:
    for name, path in (("own", slide), ("twin", twin(slide))):
        assert ingest_slide(path, tmp_path, IngestOptions(mpp=mpp), slide_id=name).status == DONE
    own, other = (SlideStore.open(slide_path(tmp_path, name)) for name in ("own", "twin"))
    assert own.levels == other.levels
    box = Box.of_size(own.levels[0].height_px, own.levels[0].width_px)
    a, b = (store.read(box, 0).astype(int) for store in (own, other))
    assert np.array_equal(a, b) if mpp == 0.25 else np.quantile(np.abs(a - b), 0.99) < 10


def test_no_name_is_kept_and_lossless_says_why_not(slide: Path, tmp_path: Path) -> None:
    options = IngestOptions(mpp=0.5)
    with pytest.raises(RequestError, match="--scene largest"):
        ingest(Request([slide], tmp_path / "store", options, pseudonyms=tmp_path / "key.csv"), workers=1)
    options = replace(options, scene="largest")
    request = Request([slide], tmp_path / "store", options, pseudonyms=tmp_path / "key.csv")
    (record,) = ingest(request, workers=1).done
    largest = max(CziSource(slide)._czi.scenes_px, key=math.prod)
    assert (record.height_px * 2, record.width_px * 2) == largest
    for file in (tmp_path / "store").rglob("*"):
        assert not file.is_file() or NAME.encode() not in file.read_bytes(), file
    record = ingest_slide(slide, tmp_path / "lossless", IngestOptions(mpp=0.5, lossless=True))
    assert record.status == FAILED and "zeiss. Ingest it without --lossless" in record.reason


def test_a_damaged_block_is_named_and_the_others_are_read(slide: Path, tmp_path: Path) -> None:
    good, content = whole(CziSource(slide), 0), bytearray(slide.read_bytes())
    at = content.index(b"ZISRAWSUBBLOCK", content.index(b"ZISRAWSUBBLOCK") + 1)
    content[at : at + 14] = b"\x99" * 14
    path = tmp_path / slide.name
    path.write_bytes(content)
    source = CziSource(path)
    place = source._areas[0][1]
    with pytest.raises(TileError, match="columns 256–320 of level 0 cannot be decoded: there is no block"):
        source.read(place, 0)
    bad: list[BadTile] = []
    out = np.empty_like(good)
    source.read_into(Box.of_size(640, 896), 0, out, bad)
    assert [tile.box for tile in bad] == [place]
    good[place.slices()] = 255
    assert np.array_equal(out, good)
    record = ingest_slide(path, tmp_path / "store", IngestOptions(mpp=0.25))
    assert record.status == FAILED and "decode" in record.reason


def changed(path: Path, what: str) -> None:
    """Damage a slide as the words say."""
    content = bytearray(path.read_bytes())
    directory, metadata = struct.unpack_from("<qq", content, 84)
    entry = directory + 160
    if what == "cut":
        del content[directory + 100 :]
    elif what == "no directory":
        content[directory : directory + 16] = bytes(16)
    elif what == "no XML":
        content[metadata + 288 : metadata + 300] = bytes(12)
    elif what == "grey":
        struct.pack_into("<i", content, entry + 2, 0)
    elif what == "LZW":
        struct.pack_into("<i", content, entry + 18, 2)
    elif what == "channels":
        struct.pack_into("<i", content, entry + 32 + 2 * 20 + 4, 1)
    elif what == "no size":
        struct.pack_into("<i", content, entry + 32 + 16, 0)
    elif what == "entry":
        content[entry : entry + 2] = b"XX"
    path.write_bytes(content)


REASONS = {
    "cut": "truncated",
    "no directory": "no complete ZISRAWDIRECTORY at byte",
    "no XML": "metadata cannot be read",
    "grey": "only 8-bit colour",
    "LZW": "compression LZW",
    "channels": "several planes along C",
    "no size": "without a size",
    "entry": "unknown type",
}


@pytest.mark.parametrize("what", REASONS)
def test_what_is_wrong_is_said(tmp_path: Path, what: str) -> None:
    path = write_czi(tmp_path / "a.czi", soft(128, 128), [(0, 128, 0, 128)], "jpegxr", levels=1)
    changed(path, what)
    with pytest.raises(SlideError, match=REASONS[what]):
        CziSource(path)
    record = ingest_slide(path, tmp_path / "store", IngestOptions(mpp=0.25))
    assert record.status == FAILED and "TIFF" not in record.reason


def test_pixels_of_the_wrong_size_are_an_error(tmp_path: Path) -> None:
    path = write_czi(tmp_path / "a.czi", soft(128, 128), [(0, 128, 0, 128)], "zstd", levels=1)
    content = bytearray(path.read_bytes())
    directory = struct.unpack_from("<q", content, 84)[0]
    struct.pack_into("<i", content, directory + 160 + 32 + 16, 127)  # columns as stored
    path.write_bytes(content)
    with pytest.raises(SlideError, match=r"128 × 128 px .* is stored as 128 × 127 px"):
        CziSource(path)
    struct.pack_into("<i", content, directory + 160 + 32 + 8, 127)  # columns on the slide
    path.write_bytes(content)
    with pytest.raises(TileError, match="49152 bytes; expected 48768"):
        whole(CziSource(path), 0)
    struct.pack_into("<i", content, directory + 160 + 18, 6)  # the other zstd, with a head that is none
    path.write_bytes(content)
    with pytest.raises(TileError, match="zstd header"):
        whole(CziSource(path), 0)
