"""Writes a synthetic slide as a pyramidal, tiled JPEG TIFF in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import imagecodecs
import numpy as np
import tifffile

from data.files import replacing
from hyfi_core.plan.box import Box
from pathology.synthetic.anatomy import Anatomy
from pathology.synthetic.fields import Field
from pathology.synthetic.render import BLOCK_PX, Renderer

TILE_PX = 256
_QUALITY = 88
_SMALLEST_LEVEL_PX = 256


def write_slide(anatomy: Anatomy, path: Path) -> None:
    """Write a slide to ``path`` atomically (temporary file, sync, rename).

    Each level has half the size of the one before, down to at least 256 pixels. Microns per pixel are in the TIFF's
    resolution tags. Memory: one row of blocks (1024 rows of the slide) and the encoded tiles of the reduced levels.

    Raises:
        OSError: The folder cannot be written.
    """
    size = anatomy.spec.size_px
    levels = _levels(size)
    # Offsets of classic TIFF end at 4 GB.
    with replacing(path) as temporary, tifffile.TiffWriter(temporary, bigtiff=size > 40_000) as tiff:
        for number, level in enumerate(levels):
            # While level 0 is rendered and written, its tiles are reduced to those of all other levels.
            tiles = _full_level(anatomy, levels) if number == 0 else level.drain()
            _write_level(tiff, tiles, level.size_px, anatomy.spec.mpp_um * 2**number, reduced=number > 0)


def _levels(size_px: int) -> list[_PyramidLevel]:
    """Return the levels, finest first, each linked to the next coarser one."""
    sizes = [size_px]
    while sizes[-1] // 2 >= _SMALLEST_LEVEL_PX:
        sizes.append(sizes[-1] // 2)
    levels: list[_PyramidLevel] = []
    for edge in reversed(sizes):
        levels.insert(0, _PyramidLevel(edge, levels[0] if levels else None))
    return levels


def _write_level(
    tiff: tifffile.TiffWriter, tiles: Iterator[bytes], size_px: int, mpp_um: float, *, reduced: bool
) -> None:
    """Write the encoded tiles of a level of a pyramid; ``reduced``: whether it is not the finest."""
    tiff.write(
        tiles,
        shape=(size_px, size_px, 3),
        dtype=np.uint8,
        photometric="ycbcr",
        subsampling=(2, 2),
        compression="jpeg",
        tile=(TILE_PX, TILE_PX),
        resolution=(10_000 / mpp_um, 10_000 / mpp_um),
        resolutionunit="CENTIMETER",
        subfiletype=1 if reduced else 0,
        metadata=None,
        software="hyfi synth",
    )


def _full_level(anatomy: Anatomy, levels: list[_PyramidLevel]) -> Iterator[bytes]:
    """Render one row of blocks after the other and yield level 0's tiles; reduced levels are filled on the way."""
    renderer, size = Renderer(anatomy), levels[0].size_px
    for y in range(0, size, BLOCK_PX):
        levels[0].feed(renderer.read(Box(y, min(y + BLOCK_PX, size), 0, size)))
        if y + BLOCK_PX >= size:  # before the last tiles are yielded: the writer does not resume after them
            levels[0].finish()
        yield from levels[0].drain()


class _PyramidLevel:
    """A level that is filled from the top; keeps less than one row of tiles as pixels, finished tiles encoded."""

    def __init__(self, size_px: int, coarser: _PyramidLevel | None) -> None:
        self.size_px, self.coarser = size_px, coarser
        self.encoded: list[bytes] = []
        self._open_rows = np.empty((0, size_px, 3), np.uint8)

    def feed(self, rows: Field) -> None:
        """Add rows ``(n, size_px, 3)``; full rows of tiles are encoded, and passed to the next level at half size."""
        self._open_rows = np.concatenate([self._open_rows, rows])
        while len(self._open_rows) >= TILE_PX:
            band, self._open_rows = self._open_rows[:TILE_PX], self._open_rows[TILE_PX:]
            self._finish_band(band)

    def finish(self) -> None:
        """Encode the remaining rows, of this level and of all coarser ones."""
        if len(self._open_rows):
            self._finish_band(self._open_rows)
        if self.coarser is not None:
            self.coarser.finish()

    def drain(self) -> Iterator[bytes]:
        """Yield the encoded tiles and drop them."""
        # Emptied first: while these are written, the next ones are added.
        tiles, self.encoded = self.encoded, []
        yield from tiles

    def _finish_band(self, band: Field) -> None:
        self.encoded += _tiles(band)
        if self.coarser is not None:
            self.coarser.feed(_halved(band, self.coarser.size_px))


def _halved(rows: Field, width: int) -> Field:
    """Return the mean of 2 × 2 pixels; a last odd row or column is dropped."""
    # 16 bits for the sum of four; + 2 rounds.
    even = rows[: rows.shape[0] // 2 * 2, : width * 2].astype(np.uint16)
    total = even[0::2, 0::2] + even[1::2, 0::2] + even[0::2, 1::2] + even[1::2, 1::2]
    return ((total + 2) >> 2).astype(np.uint8)


def _tiles(rows: Field) -> Iterator[bytes]:
    """Yield the encoded tiles of a band of rows, row-major; incomplete ones are padded with their edge."""
    for y in range(0, rows.shape[0], TILE_PX):
        for x in range(0, rows.shape[1], TILE_PX):
            tile = rows[y : y + TILE_PX, x : x + TILE_PX]
            short = (TILE_PX - tile.shape[0], TILE_PX - tile.shape[1])
            if any(short):
                # The edge, not black: JPEG would ring into the tile.
                tile = np.pad(tile, ((0, short[0]), (0, short[1]), (0, 0)), mode="edge")
            encoded = imagecodecs.jpeg8_encode(
                np.ascontiguousarray(tile), level=_QUALITY, colorspace="RGB", outcolorspace="YCBCR", subsampling="420"
            )
            yield bytes(encoded)
