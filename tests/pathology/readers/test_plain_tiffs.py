"""TIFFs of no scanner: which picture is the slide, what its pixels may be, and that damage is never shown."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from data.store.manifest import DONE
from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.ingest.archive import IngestOptions, ingest_slide
from pathology.ingest.lossless import LosslessSlide
from pathology.readers.facts.pictures import Pick
from pathology.readers.openslide_source import OpenSlideSource
from pathology.readers.sources import open_source
from pathology.readers.tiff_metadata import is_truncated
from pathology.readers.tiff_source import TiffSource
from tests.pathology.readers.scanners import smooth
from tests.pathology.tiffs import MakeSlide

SIZE = (300, 420)
WHOLE = Box.of_size(*SIZE)
TILED: dict[str, Any] = {"tile": (128, 128), "metadata": None}
CENTRE = 5  # the tile in the middle of 3 × 4


def damaged(path: Path, index: int = CENTRE) -> Path:
    """Zero the second half of a tile."""
    with tifffile.TiffFile(path) as tiff:
        offset, length = tiff.pages[0].dataoffsets[index], tiff.pages[0].databytecounts[index]
    with path.open("r+b") as file:
        file.seek(offset + length // 2)
        file.write(bytes(length - length // 2))
    return path


@pytest.mark.parametrize("about", ["", "Aperio Image Library v12\r\n420x300 (128x128)|AppMag = 20|MPP = 0.5"])
@pytest.mark.parametrize("index", [0, CENTRE])
def test_a_damaged_tile_is_named_though_it_is_the_one_looked_at_on_opening(
    tmp_path: Path, about: str, index: int
) -> None:
    path = tmp_path / "a.tif"
    how = TILED | {"compression": "deflate", "description": about or None}
    tifffile.imwrite(path, smooth(*SIZE), photometric="rgb", **how)
    source = open_source(damaged(path, index))
    assert isinstance(source, TiffSource) and source.vendor == ("aperio" if about else "generic-tiff")
    with pytest.raises(TileError, match="rows 128–256, columns 128–256" if index else "rows 0–128, columns 0–128"):
        source.read(WHOLE, 0)


@pytest.mark.parametrize("zero", ["minisblack", "miniswhite"])
@pytest.mark.parametrize("compression", ["none", "deflate", "jpeg"])
@pytest.mark.parametrize("shape", [TILED, {"rowsperstrip": 77, "metadata": None}])
def test_grey_is_shown_as_colours_and_its_damage_is_found(
    tmp_path: Path, zero: str, compression: str, shape: dict[str, Any]
) -> None:
    grey = smooth(*SIZE)[..., 0]
    path = tmp_path / "a.tif"
    how = {} if compression == "none" else {"compression": compression}
    tifffile.imwrite(path, grey, photometric=zero, **how, **shape)
    source = open_source(path)
    assert isinstance(source, TiffSource)
    shown = source.read(WHOLE, 0)
    if shape is TILED:
        assert np.array_equal(shown, OpenSlideSource(path).read(WHOLE, 0))
    expected = grey if zero == "minisblack" else 255 - grey
    assert np.abs(shown - expected[..., None].astype(int)).max() <= (60 if compression == "jpeg" else 0)
    assert np.abs(shown - expected[..., None].astype(int)).mean() < 5
    if compression != "none":
        with pytest.raises(TileError):
            open_source(damaged(path, 2)).read(WHOLE, 0)


def test_grey_jpeg_is_not_copied_as_if_it_had_colours(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", smooth(*SIZE)[..., 0], photometric="minisblack", compression="jpeg", **TILED)
    with pytest.raises(SlideError, match="is in grey JPEG blocks of 128 × 128 px"):
        LosslessSlide(open_source(tmp_path / "a.tif"))


@pytest.mark.parametrize(("compression", "words"), [("deflate", "DEFLATE"), ("lzw", "LZW"), (None, "uncompressed")])
def test_a_copy_of_tiles_that_are_no_jpeg_is_refused_with_what_they_are(
    tmp_path: Path, compression: str | None, words: str
) -> None:
    tifffile.imwrite(tmp_path / "a.tif", smooth(*SIZE), photometric="rgb", compression=compression, **TILED)
    with pytest.raises(SlideError, match=f"is in {words} blocks of 128 × 128 px"):
        LosslessSlide(open_source(tmp_path / "a.tif"))


def write_deep(path: Path, image: np.ndarray) -> None:
    tifffile.imwrite(path, image.astype(np.uint16) * 16, photometric="rgb", compression="deflate", **TILED)


def write_planar(path: Path, image: np.ndarray) -> None:
    planes = np.ascontiguousarray(image.transpose(2, 0, 1))
    tifffile.imwrite(path, planes, photometric="rgb", planarconfig="separate", compression="lzw", **TILED)


def write_inks(path: Path, image: np.ndarray) -> None:
    inks = np.concatenate([image, image[..., :1]], 2)
    tifffile.imwrite(path, inks, photometric="separated", compression="deflate", **TILED)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (write_deep, "3 × 16 bit RGB"),
        (write_planar, "3 × 8 bit RGB in separate planes"),
        (write_inks, "4 × 8 bit SEPARATED"),
    ],
)
def test_what_cannot_be_checked_is_refused_with_what_it_is_and_what_would_work(
    tmp_path: Path, write: Callable[[Path, np.ndarray], None], words: str
) -> None:
    write(tmp_path / "a.tif", smooth(*SIZE))
    with pytest.raises(
        SlideError,
        match=rf"its pixels are {words} .*only 8-bit RGB or grey.* Convert it first, .*python -c",
    ):
        open_source(tmp_path / "a.tif")


@pytest.mark.parametrize("at", [0, 150], ids=["corner", "middle"])
@pytest.mark.parametrize("kind", ["unspecified", "assocalpha", "unassalpha"])
def test_what_a_fourth_sample_means_stands_in_the_tags(tmp_path: Path, at: int, kind: str) -> None:
    colour, alpha = smooth(*SIZE), np.full((*SIZE, 1), 255, np.uint8)
    alpha[at : at + 60, at : at + 60] = 0
    alpha[at + 60 : at + 90, at + 60 : at + 90] = 128
    share = alpha / 255
    kept = np.rint(colour * share).astype(np.uint8) if kind == "assocalpha" else colour
    path = tmp_path / "a.tif"
    image = np.concatenate([kept, alpha], 2)
    tifffile.imwrite(path, image, photometric="rgb", extrasamples=[kind], compression="deflate", **TILED)
    source = open_source(path)
    assert isinstance(source, TiffSource)
    expected = colour if kind == "unspecified" else colour * share + 255 * (1 - share)
    assert np.abs(source.read(WHOLE, 0) - expected).max() <= (0 if kind == "unspecified" else 1.51)


@pytest.mark.parametrize("name", ["a.tif", "a.ome.tif"])
@pytest.mark.parametrize("marked", [0, 1], ids=["label first", "smaller copy first"])
def test_the_largest_picture_is_the_slide_wherever_it_stands(tmp_path: Path, name: str, marked: int) -> None:
    image, label = smooth(*SIZE), smooth(130, 140, seed=9)
    with tifffile.TiffWriter(tmp_path / name) as tiff:
        for picture, kind, per_cm in ((label, marked, 10_000), (image, 0, 20_000)):
            where = {"resolution": (per_cm, per_cm), "resolutionunit": "CENTIMETER"}
            tiff.write(picture, photometric="rgb", compression="deflate", subfiletype=kind, **where, **TILED)
    source = open_source(tmp_path / name)
    assert source.mpp == pytest.approx((0.5, 0.5))
    assert np.array_equal(source.read(WHOLE, 0), image)


@pytest.mark.parametrize("label", [(130, 140), SIZE], ids=["small label", "same size"])
@pytest.mark.parametrize("name", ["a.tif", "a.ome.tif"])
def test_an_ome_tiff_is_known_by_what_is_in_it(tmp_path: Path, name: str, label: tuple[int, int]) -> None:
    image = smooth(*SIZE)
    pictures = [(smooth(*label, seed=9), 7.0), (image, 0.25)]
    pictures = pictures[::-1] if label == SIZE else pictures  # of two that are alike the first is taken
    with tifffile.TiffWriter(tmp_path / name, ome=True) as tiff:
        for picture, mpp in pictures:
            facts = {"axes": "YXS", "PhysicalSizeX": mpp, "PhysicalSizeY": mpp}
            tiff.write(picture, photometric="rgb", compression="deflate", tile=(128, 128), metadata=facts)
    source = open_source(tmp_path / name)
    assert (source.vendor, source.mpp) == ("ome-tiff", (0.25, 0.25))
    assert np.array_equal(source.read(WHOLE, 0), image)


def test_of_two_pictures_of_one_size_one_is_picked_and_checked(tmp_path: Path) -> None:
    path, first = tmp_path / "a.tif", Pick(plane=1)
    with tifffile.TiffWriter(path) as tiff:
        for seed in (0, 1):
            tiff.write(smooth(*SIZE, seed=seed), photometric="rgb", compression="deflate", **TILED)
    with pytest.raises(SlideError, match="2 pictures"):
        open_source(path)
    assert np.array_equal(open_source(path, first).read(WHOLE, 0), smooth(*SIZE))
    with pytest.raises(TileError):
        open_source(damaged(path), first).read(WHOLE, 0)


@pytest.mark.parametrize("where", ["tile", "tag", "directory", "next"])
def test_a_file_cut_behind_its_finest_level_is_read_and_flagged(
    where: str, make_slide: MakeSlide, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_slide(levels=3, mpp=0.5)
    assert not is_truncated(path)
    with tifffile.TiffFile(path) as tiff:
        last = tiff.pages[2].aspage()  # type: ignore[union-attr]
        tile, tag = max(last.dataoffsets), last.tags["BitsPerSample"].valueoffset
        directory, linked = last.offset, tiff.pages[1].aspage().offset  # type: ignore[union-attr]
    content = path.read_bytes()
    end = {"tile": tile + 10, "tag": tag + 1, "directory": directory + 5, "next": directory}[where]
    assert linked < end < len(content)
    path.write_bytes(content[:end])
    assert is_truncated(path)
    record = ingest_slide(path, tmp_path / "store", IngestOptions(mpp=0.5))
    assert (record.status, record.reason) == (DONE, "") and "truncated" in record.flags
    assert not [word for word in ("tifffile", "TiffTag", "TiffPage", "libtiff") if word in caplog.text]


@pytest.mark.slides
def test_whole_slides_are_not_called_truncated(real_slides: Path) -> None:
    assert not [path.name for path in real_slides.glob("*.svs") if is_truncated(path)]
    assert is_truncated(real_slides / "odd" / "truncated.svs")


def test_a_copy_of_an_uncompressed_slide_that_was_not_finished_has_a_flag(tmp_path: Path) -> None:
    """A copy with its whole size from the start has zeros where nothing arrived, and uncompressed zeros are pixels."""
    pixels = np.full((1024, 1024, 3), 235, np.uint8)
    pixels[300:900, 200:800] = (180, 90, 150)
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, pixels, photometric="rgb", tile=(256, 256), resolution=(10000, 10000), resolutionunit=3)
    whole = path.read_bytes()
    assert "black" not in ingest_slide(path, tmp_path / "whole", IngestOptions(native=True)).flags
    path.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    assert "black" in ingest_slide(path, tmp_path / "half", IngestOptions(native=True)).flags


@pytest.mark.parametrize(
    ("tag", "field", "value"),
    [
        ("ImageWidth", 8, 0),
        ("ImageWidth", 4, 2),
        ("ImageLength", 8, 2**31),
        ("RowsPerStrip", 8, 0),
        ("SamplesPerPixel", 4, 2),
    ],
)
def test_a_damaged_number_in_a_directory_is_a_damaged_slide(tag: str, field: int, value: int, tmp_path: Path) -> None:
    """A size of 0, two values where there is one (field 4: how many; 8: the value), more rows than strips."""
    path = tmp_path / "s.tif"
    tifffile.imwrite(path, smooth(*SIZE), photometric="rgb", rowsperstrip=64, bigtiff=True, metadata=None)
    with tifffile.TiffFile(path) as tiff:
        at = tiff.pages[0].tags[tag].offset  # type: ignore[union-attr]
    with path.open("r+b") as file:
        # BigTIFF: tag, type, number of values, values. Type 16: a whole number of 64 bits, which fills the field.
        file.seek(at + 2)
        file.write(struct.pack("<HQQ", 16, value if field == 4 else 1, value if field == 8 else 16))
    with pytest.raises(SlideError):
        open_source(path)


def test_a_directory_with_more_entries_than_the_file_has_bytes_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "s.tif"
    tifffile.imwrite(path, smooth(*SIZE), photometric="rgb", bigtiff=True, metadata=None)
    with tifffile.TiffFile(path) as tiff:
        at = tiff.pages[0].offset  # type: ignore[union-attr]
    for count in (2**40, 2**64 - 1):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(struct.pack("<Q", count))
        assert is_truncated(path)
