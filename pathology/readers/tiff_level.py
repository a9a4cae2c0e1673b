"""One level of a TIFF: the positions of its tiles in the file and in the image, and their decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hyfi_core.plan.box import Box
from pathology.errors import SlideError
from pathology.readers.facts.header_budget import MOST_TILES
from pathology.readers.facts.slide_facts import Note
from pathology.readers.resample import make_taps, resample
from pathology.readers.source_level import RGB
from pathology.readers.tile_decoders import Decode, believed_colour, compression_name, make_decoder

_LARGEST_TILE_PX = 2**26
_STRIP_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class TiffLevel:
    """The tiles of one level, row-major. Strips are tiles as wide as the image.

    Attributes:
        height_px: Rows of the level.
        width_px: Columns of the level.
        tile_height_px: Rows of a tile; the last row of tiles may extend beyond the level.
        tile_width_px: Columns of a tile; the last column of tiles may extend beyond the level.
        offsets: First byte of each tile.
        lengths: Bytes of each tile; 0 if the scanner left it out.
        decode: Decoder of the tiles.
        compression: Name of the compression, for messages.
        note: How its tiles contradict its tags; None if they do not.
    """

    height_px: int
    width_px: int
    tile_height_px: int
    tile_width_px: int
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    decode: Decode
    compression: str
    note: Note | None = None

    @property
    def columns(self) -> int:
        """Tiles in a row."""
        return -(-self.width_px // self.tile_width_px)

    def tiles_in(self, box: Box) -> list[int]:
        """Return the indices of the tiles that intersect a box inside the level."""
        height, width = self.tile_height_px, self.tile_width_px
        rows = range(box.y0 // height, -(-box.y1 // height))
        columns = range(box.x0 // width, -(-box.x1 // width))
        return [row * self.columns + column for row in rows for column in columns]

    def tile_box(self, index: int) -> Box:
        """Return the box of a tile, clipped to the level."""
        row, column = divmod(index, self.columns)
        y, x = row * self.tile_height_px, column * self.tile_width_px
        return Box(y, min(y + self.tile_height_px, self.height_px), x, min(x + self.tile_width_px, self.width_px))


def parse_level(page: Any) -> TiffLevel:
    """Return the level of a tifffile page; the file must still be open.

    Raises:
        SlideError: The pixels are not 8-bit RGB or grey, a size is 0, or the page is one large compressed block.
    """
    height, width = int(page.imagelength), int(page.imagewidth)
    tile = (int(page.tilelength), int(page.tilewidth)) if page.is_tiled else (int(page.rowsperstrip), width)
    # RowsPerStrip may be larger than the image: its default, 2³² − 1, means one strip.
    tile = (min(tile[0], height), tile[1]) if not page.is_tiled else tile
    if min(height, width, *tile) < 1:
        raise SlideError(f"the file is damaged: {height} × {width} px in tiles or strips of {tile[0]} × {tile[1]} px")
    offsets = np.asarray(page.dataoffsets, np.int64)
    lengths = np.asarray(page.databytecounts, np.int64)
    # The note is for users: it says if the tags state another colour space.
    colour, note = believed_colour(page, *tile)
    decode = make_decoder(page, *tile, colour)
    if page.compression == 1 and not page.is_tiled:  # 1: not compressed
        tile, offsets, lengths = _split_strips(tile, height, int(page.samplesperpixel) * width, offsets, lengths)
    level = TiffLevel(height, width, *tile, offsets, lengths, decode, compression_name(page), note)
    if tile[0] * tile[1] > _LARGEST_TILE_PX:
        raise SlideError(
            f"the TIFF is not tiled: a single compressed block has {tile[0]} × {tile[1]} px; convert it "
            f"to a tiled TIFF first"
        )
    if len(offsets) != len(lengths) or len(offsets) != -(-height // tile[0]) * level.columns:
        raise SlideError(f"the TIFF lists {len(offsets)} tiles; expected {-(-height // tile[0]) * level.columns}")
    return level


def propagate_missing_tiles(levels: Sequence[TiffLevel]) -> list[TiffLevel]:
    """Return the levels with each tile marked as missing that covers a missing tile of the next finer level.

    Aperio's encoder sometimes leaves out a tile and writes invalid pixels into the coarser tiles that cover it.
    OpenSlide computes these from the finer level.
    """
    marked = [levels[0]]
    for level in levels[1:]:
        finer = marked[-1]
        scale = (level.height_px / finer.height_px, level.width_px / finer.width_px)
        # A copy: the given level keeps its own.
        lengths = level.lengths.copy()
        extent = Box.of_size(level.height_px, level.width_px)
        for index in np.flatnonzero(finer.lengths == 0).tolist():
            tile = finer.tile_box(index)
            y = int(tile.y0 * scale[0]), math.ceil(tile.y1 * scale[0])
            x = int(tile.x0 * scale[1]), math.ceil(tile.x1 * scale[1])
            lengths[level.tiles_in(Box(*y, *x).intersect(extent))] = 0
        marked.append(replace(level, lengths=lengths))
    return marked


def shown_by_finer(levels: Sequence[TiffLevel], index: int, box: Box, read: Callable[[Box, int], RGB]) -> RGB | None:
    """Return the pixels of a box as the next finer level shows them; None if no finer level has tiles there.

    Args:
        levels: All levels, finest first.
        index: Index of the level.
        box: A box of it.
        read: Reads a box of a level.
    """
    level = levels[index]
    # Any finer level will do: where the next one lacks tiles, too, `read` fills them from the one before.
    if not any(_has_tiles(finer, level, box) for finer in levels[:index]):
        return None
    finer = levels[index - 1]
    rows = make_taps(box.y0, box.y1, finer.height_px / level.height_px, finer.height_px)
    columns = make_taps(box.x0, box.x1, finer.width_px / level.width_px, finer.width_px)
    pixels = read(Box(rows.first, rows.end, columns.first, columns.end), index - 1)
    return resample(pixels.transpose(2, 0, 1), rows, columns).transpose(1, 2, 0)


def _has_tiles(finer: TiffLevel, level: TiffLevel, box: Box) -> bool:
    """Whether a finer level stores a tile of what a box of a level covers."""
    fy, fx = finer.height_px / level.height_px, finer.width_px / level.width_px
    outer = Box(int(box.y0 * fy), math.ceil(box.y1 * fy), int(box.x0 * fx), math.ceil(box.x1 * fx))
    covered = outer.intersect(Box.of_size(finer.height_px, finer.width_px))
    return bool(np.any(finer.lengths[finer.tiles_in(covered)]))


def _split_strips(
    strip: tuple[int, int],
    height: int,
    row_bytes: int,
    offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> tuple[tuple[int, int], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Split large uncompressed strips, which can be read in part, into strips of about 1 MiB.

    Args:
        strip: (height, width) of a strip.
        height: Rows of the level.
        row_bytes: Bytes of a row.
        offsets: First byte of each strip.
        lengths: Bytes of each strip; 0 if it is missing.

    Returns:
        (height, width) of the new strips, their offsets, and their lengths in bytes.

    Raises:
        SlideError: There are fewer strips than the height needs, or there would be more than `MOST_TILES`, as with a
            damaged height.
    """
    if len(offsets) < -(-height // strip[0]):
        raise SlideError(f"the TIFF lists {len(offsets)} strips; expected {-(-height // strip[0])}")
    step = max(1, min(strip[0], _STRIP_BYTES // row_bytes))
    while strip[0] % step:  # all new strips but the last must have the same height
        step -= 1
    # A strip of a prime height can only be split into single rows, which may be too many.
    if height // step > MOST_TILES:
        raise SlideError(
            f"{height:,} rows in strips of {strip[0]:,} would be read in {height // step:,} parts; up to "
            f"{MOST_TILES:,} are read. The file is damaged, or must be written with tiles"
        )
    firsts = np.arange(0, height, step, dtype=np.int64)
    starts = offsets[firsts // strip[0]] + firsts % strip[0] * row_bytes
    rows = np.where(lengths[firsts // strip[0]] > 0, np.minimum(step, height - firsts), 0)
    return (step, strip[1]), starts, rows * row_bytes
