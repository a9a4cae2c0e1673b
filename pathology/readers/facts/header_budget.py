"""A budget for the directories of a TIFF, which libraries read whole before the first pixel.

A file of 30 MB can list millions of tiles, all of them empty; OpenSlide takes half a minute to open it. Directories are
walked here without reading their lists (TIFF 6.0, section 2; BigTIFF: offsets and counts of 64 bits)::

    header ──► directory: count, entries (tag, type, number of values, values or where they are), next
                              │ 330 (SubIFDs)                                                      │
                              ▼                                                                    ▼
                           directories of levels                                              directory …
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pathology.errors import SlideError

MOST_TILES = 1_000_000
"""Most tiles in all directories of a file: the finest level of a slide of 256,000² px has as many, at 256² px each."""
MOST_DIRECTORIES = 100_000
MOST_TILE_PX = 2**28
"""Largest tile in pixels. OpenSlide takes memory for a whole tile, and aborts the process if there is not as much."""
_MOST_ENTRIES = 65_535
_WIDTH, _HEIGHT, _TILE_WIDTH, _TILE_HEIGHT, _SUB_DIRECTORIES = 256, 257, 322, 323, 330
_LISTS_OF_TILES = (273, 324)
"""StripOffsets and TileOffsets."""
_KINDS = {3: "H", 4: "I", 13: "I", 16: "Q", 18: "Q"}
"""Types of whole numbers, and of offsets of directories."""


@dataclass(frozen=True, slots=True)
class _ByteLayout:
    """How a TIFF writes numbers.

    Attributes:
        order: Order of bytes, ``<`` or ``>``.
        big: Whether offsets and counts have 64 bits.
    """

    order: str
    big: bool

    @classmethod
    def of(cls, head: bytes) -> _ByteLayout | None:
        """Return the layout that the first 16 bytes state; None if they are no TIFF's."""
        order = {b"II": "<", b"MM": ">"}.get(head[:2])
        if order is None or len(head) < 16:
            return None
        version = struct.unpack(order + "H", head[2:4])[0]
        return cls(order, version == 43) if version in (42, 43) else None

    @property
    def word(self) -> str:
        """The format of offsets and counts."""
        return "Q" if self.big else "I"

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry of a directory."""
        return 20 if self.big else 12

    def first(self, head: bytes) -> int:
        """Return the offset of the first directory."""
        return int(struct.unpack(self.order + self.word, head[8:16] if self.big else head[4:8])[0])

    def entries(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield (tag, type, number of values, field of the values) of each entry."""
        yield from struct.iter_unpack(f"{self.order}HH{self.word}{8 if self.big else 4}s", data)

    def number(self, file: BinaryIO, kind: str) -> int | None:
        """Read a number; None if the file ends before it."""
        size = struct.calcsize(self.order + kind)
        data = file.read(size)
        return int(struct.unpack(self.order + kind, data)[0]) if len(data) == size else None

    def numbers(self, file: BinaryIO, kind: int, count: int, field: bytes) -> tuple[int, ...]:
        """Return the whole numbers of an entry, which are in its field if there is room; none if the file ends."""
        # TIFF 6.0: if the values do not fit into the field, it has their offset.
        length = count * struct.calcsize(self.order + _KINDS[kind])
        if length > len(field):
            at = int(struct.unpack(self.order + self.word, field)[0])
            file.seek(min(at, 2**62))  # offsets of 64 bits may be more than seek takes; it then reads nothing
            field = file.read(length)
        return struct.unpack(f"{self.order}{count}{_KINDS[kind]}", field[:length]) if len(field) >= length else ()


@dataclass(frozen=True, slots=True)
class _Directory:
    """One directory of a TIFF.

    Attributes:
        entries: Number of its entries.
        tiles: Number of tiles or strips that it lists.
        size_px: (height, width) of its picture; 0 if not stated.
        tile_px: (height, width) of its tiles; 0 if it has strips.
        others: Offsets of the next directory, and of its subdirectories.
    """

    entries: int
    tiles: int
    size_px: tuple[int, int]
    tile_px: tuple[int, int]
    others: tuple[int, ...]


