from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import tifffile

from pathology.errors import SlideError
from pathology.readers.facts import header_budget
from pathology.readers.facts.header_budget import check_directories
from pathology.readers.sources import open_source
from tests.pathology.readers.scanners import smooth
from tests.pathology.readers.vendor_tiffs import write_philips


def empty_tiff(path: Path, side_px: int, tile_px: int, order: str = "<", big: bool = True) -> Path:
    """Write a file whose tiles are all empty: only lists of zeros."""
    count = (-(-side_px // tile_px)) ** 2
    word, size = ("Q", 8) if big else ("I", 4)
    fields = [(256, 4, 1, side_px), (257, 4, 1, side_px), (322, 4, 1, tile_px), (323, 4, 1, tile_px)]
    entries = len(fields) + 1
    first = 16 if big else 8
    lists_at = first + (8 if big else 2) + entries * (20 if big else 12) + size
    head = (b"II" if order == "<" else b"MM") + struct.pack(order + "H", 43 if big else 42)
    head += struct.pack(order + "HHQ", 8, 0, first) if big else struct.pack(order + "I", first)
    body = struct.pack(order + ("Q" if big else "H"), entries)
    for tag, kind, number, value in fields:
        body += struct.pack(f"{order}HH{word}", tag, kind, number) + struct.pack(order + "I", value).ljust(size, b"\0")
    body += struct.pack(f"{order}HH{word}{word}", 324, 16 if big else 4, count, lists_at)
    path.write_bytes(head + body + struct.pack(order + word, 0) + bytes(count * size))
    return path


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("big", [False, True])
def test_more_tiles_than_a_slide_has_are_refused_before_anything_reads_them(
    tmp_path: Path, order: str, big: bool
) -> None:
    path = empty_tiff(tmp_path / "x.tif", 300_000, 256, order, big)
    with pytest.raises(SlideError, match=r"list 1,373,584 tiles .* for 300,000 x 300,000 px; up to 1,000,000 are read"):
        open_source(path)
    check_directories(empty_tiff(tmp_path / "y.tif", 200_000, 256, order, big))


@pytest.mark.parametrize("page", [0, 1])
def test_a_tile_for_which_no_process_has_memory_is_refused_before_openslide_aborts(tmp_path: Path, page: int) -> None:
    path = write_philips(tmp_path / "x.tiff", smooth(640, 896))
    check_directories(path)
    with tifffile.TiffFile(path) as tiff:
        at = tiff.pages[page].tags["TileWidth"].offset
    with path.open("r+b") as file:
        file.seek(at + 2)
        # Type 4: 32 bits; one value.
        file.write(struct.pack("<HII", 4, 1, 2**31 - 1))
    with pytest.raises(SlideError, match="tiles of 2,147,483,647 x 128 px"):
        open_source(path)


def test_a_size_that_is_beyond_the_end_is_left_to_the_readers(tmp_path: Path) -> None:
    """A width of 64 bits in a classic TIFF is not in its entry but elsewhere, here nowhere."""
    entries = struct.pack("<HHII", 256, 16, 1, 10**6) + struct.pack("<HHII", 257, 4, 1, 100)
    path = tmp_path / "x.tif"
    path.write_bytes(b"II*\0" + struct.pack("<IH", 8, 2) + entries + struct.pack("<I", 0))
    check_directories(path)
    with pytest.raises(SlideError):
        open_source(path)


def test_tiles_of_all_directories_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the chain and of SubIFDs: 16 tiles, 4 below them, and 16 of a second page."""
    pixels = np.zeros((64, 64, 3), np.uint8)
    with tifffile.TiffWriter(tmp_path / "x.tif") as file:
        file.write(pixels, tile=(16, 16), subifds=1, photometric="rgb")
        file.write(pixels[::2, ::2], tile=(16, 16), subfiletype=1, photometric="rgb")
        file.write(pixels, tile=(16, 16), photometric="rgb")
    monkeypatch.setattr(header_budget, "MOST_TILES", 36)
    check_directories(tmp_path / "x.tif")
    monkeypatch.setattr(header_budget, "MOST_TILES", 35)
    with pytest.raises(SlideError, match="36 tiles or strips"):
        check_directories(tmp_path / "x.tif")


def test_directories_count_and_a_circle_of_them_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tifffile.TiffWriter(tmp_path / "x.tif") as file:
        for _ in range(5):
            file.write(np.zeros((16, 16), np.uint8))
    monkeypatch.setattr(header_budget, "MOST_DIRECTORIES", 4)
    with pytest.raises(SlideError, match="more than 4 directories"):
        check_directories(tmp_path / "x.tif")
    circle = struct.pack("<2sHI", b"II", 42, 8) + struct.pack("<HHHIII", 1, 256, 4, 1, 16, 8)
    (tmp_path / "y.tif").write_bytes(circle.ljust(32, b"\0"))
    check_directories(tmp_path / "y.tif")


@pytest.mark.parametrize("length", [8, 15, 20, 40, 60, 100])
def test_damaged_directories_are_left_to_the_readers(tmp_path: Path, length: int) -> None:
    whole = empty_tiff(tmp_path / "x.tif", 1024, 256).read_bytes()
    (tmp_path / "cut.tif").write_bytes(whole[:length])
    check_directories(tmp_path / "cut.tif")
    wild = np.random.default_rng(length).integers(0, 256, len(whole), dtype=np.uint8)
    (tmp_path / "wild.tif").write_bytes(whole[:16] + wild.tobytes()[16:])
    check_directories(tmp_path / "wild.tif")


@pytest.mark.parametrize("big", [False, True])
def test_zeros_in_place_of_the_directory_are_an_unfinished_copy(tmp_path: Path, big: bool) -> None:
    path = tmp_path / "x.tif"
    tifffile.imwrite(path, np.zeros((64, 64, 3), np.uint8), tile=(16, 16), photometric="rgb", bigtiff=big)
    data = path.read_bytes()
    first = header_budget.first_directory(data[:16])
    path.write_bytes(data[:first] + bytes(len(data) - (first or 0)))
    with pytest.raises(SlideError, match=f"directory at byte {first} is empty.* copy it again"):
        open_source(path)


def test_a_damaged_directory_does_not_hide_the_others(tmp_path: Path) -> None:
    """Directory 1 has its tiles and two SubIFDs: one of large tiles, and one of which the file ends too early."""
    path = tmp_path / "x.tif"
    huge = struct.pack("<HHHIIHHII", 2, 322, 4, 1, 2**20, 323, 4, 1, 2**20) + struct.pack("<I", 0)
    first = struct.pack("<HHHII", 1, 330, 4, 2, 26) + struct.pack("<I", 0)
    offsets = struct.pack("<II", 34, 34 + len(huge))
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + first + offsets + huge + struct.pack("<H", 9))
    with pytest.raises(SlideError, match="tiles of 1,048,576 x 1,048,576 px"):
        check_directories(path)
