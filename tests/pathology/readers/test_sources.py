from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tifffile

from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.readers.jpeg_tile import jpeg_prefix
from pathology.readers.openslide_source import OpenSlideSource
from pathology.readers.source_level import levels_of_sizes
from pathology.readers.sources import open_source
from pathology.readers.tiff_source import TiffSource
from tests.pathology.readers.scanners import jpeg, smooth, write_encoded
from tests.pathology.tiffs import MakeSlide


def write_ome(path: Path, image: np.ndarray, unit: str, size: float) -> None:
    meta = {"axes": "YXS", "PhysicalSizeX": size, "PhysicalSizeY": size}
    meta |= {"PhysicalSizeXUnit": unit, "PhysicalSizeYUnit": unit}
    with tifffile.TiffWriter(path, ome=True) as tiff:
        tiff.write(image, subifds=1, tile=(128, 128), photometric="rgb", metadata=meta, compression="zlib")
        tiff.write(image[::2, ::2], subfiletype=1, tile=(128, 128), photometric="rgb", compression="zlib")


@pytest.mark.parametrize("compression", ["jpeg", "zlib", "lzw", "none"])
def test_both_readers_show_the_same_pixels(make_slide: MakeSlide, compression: str) -> None:
    path = make_slide(levels=3, compression=None if compression == "none" else compression)
    ours, theirs = TiffSource(path), OpenSlideSource(path)
    assert ours.levels == theirs.levels and [v.downsample for v in ours.levels] == [(1, 1), (2, 2), (4, 4)]
    assert ours.mpp == pytest.approx((0.5, 0.5)) and theirs.mpp == pytest.approx((0.5, 0.5))
    for level, size in enumerate(ours.levels):
        for box in (Box.of_size(size.height_px, size.width_px), Box(3, 130, 7, 160), Box(100, 101, 50, 51)):
            assert np.array_equal(ours.read(box, level), theirs.read(box, level))


@pytest.mark.parametrize(("unit", "size"), [("µm", 0.5), ("nm", 500.0), ("mm", 0.0005)])
def test_ome_tiff_shows_its_levels_in_subifds(tmp_path: Path, unit: str, size: float) -> None:
    image = np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    write_ome(tmp_path / "a.ome.tiff", image, unit, size)
    source = open_source(tmp_path / "a.ome.tiff")
    assert source.mpp == pytest.approx((0.5, 0.5)) and len(source.levels) == 2
    assert np.array_equal(source.read(Box(10, 290, 5, 399), 0), image[10:290, 5:399])
    assert np.array_equal(source.read(Box(0, 150, 0, 200), 1), image[::2, ::2])


def test_a_striped_tiff_is_read_though_openslide_does_not(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb", rowsperstrip=16, resolution=(20_000, 20_000))
    source = open_source(tmp_path / "a.tif")
    assert isinstance(source, TiffSource)
    assert np.array_equal(source.read(Box(5, 80, 3, 70), 0), image[5:80, 3:70])


@pytest.mark.parametrize(
    ("full", "part", "factor"),
    [((13812, 29382), (3453, 7346), 4.0), ((3567, 4443), (1783, 2221), 2.0), ((1000, 1000), (300, 300), None)],
)
def test_downsamples_are_whole_where_sizes_say_so(
    full: tuple[int, int], part: tuple[int, int], factor: float | None
) -> None:
    found = levels_of_sizes([full, part])[1].downsample
    assert found == ((factor, factor) if factor else (1000 / 300, 1000 / 300))


def test_bad_files_are_named_in_plain_words(tmp_path: Path, make_slide: MakeSlide) -> None:
    whole = make_slide(compression="jpeg").read_bytes()
    cases = {
        "empty.svs": (b"", "empty"),
        "text.svs": (b"this is no slide at all", "neither OpenSlide nor tifffile"),
        "png.svs": (b"\x89PNG\r\n\x1a\n" + b"0" * 99, "PNG"),
    }
    for name, (data, words) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SlideError, match=words):
            open_source(tmp_path / name)
    end_first = b"II*\0" + (len(whole) + 100).to_bytes(4, "little") + whole[8:]
    (tmp_path / "cut.svs").write_bytes(end_first)
    with pytest.raises(SlideError, match="truncated"):
        open_source(tmp_path / "cut.svs")
    with pytest.raises(SlideError, match="No such file"):
        open_source(tmp_path / "nothing.svs")


def test_what_is_no_file_is_named_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.svs")
    (tmp_path / "folder.svs").mkdir()
    (tmp_path / "loop.svs").symlink_to(tmp_path / "loop.svs")
    (tmp_path / "alone.mrxs").write_bytes(b"\xff\xd8\xff\xe0 a small picture")
    cases = {
        "pipe.svs": "not a regular file",
        "folder.svs": "folder, not",
        "loop.svs": "symbolic",
        "alone.mrxs": "'alone'",
    }
    for name, words in cases.items():
        with pytest.raises(SlideError, match=words):
            open_source(tmp_path / name)


