"""Levels of a pyramid that are none: of another shape, of another picture, padded to whole tiles."""

from __future__ import annotations

import pickle
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tifffile

from data import open_store
from hyfi_core.plan.box import Box
from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.readers.facts.levels import StatedLevel, fitted_levels
from pathology.readers.sources import open_source
from tests.pathology.readers.dicom_slides import write_file, write_series
from tests.pathology.tiffs import RGB, halved, stained

HOW = {"photometric": "rgb", "metadata": None, "tile": (64, 64)}


def textured(height: int, width: int, seed: int = 0) -> RGB:
    """Return tissue with structures of all sizes."""
    rng = np.random.default_rng(seed)
    stains = np.zeros((2, height, width))
    for cell in (4, 16, 64):
        for stain in stains:
            coarse = rng.random((-(-height // cell), -(-width // cell)))
            stain += np.kron(coarse, np.ones((cell, cell)))[:height, :width] / 3
    h, e = stains[..., None]
    return (242 * np.exp(-0.8 * h * (0.65, 0.70, 0.29) - 0.6 * e * (0.07, 0.99, 0.11))).astype(np.uint8)


def write(path: Path, pages: list[RGB], ome: bool = False, **how: object) -> Path:
    place = {"resolution": (2e4, 2e4), "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(path, ome=ome) as tiff:
        for k, page in enumerate(pages):
            sub = {"subifds": len(pages) - 1, "metadata": {"axes": "YXS"}} if ome and not k else {}
            tiff.write(page, subfiletype=bool(k), **{**HOW, **(place if not k else {}), **sub, **how})
    return path


def sizes(path: Path) -> tuple[list[tuple[int, int]], list[float], list[str]]:
    with closing(open_source(path)) as slide:
        found = [(v.height_px, v.width_px) for v in slide.levels]
        return found, [v.downsample[0] for v in slide.levels], [note.text for note in slide.facts.notes]


@pytest.mark.parametrize("order", ["last", "between"])
@pytest.mark.parametrize("ome", [False, True])
def test_a_macro_of_another_shape_is_left_out(tmp_path: Path, order: str, ome: bool) -> None:
    finest = textured(512, 512)
    macro = np.full((64, 192, 3), (60, 120, 200), np.uint8)
    pages = [finest, halved(finest), macro] if order == "last" else [finest, macro, halved(finest)]
    path = write(tmp_path / "a.tif", pages, ome)
    found, factors, notes = sizes(path)
    if ome and order == "between":  # tifffile does not take it for a level either, nor what follows
        assert found[0] == (512, 512) and (64, 192) not in found
        return
    assert found == [(512, 512), (256, 256)] and factors == [1, 2]
    assert ome or ("64 × 192" in notes[0] and "8 times fewer rows and 2.667 times fewer columns" in notes[0])
    record = ingest_slide(path, tmp_path / "store", IngestOptions(mpp=4.0))
    assert record.status == "done" and (ome or "levels_left_out" in record.flags)


@pytest.mark.parametrize("ome", [False, True])
def test_another_picture_of_the_right_shape_is_left_out(tmp_path: Path, ome: bool) -> None:
    finest, other = textured(1024, 768), textured(1024, 768, seed=5)
    path = write(
        tmp_path / "a.tif", [finest, halved(finest), halved(halved(other)), halved(halved(halved(finest)))], ome
    )
    found, factors, notes = sizes(path)
    assert found == [(1024, 768), (512, 384), (128, 96)] and factors == [1, 2, 8]
    assert len(notes) == 1 and "256 × 192" in notes[0] and "does not show" in notes[0]
    with closing(open_source(path)) as slide:
        assert np.array_equal(slide.read(Box.of_size(128, 96), 2), halved(halved(halved(finest))))


@pytest.mark.parametrize("turned", ["rot180", "mirrored", "pale"])
def test_a_level_that_is_turned_or_of_other_colours_is_left_out(tmp_path: Path, turned: str) -> None:
    finest = textured(1024, 1024)
    changed = {
        "rot180": lambda a: a[::-1, ::-1],
        "mirrored": lambda a: a[:, ::-1],
        "pale": lambda a: 255 - (255 - a) // 3,
    }
    path = write(tmp_path / "a.tif", [finest, changed[turned](halved(finest))])
    found, _, notes = sizes(path)
    assert found == [(1024, 1024)] and "does not show" in notes[0]


def test_padded_levels_have_their_whole_factor_and_no_padding(tmp_path: Path) -> None:
    """CAMELYON's files: sizes are rounded up to whole tiles, factors are 2, 4, 8."""
    finest = textured(1000, 900)
    pages, level = [finest], finest
    for _ in range(3):
        level = halved(level)
        pad = [(0, -side % 64) for side in level.shape[:2]]
        pages.append(np.pad(level, [*pad, (0, 0)], constant_values=255))
    assert [page.shape[:2] for page in pages] == [(1000, 900), (512, 512), (256, 256), (128, 128)]
    path = write(tmp_path / "a.tif", pages)
    found, factors, notes = sizes(path)
    assert found == [(1000, 900), (500, 450), (250, 225), (125, 113)] and factors == [1, 2, 4, 8] and notes == []
    with closing(open_source(path)) as slide:
        for k, page in enumerate(pages):
            height, width = found[k]
            assert np.array_equal(slide.read(Box.of_size(height, width), k), page[:height, :width])


def test_padded_jpeg_levels_can_be_copied(tmp_path: Path) -> None:
    finest = textured(600, 600)
    small = np.pad(halved(finest), [(0, 20), (0, 20), (0, 0)], constant_values=255)
    path = write(tmp_path / "a.tif", [finest, small], compression="jpeg")
    assert ingest_slide(path, tmp_path / "store", IngestOptions(lossless=True)).status == "done"
    stored = open_store(tmp_path / "store", "a")
    assert [(v.height_px, v.width_px, v.mpp[0]) for v in stored.levels] == [(600, 600, 0.5), (300, 300, 1.0)]


@pytest.mark.parametrize(
    ("full", "part", "tile", "fits"),
    [
        ((13812, 29382), (3453, 7346), (256, 256), (4.0, 4.0)),
        ((13812, 29382), (864, 1837), (256, 256), (16.0, 16.0)),
        ((97792, 221184), (48896, 110592), (512, 512), (2.0, 2.0)),
        ((97792, 221184), (49152, 110592), (512, 512), (2.0, 2.0)),
        ((97792, 221184), (3072, 7168), (512, 512), (32.0, 32.0)),
        ((1000, 1000), (300, 300), (64, 64), (1000 / 300, 1000 / 300)),
        ((2048, 2048), (256, 768), (256, 256), None),
        ((2048, 2048), (768, 256), (256, 256), None),
    ],
)
def test_sizes_that_fit(
    full: tuple[int, int], part: tuple[int, int], tile: tuple[int, int], fits: tuple[float, float] | None
) -> None:
    level = fitted_levels([StatedLevel(full, tile), StatedLevel(part, tile)])[1]
    assert (None if level is None else level.downsample) == fits


def test_glass_has_nothing_to_compare_and_damage_is_no_difference(tmp_path: Path) -> None:
    glass = np.full((512, 512, 3), 243, np.uint8)
    assert sizes(write(tmp_path / "a.tif", [glass, halved(glass)]))[0] == [(512, 512), (256, 256)]
    finest = stained(512, 512)
    path = write(tmp_path / "b.tif", [finest, halved(finest)], compression="jpeg")
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[1]
        spans = list(zip(page.dataoffsets, page.databytecounts, strict=True))
    data = bytearray(path.read_bytes())
    for offset, length in spans:
        data[offset : offset + length] = b"\x99" * length
    path.write_bytes(data)
    assert sizes(path)[0] == [(512, 512), (256, 256)]


@pytest.mark.parametrize("wrong", ["another picture", "another shape"])
def test_levels_that_openslide_reads_are_checked_likewise(tmp_path: Path, wrong: str) -> None:
    image = textured(768, 1024)
    files = write_series(tmp_path / "good", "a", image, "1.2.3", levels=3)
    with closing(open_source(files[1])) as slide:
        assert [level.downsample for level in slide.levels] == [(1, 1), (2, 2), (4, 4)] and not slide.facts.notes
        good = [slide.read(Box.of_size(v.height_px, v.width_px), k) for k, v in enumerate(slide.levels)]
    write_series(tmp_path / "bad", "a", image, "1.2.3", levels=3)
    other = halved(image)[::-1] if wrong == "another picture" else halved(image)[:, :300]
    resampled = "DERIVED\\PRIMARY\\VOLUME\\RESAMPLED"
    file = write_file(tmp_path / "bad" / "a-1.dcm", other, "1.2.3.1", "1.2.3", mpp=1.0, image_type=resampled)
    with closing(open_source(file)) as slide:
        for one in (slide, pickle.loads(pickle.dumps(slide))):
            assert [level.downsample for level in one.levels] == [(1, 1), (4, 4)]
            for k, level in enumerate(one.levels):
                assert np.array_equal(one.read(Box.of_size(level.height_px, level.width_px), k), good[2 * k])
            assert len(one.facts.notes) == 1 and "level 1" in one.facts.notes[0].text
    record = ingest_slide(file, tmp_path / "store", IngestOptions(mpp=1.0))
    assert record.status == "done" and "levels_left_out" in record.flags
