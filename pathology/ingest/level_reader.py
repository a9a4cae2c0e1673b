"""Chooses the source level for a store's resolution, and reads boxes resampled to that resolution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from hyfi_core.plan.box import Box
from pathology.arrays import Planes
from pathology.errors import SlideError
from pathology.readers.resample import Taps, make_taps, resample, target_size
from pathology.readers.slide_source import SlideSource
from pathology.readers.source_level import RGB, BadTile
from pathology.readers.threads import decode_threads, run_in_pool

FINE_ENOUGH = 1.02
"""A level may be coarser than requested by this factor."""
MAX_UPSAMPLING = 1.05
"""The finest level may be coarser than requested by this factor; it is then upsampled and flagged."""
NATIVE_TOLERANCE = 0.01
"""A level whose resolution is within this relative tolerance is not resampled: 0.499 for 0.5."""
_BAND_PX = 2**22
"""Source pixels read at a time: enough tiles for all threads, 12 MiB."""
_WIDEST_PX = 16_384
"""Source columns kept at a time."""
_WHITE = 255


@dataclass(frozen=True, slots=True)
class LevelChoice:
    """The level to read, and how it is resampled.

    Attributes:
        level: Index of the source's level.
        mpp: Microns per pixel (y, x) of that level.
        ratio: Pixels (y, x) of that level for each pixel of the store.
        height_px: Rows of the whole slide at the store's resolution.
        width_px: Columns of the whole slide at the store's resolution.
        upsampled: Whether the level is coarser than the store.
    """

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
        mpp_um: Microns per pixel of the store.

    Raises:
        SlideError: The finest level is more than 5 % coarser than requested.
    """
    finest = sum(source_mpp) / 2
    # Compare the coarser axis, so that neither axis is upsampled.
    fits = [k for k, level in enumerate(source.levels) if finest * max(level.downsample) <= FINE_ENOUGH * mpp_um]
    if not fits and finest > MAX_UPSAMPLING * mpp_um:
        raise SlideError(
            f"its finest level has {finest:.4g} µm/px, more than 5 % coarser than the {mpp_um:g} asked for; "
            f"--mpp {finest:.3g} would work"
        )
    index = max(fits, key=lambda k: source.levels[k].downsample) if fits else 0
    level = source.levels[index]
    mpp = (source_mpp[0] * level.downsample[0], source_mpp[1] * level.downsample[1])
    ratio = (mpp_um / mpp[0], mpp_um / mpp[1])
    # Computed from the finest level, because a scanner's coarse level may lack its last row.
    height = target_size(source.levels[0].height_px, mpp_um / source_mpp[0])
    width = target_size(source.levels[0].width_px, mpp_um / source_mpp[1])
    return LevelChoice(index, mpp, ratio, height, width, upsampled=not fits)


def stored_mpp(source: SlideSource, source_mpp: tuple[float, float], mpp_um: float | None) -> float:
    """Return the microns per pixel of the stored slide: ``mpp_um``, or that of a level so close that it is copied.

    Args:
        source: The slide.
        source_mpp: Microns per pixel (y, x) of its finest level.
        mpp_um: Requested value; None for that of the finest level.

    Returns:
        The value of the nearest level if it is within `NATIVE_TOLERANCE`, so that it is not resampled; else ``mpp_um``.
    """
    finest = sum(source_mpp) / 2
    if mpp_um is None:
        return finest
    candidates = [finest * sum(level.downsample) / 2 for level in source.levels]
    nearest = min(candidates, key=lambda um: abs(um / mpp_um - 1))
    return nearest if abs(nearest / mpp_um - 1) <= NATIVE_TOLERANCE else mpp_um