def test_deep_pictures_are_refused(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "grey.tif", np.zeros((64, 64), np.uint16))
    tifffile.imwrite(tmp_path / "deep.tif", np.zeros((64, 64, 3), np.uint16), photometric="rgb")
    for name in ("grey.tif", "deep.tif"):
        with pytest.raises(SlideError, match="only 8-bit RGB or grey"):
            TiffSource(tmp_path / name)


def _damage(path: Path, how: str) -> None:
    with tifffile.TiffFile(path) as tiff:
        offset, length = tiff.pages[0].dataoffsets[3], tiff.pages[0].databytecounts[3]
    data = bytearray(path.read_bytes())
    if how == "garbage":
        data[offset : offset + 20] = b"\x99" * 20
    else:
        data[offset + length // 2 : offset + length] = bytes(length - length // 2)
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["garbage", "zeroed tail"])
@pytest.mark.parametrize("reader", [OpenSlideSource, TiffSource])
def test_a_damaged_tile_is_an_error_and_the_rest_is_read(make_slide: MakeSlide, how: str, reader: type) -> None:
    path = make_slide(compression="jpeg")
    good = OpenSlideSource(path).read(Box(0, 256, 0, 256), 0).copy()
    _damage(path, how)
    source = reader(path)
    for _ in range(2):
        with pytest.raises(TileError):
            source.read(Box(0, 256, 512, 900), 0)  # tile 3 ends the first row
        assert np.array_equal(source.read(Box(0, 256, 0, 256), 0), good)


REAL = {
    "CMU-1-Small-Region.svs": ("aperio", 0.499),
    "TCGA-CR-7395-01A-01-TS1.svs": ("aperio", None),
    "atlas_breast-lobular_HE_10x.svs": ("aperio", 1.0112),
    "odd/no_mpp.svs": ("aperio", None),
    "odd/boxes.tiff": ("generic-tiff", 352.778),
}


@pytest.mark.slides
@pytest.mark.parametrize("name", REAL)
def test_real_slides_look_alike_to_both_readers(name: str) -> None:
    folder = os.environ.get("HYFI_TEST_SLIDES")
    if not folder:
        pytest.skip("HYFI_TEST_SLIDES does not name a folder of real slides")
    fast, slow = open_source(Path(folder) / name), OpenSlideSource(Path(folder) / name)
    vendor, mpp = REAL[name]
    assert isinstance(fast, TiffSource) and fast.vendor == vendor and fast.levels == slow.levels
    assert fast.mpp == (None if mpp is None else pytest.approx((mpp, mpp), rel=1e-4))
    rng = np.random.default_rng(0)
    for level, size in enumerate(fast.levels):
        # OpenSlide interpolates on a level whose factor is not whole to it, and but for the first 4096 px from (0, 0).
        boxes = [Box(0, min(size.height_px, 1024), 0, min(size.width_px, 1024))]
        if level == 0:
            y, x = rng.integers(0, max(1, size.height_px - 900), 6), rng.integers(0, max(1, size.width_px - 900), 6)
            boxes += [
                Box(a, min(a + 900, size.height_px), b, min(b + 900, size.width_px)) for a, b in zip(y, x, strict=True)
            ]
            boxes.append(Box(size.height_px - 50, size.height_px, size.width_px - 60, size.width_px))
        for box in boxes:
            assert np.array_equal(fast.read(box, level), slow.read(box, level))


@pytest.mark.slides
@pytest.mark.parametrize(("name", "words"), [("zero_bytes", "empty"), ("png_named", "PNG"), ("truncated", "truncated")])
def test_real_files_that_are_no_slides_are_named(name: str, words: str) -> None:
    folder = os.environ.get("HYFI_TEST_SLIDES")
    if not folder:
        pytest.skip("HYFI_TEST_SLIDES does not name a folder of real slides")
    with pytest.raises(SlideError, match=words):
        open_source(Path(folder) / "odd" / f"{name}.svs")


def test_a_scanners_slide_that_looks_different_to_both_readers_stays_with_openslide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_encoded(tmp_path / "a.svs", [smooth(300, 420)], partial(jpeg, stored="ycbcr"), "jpeg", "ycbcr")
    assert isinstance(open_source(path), TiffSource)
    monkeypatch.setattr(
        "pathology.readers.tile_decoders.jpeg_prefix", lambda tables, ycbcr: jpeg_prefix(tables, not ycbcr)
    )
    assert isinstance(open_source(path), OpenSlideSource)
