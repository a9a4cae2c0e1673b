from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import tifffile

from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.ingest import level_reader
from pathology.ingest.level_reader import LevelReader, choose_level
from pathology.readers.resample import make_taps, resample
from pathology.readers.source_level import RGB, BadTile, SourceLevel, levels_of_sizes, translation
from pathology.readers.sources import open_source
from tests.pathology.tiffs import MakeSlide


@dataclass
class DrawnSource:
    """A source in memory that notes what is asked of it."""

    images: list[RGB]
    tile_px: int = 64
    asked: list[Box] = field(default_factory=list)
    vendor: str = "drawn"
    objective_power: float | None = None
    icc: bytes | None = None
    mpp: tuple[float, float] | None = (0.25, 0.25)

    def __post_init__(self) -> None:
        geometry = levels_of_sizes([image.shape[:2] for image in self.images])
        tile = (self.tile_px, self.tile_px)
        self.levels = tuple(SourceLevel(v.height_px, v.width_px, v.downsample, tile) for v in geometry)
        self.bounds = Box.of_size(*self.images[0].shape[:2])
        self.to_file_px = translation((0, 0))

    def read(self, box: Box, level: int) -> RGB:
        out = np.empty((*box.shape, 3), np.uint8)
        self.read_into(box, level, out)
        return out

    def read_into(self, box: Box, level: int, out: RGB, bad: list[BadTile] | None = None) -> None:
        self.asked.append(box)
        out[...] = self.images[level][box.slices()]

    def close(self) -> None:
        pass


def noise(height: int, width: int, seed: int = 0) -> RGB:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def at_once(image: RGB, ratio: float, box: Box) -> np.ndarray:
    rows = make_taps(box.y0, box.y1, ratio, image.shape[0])
    columns = make_taps(box.x0, box.x1, ratio, image.shape[1])
    part = image[rows.first : rows.end, columns.first : columns.end]
    return resample(np.ascontiguousarray(part.transpose(2, 0, 1)), rows, columns)


@pytest.mark.parametrize("mpp", [0.2475, 0.25, 0.37, 0.5, 0.9888, 2.3])
def test_bands_give_what_the_whole_level_at_once_gives(mpp: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level_reader, "_BAND_PX", 30_000)
    monkeypatch.setattr(level_reader, "_WIDEST_PX", 300)
    source = DrawnSource([noise(700, 900)])
    choice = choose_level(source, (0.25, 0.25), mpp)
    whole = Box.of_size(choice.height_px, choice.width_px)
    for box in (whole, Box(whole.y1 // 3, whole.y1, whole.x1 // 4, whole.x1), Box(3, 20, 5, 6)):
        found = LevelReader(source, choice, 0.0).read(box)
        assert np.array_equal(found, at_once(source.images[0], mpp / 0.25, box))


@pytest.mark.parametrize("mpp", [0.2475, 0.37, 1.1])
def test_no_tile_is_asked_for_twice(mpp: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level_reader, "_BAND_PX", 64 * 900)
    source = DrawnSource([noise(700, 900)])
    choice = choose_level(source, (0.25, 0.25), mpp)
    LevelReader(source, choice, 0.0).read(Box.of_size(choice.height_px, choice.width_px))
    assert len(source.asked) > 3
    assert sum(box.area for box in source.asked) == 700 * 900
    assert all(box.y0 % 64 == 0 for box in source.asked)


def test_the_right_level_is_decoded_and_no_more() -> None:
    # A 40x slide at 0.2528 µm whose second level has 1.0111 µm: for 1.0 µm that one is fine enough, within 2 %.
    source = DrawnSource([noise(1200, 1600), noise(300, 400, 1), noise(75, 100, 2)])
    choice = choose_level(source, (0.252775, 0.252775), 1.0)
    assert (choice.level, choice.upsampled) == (1, False)
    assert choice.mpp == pytest.approx((1.0111, 1.0111)) and choice.ratio == pytest.approx((0.98902, 0.98902), abs=1e-4)
    found = LevelReader(source, choice, 0.0).read(Box.of_size(choice.height_px, choice.width_px))
    assert found.shape == (3, 303, 404)
    assert sum(box.area for box in source.asked) == 300 * 400


@pytest.mark.parametrize(("mpp", "level"), [(0.25, 0), (0.99, 0), (0.992, 1), (1.0, 1), (3.9, 1), (4.0, 2), (9.0, 2)])
def test_the_coarsest_level_within_two_per_cent_is_chosen(mpp: float, level: int) -> None:
    source = DrawnSource([noise(1200, 1600), noise(300, 400), noise(75, 100)])
    assert choose_level(source, (0.252775, 0.252775), mpp).level == level


def test_a_source_that_is_too_coarse_is_refused_with_what_would_work() -> None:
    source = DrawnSource([noise(40, 40)])
    assert choose_level(source, (0.52, 0.52), 0.5).upsampled
    with pytest.raises(SlideError, match=r"0\.53 µm/px.*--mpp 0\.53 would work"):
        choose_level(source, (0.53, 0.53), 0.5)


def damaged(path: Path, *indices: int) -> Path:
    with tifffile.TiffFile(path) as tiff:
        places = [tiff.pages[0].dataoffsets[index] for index in indices]
    data = bytearray(path.read_bytes())
    for offset in places:
        data[offset : offset + 30] = b"\x99" * 30
    path.write_bytes(data)
    return path


def test_bad_tiles_are_counted_once_and_white_and_the_rest_is_read(make_slide: MakeSlide) -> None:
    good = open_source(make_slide("good.tiff", compression="jpeg"))
    source = open_source(damaged(make_slide("bad.tiff", compression="jpeg"), 1, 6))
    choice = choose_level(source, (0.5, 0.5), 0.74)
    whole = Box.of_size(choice.height_px, choice.width_px)
    with pytest.raises(TileError, match="rows 0–256, columns 256–512"):
        LevelReader(source, choice, 0.0).read(whole)
    with pytest.raises(SlideError, match="2 of 12 tiles"):
        LevelReader(source, choice, 0.1).read(whole)
    reader = LevelReader(source, choice, 0.2)
    found = [reader.read(whole), reader.read(whole)][1]
    assert (reader.bad_tiles, reader.tiles) == (2, 12)
    expected = good.read(Box.of_size(700, 900), 0).copy()
    for box in (Box(0, 256, 256, 512), Box(256, 512, 512, 768)):
        expected[box.slices()] = 255
    assert np.array_equal(found, at_once(expected, 0.74 / 0.5, whole))
