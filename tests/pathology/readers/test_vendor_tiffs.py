"""Philips, Ventana and Leica from end to end: TIFFs whose XML says where their pixels belong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tifffile

from data.store.manifest import DONE, FAILED
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.plan.box import Box
from pathology.ingest.archive import IngestOptions, Request, ingest, ingest_slide
from pathology.readers.openslide_source import OpenSlideSource
from pathology.readers.source_level import RGB
from pathology.readers.sources import open_source
from tests.pathology.readers.scanners import soft, write_leica
from tests.pathology.readers.test_mrxs import twin, whole
from tests.pathology.readers.vendor_tiffs import write_philips, write_ventana
from tests.pathology.tiffs import halved

NAME = "Jane-Doe-1961"


@dataclass(frozen=True)
class MadeSlide:
    """A slide, what is to be seen of its finest level, its levels' factors and its microns per pixel."""

    path: Path
    seen: RGB
    factors: tuple[int, ...]
    mpp: float


def philips(folder: Path) -> MadeSlide:
    # The coarse levels are filled up to whole tiles: 320 px become 384, 160 become 256, and 80, 40 become 128.
    picture = soft(640, 896)
    path = write_philips(folder / "philips.tif", picture, levels=5, left_out=(3, 9), patient=NAME)
    for tile in (3, 9):
        y, x = tile // 7 * 128, tile % 7 * 128
        picture[y : y + 128, x : x + 128] = 255
    return MadeSlide(path, picture, (1, 2, 4, 8, 16), 0.25)


def ventana(folder: Path) -> MadeSlide:
    picture = soft(488, 608)
    path = write_ventana(folder / "a.bif", picture, (4, 5), (2, 3), left_px=200, overlap_px=8, patient=NAME)
    return MadeSlide(path, np.pad(picture, ((0, 0), (200, 0), (0, 0)), constant_values=255), (1, 2, 4), 0.25)


def leica(folder: Path) -> MadeSlide:
    picture = soft(600, 700)
    return MadeSlide(write_leica(folder / "a.scn", picture, (320, 640), (1600, 2400)), picture, (1,), 0.5)


MAKERS: dict[str, Callable[[Path], MadeSlide]] = {"philips": philips, "ventana": ventana, "leica": leica}


@pytest.fixture(scope="module", params=MAKERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MadeSlide:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


def test_each_level_shows_what_was_drawn(made: MadeSlide) -> None:
    source, seen = open_source(made.path), made.seen
    assert isinstance(source, OpenSlideSource) and source.mpp == (made.mpp, made.mpp)
    assert tuple(level.downsample for level in source.levels) == tuple((f, f) for f in made.factors)
    for level, factor in enumerate(made.factors):
        size = source.levels[level]
        assert abs(size.height_px - made.seen.shape[0] / factor) < 1 > abs(size.width_px - made.seen.shape[1] / factor)
        apart = np.abs(whole(source, level).astype(int)[: seen.shape[0], : seen.shape[1]] - seen)
        assert np.quantile(apart.max(-1), 0.9) < 8 + 2 * factor, level
        seen = halved(seen)


@pytest.mark.parametrize("times", [1, 4])
def test_the_store_is_in_register(made: MadeSlide, tmp_path: Path, times: int) -> None:
    mpp = made.mpp * times
    for name, path in (("own", made.path), ("twin", twin(made.path, made.mpp))):
        record = ingest_slide(path, tmp_path, IngestOptions(mpp=mpp), slide_id=name)
        assert record.status == DONE and record.source_mpp == pytest.approx(made.mpp)
    own, other = (SlideStore.open(slide_path(tmp_path, name)) for name in ("own", "twin"))
    assert own.levels == other.levels
    box = Box.of_size(own.levels[0].height_px, own.levels[0].width_px)
    a, b = (store.read(box, 0).astype(float).mean(0) for store in (own, other))
    if times == 1:
        assert np.array_equal(a, b)
    still = np.abs(a - b).mean()
    assert still < 0.4 * min(np.abs(np.roll(a, step, axis) - b).mean() for axis in (0, 1) for step in (-1, 1))


def test_no_name_is_kept_and_lossless_says_why_not(made: MadeSlide, tmp_path: Path) -> None:
    request = Request([made.path], tmp_path / "store", IngestOptions(mpp=0.5), pseudonyms=tmp_path / "key.csv")
    assert len(ingest(request, workers=1).done) == 1
    for file in (tmp_path / "store").rglob("*"):
        assert not file.is_file() or NAME.encode() not in file.read_bytes(), file
    record = ingest_slide(made.path, tmp_path / "lossless", IngestOptions(mpp=0.5, lossless=True))
    assert record.status == FAILED and "Ingest it without --lossless" in record.reason


def test_a_damaged_tile_is_named(made: MadeSlide, tmp_path: Path) -> None:
    path = tmp_path / made.path.name
    content = bytearray(made.path.read_bytes())
    with tifffile.TiffFile(made.path) as tiff:
        tiled = next(page for page in tiff.pages if page.is_tiled and page.shape[0] >= 488)
        at = tiled.dataoffsets[-1]
    content[at : at + 20] = b"\x99" * 20
    path.write_bytes(content)
    record = ingest_slide(path, tmp_path / "store", IngestOptions(mpp=made.mpp))
    assert record.status == FAILED and "cannot decode" in record.reason
