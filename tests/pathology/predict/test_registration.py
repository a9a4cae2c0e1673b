"""Crosses of a known place, through reading, resampling and the pyramid: each is found within half a pixel of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hyfi_core.plan.box import Box
from pathology.arrays import Planes
from pathology.ingest.level_reader import LevelReader, choose_level
from pathology.ingest.pyramid import PyramidBuilder, level_sizes
from pathology.readers.slide_source import SlideSource
from pathology.readers.source_level import RGB, BadTile, SourceLevel, translation
from pathology.readers.sources import open_source
from tests.pathology.tiffs import write_slide

MPP = 0.25
STEP_PX = 800
ARM_PX, HALF_PX = 24, 80


def crosses(length_px: int) -> np.ndarray:
    """Return where the centres are along an axis, in pixels from the corner of the slide's first pixel."""
    return np.arange(STEP_PX // 2, length_px - HALF_PX, STEP_PX) + 0.0


def draw(height: int, width: int) -> RGB:
    image = np.full((height, width, 3), 240, np.uint8)
    for y in crosses(height).astype(int):
        for x in crosses(width).astype(int):
            image[y - ARM_PX // 2 : y + ARM_PX // 2, x - HALF_PX : x + HALF_PX] = 20
            image[y - HALF_PX : y + HALF_PX, x - ARM_PX // 2 : x + ARM_PX // 2] = 20
    return image


def found_centres(level: Planes, expected_y: np.ndarray, expected_x: np.ndarray, reach: float) -> np.ndarray:
    """Return the (y, x) centre of darkness around each expected place, in the level's own pixels."""
    dark = 240.0 - level[0]
    centres = []
    for y in expected_y:
        for x in expected_x:
            rows = slice(max(0, round(y - reach)), round(y + reach))
            columns = slice(max(0, round(x - reach)), round(x + reach))
            part = dark[rows, columns]
            at_y, at_x = np.mgrid[
                rows.start : rows.start + part.shape[0], columns.start : columns.start + part.shape[1]
            ]
            centres.append([(part * (at_y + 0.5)).sum() / part.sum(), (part * (at_x + 0.5)).sum() / part.sum()])
    return np.array(centres).reshape(len(expected_y), len(expected_x), 2)


def levels_of(source: SlideSource, mpp: float) -> list[Planes]:
    choice = choose_level(source, (MPP, MPP), mpp)
    sizes = level_sizes(choice.height_px, choice.width_px, at_least=4)
    levels: list[Planes] = [np.zeros((3, s.height_px, s.width_px), np.uint8) for s in sizes]

    def write(level: int, y0: int, x0: int, block: Planes) -> None:
        levels[level][:, y0 : y0 + block.shape[1], x0 : x0 + block.shape[2]] = block

    PyramidBuilder(sizes, LevelReader(source, choice, 0.0).read, write, shard_px=512).build()
    return levels


@pytest.mark.parametrize(("mpp", "pyramid"), [(0.37, 1), (0.5, 3), (1.0, 1), (1.0, 3), (2.3, 1), (2.3, 3)])
def test_every_cross_is_where_it_belongs_at_all_levels(tmp_path: Path, mpp: float, pyramid: int) -> None:
    height, width = 2400, 3203
    source = open_source(write_slide(tmp_path / "a.tif", draw(height, width), MPP, levels=pyramid))
    y, x = crosses(height), crosses(width)
    for k, level in enumerate(levels_of(source, mpp)):
        scale = MPP / (mpp * 2**k)
        centres = found_centres(level, y * scale, x * scale, STEP_PX / 2 * scale)
        assert np.abs(centres[..., 0] - (y * scale)[:, None]).max() < 0.5
        assert np.abs(centres[..., 1] - (x * scale)[None, :]).max() < 0.5
        if k == 0:
            assert np.abs(centres - np.stack(np.meshgrid(y * scale, x * scale, indexing="ij"), -1)).max() < 0.1


class Endless:
    """A strip with a bar at every 800th column: only what is asked for is drawn."""

    def __init__(self, width_px: int) -> None:
        self.levels = (SourceLevel(64, width_px, (1.0, 1.0)),)
        self.mpp, self.bounds, self.to_file_px = (MPP, MPP), Box.of_size(64, width_px), translation((0, 0))
        self.vendor, self.objective_power, self.icc = "drawn", None, None

    def read(self, box: Box, level: int) -> RGB:
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        self.read_into(box, level, out)
        return out

    def read_into(self, box: Box, level: int, out: RGB, bad: list[BadTile] | None = None) -> None:
        column = (np.arange(box.x0, box.x1) - STEP_PX // 2 + ARM_PX // 2) % STEP_PX
        out[...] = np.where(column < ARM_PX, 20, 240).astype(np.uint8)[None, :, None]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("mpp", [0.2527, 0.37, 0.9888])
def test_nothing_drifts_over_a_hundred_thousand_pixels(mpp: float) -> None:
    source = Endless(int(100_100 * mpp / MPP))
    choice = choose_level(source, (MPP, MPP), mpp)
    reader = LevelReader(source, choice, 0.0)
    assert choice.width_px >= 100_000
    centres = crosses(source.levels[0].width_px) * MPP / mpp
    centres = centres[np.abs(centres - np.rint(centres / 10_000) * 10_000) < 900]
    reach = int(STEP_PX / 2 * MPP / mpp)
    assert centres[-1] > 99_000
    for centre in centres:
        start = int(centre) - reach
        box = Box(0, min(8, choice.height_px), start, min(int(centre) + reach, choice.width_px))
        dark = 240.0 - reader.read(box)[0]
        found = (dark * (np.arange(box.x0, box.x1) + 0.5)).sum() / dark.sum()
        assert abs(found - centre) < 0.1
