"""The level of a source that a store is made from, and its boxes at the store's own microns per pixel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.resample import Planes, Taps, make_taps, resample, source_box, target_size
from pathology.source_level import RGB
from pathology.sources import SlideSource

FINE_ENOUGH = 1.02
"""A level this much coarser than asked still counts as fine enough."""
UPSAMPLED_TO = 1.05
"""The finest level may be this much coarser than asked; it is upsampled and flagged."""
_CELL_SOURCE_PX = 2048
_TILE_PX = 256


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """Which level is read, and how many of its pixels lie under one pixel of the store, (y, x)."""

    level: int
    mpp: tuple[float, float]
    ratio: tuple[float, float]
    height_px: int
    width_px: int
    upsampled: bool


def choose_level(source: SlideSource, source_mpp: tuple[float, float], mpp_um: float) -> LevelChoice:
    """Choose the coarsest level that is not coarser than 1.02 × ``mpp_um``.

    Args:
        source: The slide.
        source_mpp: Microns per pixel (y, x) of its finest level.
        mpp_um: What the store is to have.

    Raises:
        SlideError: The finest level is more than 5 % coarser than asked.
    """
    finest = sum(source_mpp) / 2
    fits = [k for k, level in enumerate(source.levels) if finest * max(level.downsample) <= FINE_ENOUGH * mpp_um]
    if not fits and finest > UPSAMPLED_TO * mpp_um:
        raise SlideError(
            f"its finest level has {finest:.4g} µm/px, more than 5 % coarser than the {mpp_um:g} asked for; "
            f"--mpp {finest:.3g} would work"
        )
    index = max(fits, key=lambda k: source.levels[k].downsample) if fits else 0
    level = source.levels[index]
    mpp = (source_mpp[0] * level.downsample[0], source_mpp[1] * level.downsample[1])
    ratio = (mpp_um / mpp[0], mpp_um / mpp[1])
    # The size follows from the finest level: a scanner's coarse level may have lost its last row.
    height = target_size(source.levels[0].height_px, mpp_um / source_mpp[0])
    width = target_size(source.levels[0].width_px, mpp_um / source_mpp[1])
    return LevelChoice(index, mpp, ratio, height, width, upsampled=not fits)


class LevelReader:
    """Boxes of the store's finest level out of a source, and the count of tiles that could not be read.

    Memory: the box itself and a few times 2048 × 2048 source pixels.

    Args:
        source: The open slide.
        choice: From `choose_level`.
        max_bad: Share of the level's tiles (256 × 256) that may fail; those are white. 0: the first ends the slide.
    """

    def __init__(self, source: SlideSource, choice: LevelChoice, max_bad: float) -> None:
        self._source, self._choice, self._max_bad = source, choice, max_bad
        level = source.levels[choice.level]
        self._size = (level.height_px, level.width_px)
        self.tiles = -(-level.height_px // _TILE_PX) * -(-level.width_px // _TILE_PX)
        self._bad: set[tuple[int, int]] = set()

    @property
    def bad_tiles(self) -> int:
        """Tiles that could not be decoded so far."""
        return len(self._bad)

    def read(self, box: Box) -> Planes:
        """Return ``(3, h, w)`` uint8 of a box of the store's finest level.

        Raises:
            SlideError: More tiles cannot be decoded than are allowed.
        """
        out: Planes = np.empty((3, *box.shape), np.uint8)
        (ry, rx), (height, width) = self._choice.ratio, self._size
        rows = [make_taps(a, b, ry, height) for a, b in _steps(box.y0, box.y1, ry)]
        columns = [make_taps(a, b, rx, width) for a, b in _steps(box.x0, box.x1, rx)]
        y = 0
        for down in rows:
            below = y + down.index.shape[1]
            x = 0
            for across in columns:
                beyond = x + across.index.shape[1]
                out[:, y:below, x:beyond] = self._cell(down, across)
                x = beyond
            y = below
        return out

    def _cell(self, rows: Taps, columns: Taps) -> Planes:
        pixels = self._pixels(source_box(rows, columns))
        return resample(np.ascontiguousarray(pixels.transpose(2, 0, 1)), rows, columns)

    def _pixels(self, box: Box) -> RGB:
        try:
            return self._source.read(box, self._choice.level)
        except TileError as error:
            if self._max_bad <= 0:
                raise
            return self._tile_by_tile(box, error)

    def _tile_by_tile(self, box: Box, first: TileError) -> RGB:
        out: RGB = np.full((*box.shape, 3), 255, np.uint8)
        for row in range(box.y0 // _TILE_PX, -(-box.y1 // _TILE_PX)):
            for column in range(box.x0 // _TILE_PX, -(-box.x1 // _TILE_PX)):
                y, x = row * _TILE_PX, column * _TILE_PX
                tile = Box(y, y + _TILE_PX, x, x + _TILE_PX).intersect(box)
                try:
                    out[tile.relative_to(box).slices()] = self._source.read(tile, self._choice.level)
                except TileError:
                    self._bad.add((row, column))
                    self._refuse_too_many(first)
        return out

    def _refuse_too_many(self, first: TileError) -> None:
        share = self.bad_tiles / self.tiles
        if share > self._max_bad:
            raise SlideError(
                f"{self.bad_tiles} of {self.tiles} tiles cannot be decoded (--max-bad {self._max_bad:g}): {first}"
            )


def _steps(start: int, stop: int, ratio: float) -> list[tuple[int, int]]:
    """Cut target pixels into steps of a power of two that read about 2048 source pixels each."""
    step = 4096
    while step > 16 and step * ratio > _CELL_SOURCE_PX * 1.05:
        step //= 2
    return [(a, min(a + step, stop)) for a in range(start, stop, step)]
