"""Slides stored turned or mirrored, and slides with bounds: what is shown, and where it stands in the file."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import tifffile

from hyfi_core.plan.box import Box
from pathology.readers.openslide_source import OpenSlideSource
from pathology.readers.source_level import BadTile
from pathology.readers.sources import open_source
from tests.pathology.readers.scanners import smooth, write_leica

STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, 1),  # shown after a quarter turn clockwise
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, -1),
}


@pytest.mark.parametrize("orientation", STORED)
def test_a_turned_slide_is_shown_upright(tmp_path: Path, orientation: int) -> None:
    image = smooth(300, 420)
    stored = np.ascontiguousarray(STORED[orientation](image))
    path = tmp_path / "a.tif"
    tags = [] if orientation == 1 else [(274, "H", 1, orientation, True)]
    with tifffile.TiffWriter(path) as tiff:
        for level, picture in enumerate((stored, stored[::2, ::2])):
            tiff.write(
                picture,
                photometric="rgb",
                compression="deflate",
                tile=(128, 128),
                extratags=tags,
                subfiletype=1 if level else 0,
                resolution=(20_000, 10_000),
                resolutionunit="CENTIMETER",
                metadata=None,
            )
    for source in (open_source(path), pickle.loads(pickle.dumps(open_source(path)))):
        turned = orientation >= 5
        assert source.mpp == pytest.approx((0.5, 1.0) if turned else (1.0, 0.5))
        assert [(v.height_px, v.width_px) for v in source.levels] == [(300, 420), (150, 210)]
        for box in (Box.of_size(300, 420), Box(17, 130, 200, 419)):
            assert np.array_equal(source.read(box, 0), image[box.slices()])
        coarse = STORED[orientation](stored[::2, ::2]) if orientation not in (6, 8) else None
        if coarse is not None:
            assert np.array_equal(source.read(Box.of_size(150, 210), 1), coarse)
        for y, x in ((0, 0), (299, 419), (31, 270)):
            (a, b, c), (d, e, f) = source.to_file_px
            centre = (y + 0.5, x + 0.5)
            at = (a * centre[0] + b * centre[1] + c - 0.5, d * centre[0] + e * centre[1] + f - 0.5)
            assert np.array_equal(stored[int(at[0]), int(at[1])], image[y, x])


def test_a_bad_tile_of_a_turned_slide_has_its_upright_place(tmp_path: Path) -> None:
    image = smooth(300, 420)
    path = tmp_path / "a.tif"
    tifffile.imwrite(
        path,
        np.rot90(image, 1),
        photometric="rgb",
        compression="deflate",
        tile=(128, 128),
        extratags=[(274, "H", 1, 6, True)],
        metadata=None,
    )
    with tifffile.TiffFile(path) as tiff:
        offset = tiff.pages[0].dataoffsets[0]  # the stored top left is the upright top right
    data = bytearray(path.read_bytes())
    data[offset : offset + 30] = b"\x99" * 30
    path.write_bytes(data)
    bad: list[BadTile] = []
    out = np.empty((300, 420, 3), np.uint8)
    open_source(path).read_into(Box.of_size(300, 420), 0, out, bad)
    assert [tile.box for tile in bad] == [Box(0, 128, 292, 420)]
    expected = image.copy()
    expected[0:128, 292:420] = 255
    assert np.array_equal(out, expected)


def test_a_slide_with_bounds_counts_from_their_first_pixel(tmp_path: Path) -> None:
    image = smooth(700, 900)
    path = write_leica(tmp_path / "a.scn", image, corner=(320, 640), collection=(1600, 2400))
    source = open_source(path)
    assert isinstance(source, OpenSlideSource) and source.vendor == "leica"
    assert source.bounds == Box(320, 1020, 640, 1540)
    assert source.to_file_px == ((1.0, 0.0, 320.0), (0.0, 1.0, 640.0))
    assert (source.levels[0].height_px, source.levels[0].width_px) == (700, 900)
    found = source.read(Box.of_size(700, 900), 0)
    assert np.abs(found.astype(int) - image).mean() < 4
    assert np.array_equal(source.read(Box(100, 200, 300, 500), 0), found[100:200, 300:500])


def test_what_lies_outside_the_scanned_areas_shows_the_background(tmp_path: Path) -> None:
    path = write_leica(tmp_path / "a.scn", smooth(600, 600), corner=(0, 0), collection=(1600, 1600))
    source = OpenSlideSource(path)
    source.bounds = Box.of_size(1600, 1600)
    beyond = source.read(Box(700, 800, 700, 900), 0)
    assert (beyond == 255).all()
    source._background = np.array([10, 20, 30], np.float32)
    assert (source.read(Box(700, 710, 700, 710), 0) == (10, 20, 30)).all()
