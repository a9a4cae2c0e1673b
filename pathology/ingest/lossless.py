"""Lossless ingest: copies a scanner's JPEG tiles into a store without decoding.

Levels are those of the scanner, and each chunk is a tile. Before anything is written, some tiles of every level are
compared with the pixels of the slide's reader.

A JPEG tile of a TIFF becomes a standalone JPEG with its tables and a colour marker.

```
tile      SOI [APP0 …]     SOF [DHT …] SOS coded … EOI
whole     SOI APP14 tables SOF [DHT …] SOS coded … EOI
          └─── prefix ───┘
```

Coded data is copied byte by byte. Source: ISO/IEC 10918-1, annex B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simplejpeg

from data.store.codec import Buffers, PixelCodec
from data.store.layout import BACKGROUND, SHARD_PX, ArrayLayout, StoredLevel
from data.store.writer import SlideWriter
from pathology.errors import SlideError, TileError
from pathology.readers.jpeg_tile import APP0, APP14, JpegDecoder, header_segments
from pathology.readers.slide_file import coalesced
from pathology.readers.slide_source import SlideSource
from pathology.readers.tiff_level import TiffLevel
from pathology.readers.tiff_source import TiffSource

_TileBytes = tuple[bytes, int, int]
"""(bytes of a file, start and end of a tile in these bytes)."""
_COMPARED_TILES = 5
"""Tiles of each level that are decoded and compared before the copy begins."""
_EOI = b"\xff\xd9"
_FRAMES = {0xC0, 0xC1, 0xC2}
"""Baseline, extended and progressive frames of Huffman-coded samples."""
_ALL_FRAMES = _FRAMES | {0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
_DAMAGED_HEADER = "its JPEG header is damaged"


@dataclass(slots=True)
class TileJoiner:
    """Converts tiles of one level to standalone JPEGs.

    Attributes:
        prefix: Start marker, colour space and tables, from `pathology.readers.jpeg_tile.jpeg_prefix`.
        tile_px: (height, width) that every tile must have.
    """

    prefix: bytes
    tile_px: tuple[int, int]
    _tile_header: bytes = field(default=b"", repr=False)
    _full_header: bytes = field(default=b"", repr=False)

    def join(self, block: bytes, start: int = 0, end: int | None = None) -> tuple[bytes, int]:
        """Return (header of the standalone JPEG, position of the tile's coded data in ``block``).

        The JPEG is the header and ``block[position:end]``; coded data is not copied.

        Args:
            block: Bytes of the file that contain the tile.
            start: Start of the tile in ``block``.
            end: End of the tile in ``block``; None: the end of the block.

        Raises:
            TileError: The tile is not a complete JPEG of the right size with three colours.
        """
        end = len(block) if end is None else end
        # The last header is cached, because nearly all tiles of a level have the same header.
        if not (self._tile_header and block.startswith(self._tile_header, start, end)):
            tile = block[start:end]
            header, coded = self._header(tile)
            self._tile_header, self._full_header = tile[:coded], self.prefix + header
        coded = start + len(self._tile_header)
        # The end marker may be followed by padding.
        if block.rfind(_EOI, coded, end) < 0:
            raise TileError("its JPEG is cut off: it has no end marker")
        return self._full_header, coded

    def _header(self, tile: bytes) -> tuple[bytes, int]:
        """Return (the tile's header segments except those about colours, start of its coded data)."""
        try:
            segments = list(header_segments(tile))
        except ValueError as error:
            raise TileError(str(error)) from error
        # 4: a segment begins with its marker and its length, two bytes each.
        frames = [(marker, tile[start + 4 : end]) for marker, start, end in segments if marker in _ALL_FRAMES]
        for marker, frame in frames:
            self._check_frame(marker, frame)
        coded = segments[-1][2]  # coded data begins where the last segment ends
        if len(frames) != 1 or coded > len(tile):
            raise TileError(_DAMAGED_HEADER)
        # Without APP0 and APP14, which state the colour space: the prefix has that of the TIFF.
        return b"".join(tile[start:end] for marker, start, end in segments if marker not in (APP0, APP14)), coded

    def _check_frame(self, marker: int, frame: bytes) -> None:
        """Refuse a JPEG whose frame segment states another size, or other than three colours of 8 bits."""
        if len(frame) < 6:
            raise TileError(_DAMAGED_HEADER)
        # A frame segment (ISO/IEC 10918-1, B.2.2): precision, lines, samples a line, components.
        if marker not in _FRAMES or frame[0] != 8 or frame[5] != 3:
            raise TileError(f"its JPEG has {frame[5]} colours of {frame[0]} bits; expected 3 of 8 bits")
        size = (int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big"))
        if size != self.tile_px:
            raise TileError(f"its JPEG has {size[0]} × {size[1]} px; expected {self.tile_px[0]} × {self.tile_px[1]}")


@dataclass(slots=True)
class Copied:
    """Result of a copy: tiles of the finest level, and damaged tiles of any level, which are omitted and white."""

    tiles: int
    bad: list[str] = field(default_factory=list)


class LosslessSlide:
    """A slide whose tiles can be copied.

    Args:
        slide: The slide, open for reading; stays open.

    Raises:
        SlideError: Its pixels are not JPEG tiles that can be copied; the message says what they are.
    """

    def __init__(self, slide: SlideSource) -> None:
        if not isinstance(slide, TiffSource):
            raise SlideError(f"--lossless needs a TIFF of upright JPEG tiles; the slide is {slide.vendor}. {_WITHOUT}")
        self._slide = slide
        self._levels = slide.tiff_levels
        self._joiners = tuple(map(_joiner, self._levels))
        self.layouts = tuple(map(_layout, self._levels))

    def stored_levels(self, mpp: tuple[float, float]) -> tuple[StoredLevel, ...]:
        """Return the levels for a `SlideWriter`; ``mpp`` (y, x) is that of the finest."""
        pairs = zip(self.layouts, self._slide.levels, strict=True)
        return tuple(
            StoredLevel(layout, (mpp[0] * level.downsample[0], mpp[1] * level.downsample[1])) for layout, level in pairs
        )

    def check(self) -> None:
        """Compare some tiles of each level, as they would be stored, with the pixels of the slide's reader.

        Raises:
            SlideError: They differ.
        """
        for k, level in enumerate(self._levels):
            present = np.flatnonzero(level.lengths)
            sampled = np.unique(np.linspace(0, max(0, len(present) - 1), _COMPARED_TILES).astype(int))[: len(present)]
            # Also compare a tile that the scanner omitted: the reader must show white there, as the store will.
            missing = np.flatnonzero(level.lengths == 0)[:1]
            for index in [*present[sampled].tolist(), *missing.tolist()]:
                self._compare(k, index)

    def copy(self, writer: SlideWriter, max_bad: float = 0.0) -> Copied:
        """Copy every tile of every level and return the counts; tiles that the scanner omitted stay omitted, as white.

        Memory: the tiles of three shards.

        Args:
            writer: Made for `stored_levels`.
            max_bad: Largest allowed number of damaged tiles, as a fraction of the tiles of the finest level; damaged
                tiles are omitted, too. 0: the first damaged tile is an error.

        Raises:
            SlideError: More tiles than ``max_bad`` allows are damaged.
            OSError: The store cannot be written.
        """
        copied = Copied(tiles=len(self._levels[0].offsets))
        for k, layout in enumerate(self.layouts):
            for file in layout.files():
                indices = _tiles_of_file(self._levels[k], layout, file)
                # A list of views of the file's bytes, which the writer releases when they are written.
                writer.write_encoded(k, file, [*self._chunks(k, indices, copied, max_bad)])
        return copied

    def _chunks(self, k: int, indices: Sequence[int], copied: Copied, max_bad: float) -> Iterator[Buffers | None]:
        """Yield each tile of level ``k`` as a chunk (header, view of the file's bytes); None for an omitted tile.

        Damaged tiles are omitted, too, and added to ``copied``.
        """
        join = self._joiners[k].join
        for index, encoded in self._tiles(self._levels[k], indices):
            if encoded is None:
                yield None
                continue
            block, start, end = encoded
            try:
                header, coded_start = join(block, start, end)
            except TileError as error:
                copied.bad.append(f"tile {index} of level {k}: {error}")
                _refuse_too_many(copied, max_bad)
                yield None
            else:
                yield header, np.frombuffer(block, np.uint8, end - coded_start, coded_start)

    def _tiles(self, level: TiffLevel, indices: Sequence[int]) -> Iterator[tuple[int, _TileBytes | None]]:
        """Yield (index, bytes) of tiles in the order of ``indices``, with few, large reads; None for omitted tiles."""
        present = [index for index in indices if level.lengths[index]]
        offsets, lengths = level.offsets[present].tolist(), level.lengths[present].tolist()
        encoded_by_index: dict[int, _TileBytes] = {}
        # Neighbouring tiles in one read, because on a network disk each read takes a round trip.
        for span in coalesced(offsets, lengths):
            block = self._slide.file.read(span.offset, span.length)
            for member in span.members:
                start = offsets[member] - span.offset
                # The block is shorter than asked for if the file was cut off.
                encoded_by_index[present[member]] = block, start, min(start + lengths[member], len(block))
        yield from ((index, encoded_by_index.get(index)) for index in indices)

    def _compare(self, k: int, index: int) -> None:
        """Refuse a level if the copy of one of its tiles would differ from the reader's pixels.

        Args:
            k: Index of the level.
            index: Index of the tile in the level.
        """
        level = self._levels[k]
        box = level.tile_box(index)
        ((_, encoded),) = self._tiles(level, [index])
        try:
            shown = self._slide.read(box, k)
            stored: Any = np.full_like(shown, BACKGROUND)
            if encoded is not None:
                block, start, end = encoded
                header, coded = self._joiners[k].join(block, start, end)
                stored = simplejpeg.decode_jpeg(header + block[coded:end], "RGB", strict=True)
        except (TileError, ValueError):
            return  # damaged: reported and counted by the copy
        if not np.array_equal(stored[: box.height, : box.width], shown):
            raise SlideError(
                f"--lossless: a copy of tile {index} of level {k} would differ from what the slide's reader shows. "
                f"{_WITHOUT}"
            )


_WITHOUT = "Ingest it without --lossless"


def _refuse_too_many(copied: Copied, max_bad: float) -> None:
    if len(copied.bad) > max_bad * copied.tiles:
        raise SlideError(
            f"{len(copied.bad)} of {copied.tiles} tiles are damaged (--max-bad {max_bad:g}): {copied.bad[0]}"
        )


def _tiles_of_file(level: TiffLevel, layout: ArrayLayout, file: tuple[int, int]) -> list[int]:
    """Return the indices of the tiles that are a file's chunks, in the order of its used slots."""
    rows, columns = layout.slots
    # Tiles are numbered over the whole level, slots within a file.
    corner = file[0] * rows * level.columns + file[1] * columns
    return [corner + slot // columns * level.columns + slot % columns for slot in layout.used_slots(file)]


def _joiner(level: TiffLevel) -> TileJoiner:
    """Return the `TileJoiner` of a level; refuse levels without JPEG tiles."""
    # Also refuse strips as wide as the slide: as chunks, they could not be read in parts.
    if not isinstance(level.decode, JpegDecoder) or level.tile_width_px >= level.width_px > 2 * SHARD_PX:
        raise SlideError(
            f"--lossless needs JPEG tiles; level {level.width_px} × {level.height_px} px is in {level.compression} "
            f"blocks of {level.tile_width_px} × {level.tile_height_px} px. {_WITHOUT}"
        )
    return TileJoiner(level.decode.prefix, (level.tile_height_px, level.tile_width_px))


def _layout(level: TiffLevel) -> ArrayLayout:
    """Return the array layout of a level: one chunk per tile, in shards of about the usual size."""
    tile = (level.tile_height_px, level.tile_width_px)
    height, width = (side * max(1, round(SHARD_PX / side)) for side in tile)
    return ArrayLayout((3, level.height_px, level.width_px), tile, (height, width), codec=PixelCodec("jpeg", None))