class LevelReader:
    """Reads boxes of the store's finest level from a source, and counts unreadable tiles.

    Each source tile is decoded at most once for each box. Memory: the result, and bands of source pixels of about
    30 MiB, for any size of box and any ratio.

    Args:
        source: The open slide.
        choice: From `choose_level`.
        max_bad: Fraction of the level's tiles that may fail; they are white. 0: the first one raises.
    """

    def __init__(self, source: SlideSource, choice: LevelChoice, max_bad: float) -> None:
        self._source, self._choice, self._max_bad = source, choice, max_bad
        self._level = source.levels[choice.level]
        self._bad: dict[Box, str] = {}

    @property
    def bad_tiles(self) -> int:
        """Number of unreadable tiles so far."""
        return len(self._bad)

    @property
    def tiles(self) -> int:
        """Number of tiles of the level."""
        return self._level.tiles

    def read(self, box: Box) -> Planes:
        """Return ``(3, h, w)`` uint8 of a box of the store's finest level.

        Raises:
            SlideError: More tiles cannot be decoded than ``max_bad`` allows.
        """
        out: Planes = np.empty((3, *box.shape), np.uint8)
        ry, rx = self._choice.ratio
        size = self._level
        for first, stop in _steps(box.x0, box.x1, max(1, int(_WIDEST_PX / rx))):
            columns = make_taps(first, stop, rx, size.width_px)
            into = out[:, :, first - box.x0 : stop - box.x0]
            rows = make_taps(box.y0, box.y1, ry, size.height_px)
            # The level is not resampled: decode it into the result, without bands and copies.
            if rows.whole == columns.whole == 1:
                self._read_into(Box(rows.first, rows.end, columns.first, columns.end), into.transpose(1, 2, 0))
            else:
                self._resample_into(box.y0, box.y1, columns, into)
        return out

    def _resample_into(self, start: int, stop: int, columns: Taps, out: Planes) -> None:
        """Fill ``out`` with rows ``[start, stop)`` of the store, resampled from one band of source pixels at a time.

        ``columns`` are the taps, that is, the source pixels and their weights, of each column of ``out``.
        """
        ratio, height = self._choice.ratio[0], self._level.height_px
        window = _RowWindow(self._read_into, columns.first, columns.end, height, self._level.tile_px[0])
        step = max(1, int(window.band_rows / ratio))
        for first, end in _steps(start, stop, step):
            all_taps = make_taps(first, end, ratio, height)
            band = window.rows(all_taps.first, all_taps.end)
            band_start = all_taps.first

            # Defaults bind the present values, because the loop changes both names.
            def fill(part: tuple[int, int], band: Planes = band, band_start: int = band_start) -> None:
                rows = make_taps(*part, ratio, height)
                resampled = resample(band[:, rows.first - band_start : rows.end - band_start], rows, columns)
                out[:, part[0] - start : part[1] - start] = resampled

            # Two parts for each thread, so that one that starts late has less left to do.
            part_rows = math.ceil((end - first) / (2 * decode_threads()))
            run_in_pool(fill, list(_steps(first, end, part_rows)))

    def _read_into(self, box: Box, out: RGB) -> None:
        """Read a box into ``out``, with white where tiles cannot be decoded.

        Raises:
            SlideError: There are more such tiles than allowed.
        """
        bad_tiles: list[BadTile] = []
        self._source.read_into(box, self._choice.level, out, None if self._max_bad <= 0 else bad_tiles)
        for tile in bad_tiles:
            # A dict by box: a tile that is read for two boxes counts once.
            self._bad[tile.box] = tile.reason
            common = tile.box.intersect(box)
            # The whole tile, even if the reader has drawn other tiles over a part of it.
            out[common.relative_to(box).slices()] = _WHITE
            if self.bad_tiles > self._max_bad * self.tiles:
                raise SlideError(
                    f"at least {self.bad_tiles} of {self.tiles} tiles cannot be decoded (--max-bad {self._max_bad:g}): "
                    f"{next(iter(self._bad.values()))}"
                )


class _RowWindow:
    """Reads rows of some source columns from top to bottom; keeps rows of partly used tiles, to decode each tile once.

    ```
    step 1    ████████████▒▒▒▒        ▒ rows to the end of the tiles, kept for the next step
    step 2                ▒▒▒▒███████████▒
    ```
    """

    def __init__(
        self, read_into: Callable[[Box, RGB], None], x0: int, x1: int, height_px: int, tile_height_px: int
    ) -> None:
        self._read_into, self._x0, self._x1 = read_into, x0, x1
        self._height, self._tile = height_px, tile_height_px
        self._kept: Planes = np.empty((3, 0, x1 - x0), np.uint8)  # rows from `_first` on
        self._first = 0
        # Rows for each step: whole tiles with about `_BAND_PX` pixels, or a part of a tile if tiles are very high.
        whole_tiles = max(1, round(_BAND_PX / (x1 - x0) / tile_height_px)) * tile_height_px
        self.band_rows = min(whole_tiles, max(1, _BAND_PX // (x1 - x0))) if tile_height_px > 1024 else whole_tiles

    def rows(self, first: int, end: int) -> Planes:
        """Return source rows ``[first, end)`` as ``(3, end - first, w)``, valid until the next call.

        ``first`` must not decrease from call to call.
        """
        kept_end = self._first + self._kept.shape[1]
        if end > kept_end:
            read_start = max(first, kept_end)
            tiles_end = min(self._height, -(-end // self._tile) * self._tile)
            # Read to the end of the tiles, so that they are decoded once, unless that is more than a band.
            read_end = tiles_end if tiles_end - end <= self.band_rows else end
            # Rows before `first` are never needed again.
            reused = self._kept[:, max(0, first - self._first) :] if first < kept_end else self._kept[:, :0]
            joined: Planes = np.empty((3, reused.shape[1] + read_end - read_start, self._x1 - self._x0), np.uint8)
            joined[:, : reused.shape[1]] = reused
            new_rows = joined[:, reused.shape[1] :].transpose(1, 2, 0)
            self._read_into(Box(read_start, read_end, self._x0, self._x1), new_rows)
            self._kept, self._first = joined, read_start - reused.shape[1]
        return self._kept[:, first - self._first : end - self._first]


def _steps(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of parts of ``[start, stop)`` that are ``step`` long, the last at most."""
    for first in range(start, stop, step):
        yield first, min(first + step, stop)