def first_directory(head: bytes) -> int | None:
    """Return the offset of a TIFF's first directory, from its first 16 bytes; None for other files."""
    layout = _ByteLayout.of(head)
    return None if layout is None else layout.first(head)


def check_directories(path: Path) -> None:
    """Check that numbers of tiles and directories of a TIFF, and the size of its tiles, are within the budget.

    Other and damaged files pass.

    NDPI files beyond 4 GB pass, too: their offsets have more bits than those of a TIFF.

    Raises:
        SlideError: They are not, or the first directory has no entries.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        head, size = file.read(16), os.fstat(file.fileno()).st_size
        layout = _ByteLayout.of(head)
        if layout is None or (not layout.big and size >= 2**32):
            return
        waiting, visited, tiles = [layout.first(head)], set[int](), 0
        while waiting:
            offset = waiting.pop()
            # In a damaged file, directories may point back at each other: visit each only once.
            if offset in visited or not 0 < offset < size:
                continue
            visited.add(offset)
            directory = _directory(file, offset, layout)
            if directory is None:
                # Damaged, which the reader reports if it is part of the slide. Go on with the other directories.
                continue
            # Zeros, without entries: some programs give a copy its full size first, and this part has not arrived yet.
            if not directory.entries and len(visited) == 1:
                raise SlideError(
                    f"the file is damaged: its directory at byte {offset} is empty, as in a copy that was not "
                    "finished; copy it again"
                )
            # A number of tiles above the number of bytes is damaged, so do not count it.
            tiles += directory.tiles if directory.tiles <= size else 0
            _check(tiles, len(visited), directory)
            waiting += directory.others


def _check(tiles: int, directories: int, last: _Directory) -> None:
    """Refuse a TIFF with more tiles or directories, or larger tiles, than a slide has."""
    if math.prod(last.tile_px) > MOST_TILE_PX:
        raise SlideError(
            f"a directory states tiles of {last.tile_px[1]:,} x {last.tile_px[0]:,} px; up to {MOST_TILE_PX:,} px are "
            "read. The file is damaged, or must be written with smaller tiles"
        )
    if tiles > MOST_TILES:
        raise SlideError(
            f"its directories list {tiles:,} tiles or strips, {last.tiles:,} of them for {last.size_px[1]:,} x "
            f"{last.size_px[0]:,} px; up to {MOST_TILES:,} are read. If it is a slide, write it with larger tiles, for "
            "example by `vips tiffsave IN OUT --tile --tile-width 1024 --tile-height 1024 --pyramid --bigtiff`"
        )
    if directories > MOST_DIRECTORIES:
        raise SlideError(f"it has more than {MOST_DIRECTORIES:,} directories; a slide has a few for each level")


def _directory(file: BinaryIO, offset: int, layout: _ByteLayout) -> _Directory | None:
    """Return the TIFF directory at an offset; None if the file ends before it does, or it has too many entries.

    A directory is the number of its entries, the entries, and the offset of the next directory.
    """
    file.seek(offset)
    count = layout.number(file, "Q" if layout.big else "H")
    if count is None or count > _MOST_ENTRIES:
        return None
    data = file.read(count * layout.entry_bytes)
    next_offset = layout.number(file, layout.word)
    if next_offset is None or len(data) < count * layout.entry_bytes:
        return None
    tiles, sizes, others = 0, dict.fromkeys((_HEIGHT, _WIDTH, _TILE_HEIGHT, _TILE_WIDTH), 0), [next_offset]
    for tag, kind, number, value in layout.entries(data):
        # Lists of tiles are counted, not read: they may be huge.
        if tag in _LISTS_OF_TILES:
            tiles += number
        elif tag in sizes and kind in _KINDS:
            sizes[tag] = next(iter(layout.numbers(file, kind, 1, value)), 0)
        elif tag == _SUB_DIRECTORIES and kind in _KINDS and number <= _MOST_ENTRIES:
            others += layout.numbers(file, kind, number, value)
    return _Directory(
        entries=count,
        tiles=tiles,
        size_px=(sizes[_HEIGHT], sizes[_WIDTH]),
        tile_px=(sizes[_TILE_HEIGHT], sizes[_TILE_WIDTH]),
        others=tuple(others),
    )
