"""JPEG frames of DICOM slides, checked with libjpeg's warnings (PS3.5, A.4: encapsulated pixels).

```
(7FE0,0001)  extended table of offsets, perhaps
(7FE0,0010)  item: basic table of offsets, perhaps empty | item: frame | item: frame | ... | end
```
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import simplejpeg

from hyfi_core.plan.box import Box
from pathology.errors import TileError
from pathology.readers.dicom.files import series_files, text_of
from pathology.readers.dicom.pixels import (
    CONCATENATION,
    FRAME_COLUMNS,
    FRAME_ROWS,
    ITEM,
    LEVEL_COLUMNS,
    LEVEL_ROWS,
    OF_FRAMES,
    SYNTAX,
    before_pixels,
    frame_positions,
    is_level,
    read_head,
)

_OFFSETS = b"\xe0\x7f\x01\x00OV\0\0"
_JPEG_BASELINE = "1.2.840.10008.1.2.4.50"


@dataclass(frozen=True)
class JpegFrames:
    """The JPEG frames of a level. OpenSlide ignores libjpeg's warnings, and shows what it makes of damaged ones.

    Attributes:
        path: The level's file.
        size: (rows, columns) of the level.
        frame_px: (height, width) of a frame.
    """

    path: Path
    size: tuple[int, int]
    frame_px: tuple[int, int]
    _places_lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def check(self, box: Box) -> None:
        """Decode all frames that have pixels of ``box``, small and in grey, which takes less than half the time.

        Raises:
            TileError: One is damaged.
        """
        height, width = self.frame_px
        rows = range(box.y0 // height, -(-box.y1 // height))
        columns = range(box.x0 // width, -(-box.x1 // width))
        with self._places_lock:  # the first of several threads finds the places, once
            places = self._places
        with self.path.open("rb") as file:
            for at in ((row, column) for row in rows for column in columns):
                try:
                    if at in places and (frame := _frame_at(file, *places[at])):  # others were not scanned
                        simplejpeg.decode_jpeg(frame, "GRAY", min_height=1, min_width=1, strict=True)
                except ValueError as error:
                    if "subsampling level" in str(error):
                        continue  # TurboJPEG lacks some factors of sampling, which OpenSlide's libjpeg has
                    where = f"{self.path.name}: the frame at row {at[0] * height}, column {at[1] * width}"
                    raise TileError(f"{where} cannot be decoded: {error}") from error

    @cached_property
    def _places(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        """(row, column) of a frame, counted in frames -> offsets of its item and the next one; empty if not found."""
        with suppress(Exception), self.path.open("rb") as file:
            _, of_frames, pixels_at = before_pixels(file, [])
            # The first item follows the tag, type and length of the pixels, 12 bytes.
            items = _items(file, pixels_at + 12, _extended_offsets(of_frames))
            positions = frame_positions(of_frames)
            (height, width), across = self.frame_px, -(-self.size[1] // self.frame_px[1])
            # Positions are those of a frame's first pixel, from 1. Without them, frames are in row-major order.
            grid = [((row - 1) // height, (column - 1) // width) for column, row in positions]
            grid = grid or [divmod(k, across) for k in range(across * -(-self.size[0] // height))]
            # 0 instead of an offset: no item follows the last one.
            return dict(zip(grid, pairwise([*items, 0]), strict=True))
        return {}


def jpeg_frames(path: Path) -> dict[tuple[int, int], JpegFrames]:
    """Return (rows, columns) -> frames of the levels of a DICOM slide whose frames can be found, and are JPEG."""
    levels: dict[tuple[int, int], JpegFrames] = {}
    for file in series_files(path):
        with suppress(Exception):
            if (level := _frames_of(file)) is not None:
                levels.setdefault(level.size, level)  # of two files OpenSlide takes the first
    return levels


def _frames_of(path: Path) -> JpegFrames | None:
    """Return the frames of a level's file; None for other files, and parts of a level."""
    with path.open("rb") as file:
        dataset = read_head(file, [*OF_FRAMES, CONCATENATION])
    if not is_level(dataset) or CONCATENATION in dataset:
        return None
    if text_of(dataset.file_meta, SYNTAX) != _JPEG_BASELINE:
        return None
    rows, columns, height, width = (
        int(dataset[tag].value) for tag in (LEVEL_ROWS, LEVEL_COLUMNS, FRAME_ROWS, FRAME_COLUMNS)
    )
    return JpegFrames(path, size=(rows, columns), frame_px=(height, width))


def _extended_offsets(of_frames: bytes) -> bytes:
    """Return the extended table of offsets from the elements in front of the pixels; empty if there is none."""
    at = of_frames.rfind(_OFFSETS)
    # The element's tag and type take 8 bytes, its length 4.
    length = int.from_bytes(of_frames[at + 8 : at + 12], "little")
    return of_frames[at + 12 : at + 12 + length] if at >= 0 else b""


def _items(file: BinaryIO, at: int, stated: bytes) -> list[int]:
    """Return the offsets of the frames' items in encapsulated pixels at ``at``.

    Args:
        file: The file.
        at: Offset of the first item, the basic table of offsets.
        stated: The extended table of offsets; empty if there is none.
    """
    # An item has a head of 8 bytes, its tag and the length of its content.
    table = int.from_bytes(os.pread(file.fileno(), 8, at)[4:], "little")
    start = at + 8 + table
    # Without a table OpenSlide visits all items, too. With one it does not: on a slow disk this takes minutes.
    if stated or table:
        offsets = (
            np.frombuffer(stated, "<u8") if stated else np.frombuffer(os.pread(file.fileno(), table, at + 8), "<u4")
        )
        return [start + offset for offset in offsets.tolist()]
    items = []
    while (head := os.pread(file.fileno(), 8, start))[:4] == ITEM:
        items.append(start)
        start += 8 + int.from_bytes(head[4:], "little")
    return items


def _frame_at(file: BinaryIO, item: int, following: int) -> bytes:
    """Return the frame of an item; empty if it is in several items, or not there.

    Args:
        file: The file.
        item: Offset of its item.
        following: Offset of the next frame's item; 0 for the last frame.
    """
    file.seek(item)
    head = file.read(8)
    length = int.from_bytes(head[4:], "little")
    if head[:4] != ITEM or following not in (0, item + 8 + length):
        return b""
    frame = file.read(length)
    return b"" if not following and file.read(4) == ITEM else frame
