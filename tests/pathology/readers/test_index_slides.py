"""VMS and VMU from end to end: an index file and the files that it names."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from data.store.manifest import DONE
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.plan.box import Box
from pathology.errors import SlideError
from pathology.ingest.archive import IngestOptions, Request, ingest, ingest_slide
from pathology.ingest.identity import SourceStamp
from pathology.ingest.staging import files_of, staged
from pathology.readers.openslide_source import OpenSlideSource
from pathology.readers.slide_source import SlideSource
from pathology.readers.source_level import RGB
from pathology.readers.sources import open_source
from tests.pathology.readers.index_slides import write_vms, write_vmu
from tests.pathology.readers.scanners import smooth
from tests.pathology.readers.test_processes import in_children

NAME, DAY = "Jane-Doe-1961", "17/05/2019"
SIZE = Box.of_size(768, 1024)


@pytest.fixture(params=["vms", "vmu"])
def slide(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, RGB]:
    picture = smooth(768, 1024 if request.param == "vms" else 1000)
    write = write_vms if request.param == "vms" else write_vmu
    return write(tmp_path / "slides" / f"a.{request.param}", picture, AuthCode=NAME, Created=DAY), picture


def test_pixels_are_those_that_were_drawn(slide: tuple[Path, RGB], tmp_path: Path) -> None:
    path, picture = slide
    source, size = open_source(path), Box.of_size(*picture.shape[:2])
    assert isinstance(source, OpenSlideSource) and source.vendor == "hamamatsu" and source.objective_power == 20
    assert source.mpp == (0.5, 0.5) and {(1, 1), (4, 4)} <= {level.downsample for level in source.levels}
    found = source.read(size, 0)
    apart = np.abs(found - picture.astype(int))
    assert apart.max() == 0 if path.suffix == ".vmu" else apart.mean() < 2
    record = ingest_slide(path, tmp_path / "store", IngestOptions(mpp=0.5, cache=tmp_path / "cache"))
    assert record.status == DONE and list((tmp_path / "cache").iterdir()) == []
    pixels = SlideStore.open(slide_path(tmp_path / "store", "a")).read(size, 0)
    assert np.array_equal(pixels.transpose(1, 2, 0), found)


def test_readers_in_threads_and_children_show_the_same(tmp_path: Path) -> None:
    slides = [write_vms(tmp_path / "a.vms", smooth(512, 512), (1, 1)), write_vmu(tmp_path / "b.vmu", smooth(300, 400))]
    sources: list[SlideSource] = [open_source(path) for path in slides]
    found = [source.read(Box.of_size(*source.bounds.shape), 0) for source in sources]
    assert in_children(sources, found, workers=1, reads=12) == [0] * 3


def test_all_named_files_are_the_slide(slide: tuple[Path, RGB], tmp_path: Path) -> None:
    path, picture = slide
    names = {".vms": ["a(0,0).jpg", "a(1,0).jpg", "a_macro.jpg", "a_map.jpg"]}
    expected = names.get(path.suffix, ["a_image.ngr", "a_macro.jpg", "a_map.ngr"])
    assert [file.name for file in files_of(path)] == [path.name, *expected]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # Windows marks its texts so
    assert [file.name for file in files_of(path)] == [path.name, *expected]
    box = Box.of_size(*picture.shape[:2])
    with staged(path, tmp_path / "cache") as local:
        assert local != path and np.array_equal(open_source(local).read(box, 0), open_source(path).read(box, 0))
    before = SourceStamp.of(path)
    with files_of(path)[-1].open("ab") as file:
        file.write(b"\0")
    assert SourceStamp.of(path) != before


def test_each_damage_is_named_and_no_name_is_kept(tmp_path: Path) -> None:
    folder, store = tmp_path / "archive" / NAME, tmp_path / "store"
    for name in ("good", "missing", "cut"):
        write_vms(folder / f"{name}.vms", smooth(512, 512), grid=(1, 1), AuthCode=NAME)
        write_vmu(folder / f"{name}2.vmu", smooth(256, 200), AuthCode=NAME)
    for name in ("missing(0,0).jpg", "missing2_image.ngr"):
        (folder / name).unlink()
        with pytest.raises(SlideError, match=f"{re.escape(name)}.: No such file"):
            open_source(folder / ("missing.vms" if "jpg" in name else "missing2.vmu"))
    for name in ("cut(0,0).jpg", "cut2_image.ngr"):
        (folder / name).write_bytes((folder / name).read_bytes()[:10_000])
    options = IngestOptions(mpp=0.5)
    report = ingest(Request([folder], store, options, pseudonyms=tmp_path / "key.csv"), workers=1)
    assert len(report.done) == 2 and len(report.failed) == 4 and all(record.reason for record in report.failed)
    for file in store.rglob("*"):
        text = str(file.relative_to(tmp_path)).encode() + (file.read_bytes() if file.is_file() else b"")
        assert not [word for word in (NAME, "Jane", DAY, "_macro", "cut(") if word.encode() in text], file


def test_lossless_says_why_not(slide: tuple[Path, RGB], tmp_path: Path) -> None:
    record = ingest_slide(slide[0], tmp_path / "store", IngestOptions(mpp=0.5, lossless=True))
    assert "hamamatsu. Ingest it without --lossless" in record.reason
