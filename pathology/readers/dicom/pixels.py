"""Where the pixels of a DICOM file are, and what stands in front of them (DICOM PS3.5, A.4; PS3.3, C.7.6.17).

```
head      elements that pydicom reads: the level, its size, that of a frame
frames    one item for each frame, perhaps with its position
pixels    item: table of offsets, perhaps empty | item: frame | item: frame | … | end
```
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

from pathology.readers.dicom.files import text_of

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

PHOTOMETRIC, PER_FRAME, CONCATENATION = 0x00280004, 0x52009230, 0x00209161
IMAGE_TYPE, ORGANISATION, FRAME_COUNT = 0x00080008, 0x00209311, 0x00280008
"""ImageType, DimensionOrganizationType, NumberOfFrames."""
LEVEL_COLUMNS, LEVEL_ROWS, FRAME_COLUMNS, FRAME_ROWS = 0x00480006, 0x00480007, 0x00280011, 0x00280010
"""Sizes of the level (the total pixel matrix), and of a frame."""
OF_FRAMES = (IMAGE_TYPE, ORGANISATION, FRAME_COUNT, LEVEL_COLUMNS, LEVEL_ROWS, FRAME_COLUMNS, FRAME_ROWS)
SYNTAX, _IMPLICIT = 0x00020010, "1.2.840.10008.1.2"
ITEM = b"\xfe\xff\x00\xe0"
_PER_FRAME_TAG = b"\x00\x52\x30\x92"
# Explicit or implicit value representation. Four bytes alone may be an offset in the extended table of offsets.
_PIXELS_START, _IMPLICIT_PIXELS_START = re.compile(rb"\xe0\x7f\x10\x00O[BW]\0\0"), re.compile(rb"\xe0\x7f\x10\x00")
_COLUMN, _ROW = (
    # Explicit or implicit value representation.
    re.compile(rb"\x48\x00" + tag + rb"\x02(?:SL\x04\x00|\x04\x00\x00\x00)(.{4})", re.DOTALL)
    for tag in (rb"\x1e", rb"\x1f")
)
_PART_BYTES, _LARGEST_PART_BYTES, _LARGEST_SEQUENCE_BYTES = 2**16, 2**22, 2**30


def read_head(file: BinaryIO, wanted: Sequence[int]) -> Dataset:
    """Return the elements ``wanted`` of a file's head, behind which the file is then."""
    from pydicom.filereader import read_partial  # importing it takes half a second: only for DICOM slides

    file.seek(0)
    return read_partial(file, stop_when=lambda tag, vr, length: tag >= PER_FRAME, specific_tags=list(wanted))


def is_level(head: Dataset) -> bool:
    """Whether a file is a level of a slide, not its label or macro; ``head`` has its ImageType."""
    return "VOLUME" in text_of(head, IMAGE_TYPE)


def before_pixels(file: BinaryIO, wanted: Sequence[int]) -> tuple[Dataset, bytes, int]:
    """Return the head of a DICOM file, the bytes between it and the pixels, and the offset of the pixels.

    These bytes are elements with the positions of the frames. They are not parsed here, but searched for the tag of the
    pixels: a slide has up to a million frames, and pydicom takes 0.1 ms for each.

    Args:
        file: The file.
        wanted: Tags of the head to read.

    Raises:
        ValueError: It has no pixels.
    """
    dataset = read_head(file, wanted)
    pattern = _IMPLICIT_PIXELS_START if text_of(dataset.file_meta, SYNTAX) == _IMPLICIT else _PIXELS_START
    start, data, count = file.tell(), bytearray(), _PART_BYTES
    while len(data) < _LARGEST_SEQUENCE_BYTES and (part := file.read(count)):
        searched = max(0, len(data) - 8)  # the pixels' tag may be in two parts
        data += part
        if (found := pattern.search(data, searched)) is not None:
            return dataset, bytes(data[: found.start()]), start + found.start()
        count = min(2 * count, _LARGEST_PART_BYTES)
    raise ValueError("no pixels")


def first_frame(file: BinaryIO) -> tuple[str, bytes]:
    """Return (PhotometricInterpretation, first fragment of encapsulated pixels, b"" if there is none); PS3.5, A.4."""
    dataset, _, at = before_pixels(file, [PHOTOMETRIC])
    photometric = text_of(dataset, PHOTOMETRIC)
    file.seek(at + 12)  # the element's tag, type and length
    # Items have a tag and a length of four bytes each: first the table of offsets, then the fragments.
    item = file.read(8)
    if item[:4] != ITEM:  # uncompressed pixels have no items
        return photometric, b""
    file.seek(int.from_bytes(item[4:], "little"), os.SEEK_CUR)
    return photometric, file.read(int.from_bytes(file.read(8)[4:], "little"))


def frame_positions(of_frames: bytes) -> list[tuple[int, int]]:
    """Return the (column, row) of each frame from PerFrameFunctionalGroupsSequence; empty without this sequence."""
    if not of_frames.startswith(_PER_FRAME_TAG):
        return []
    columns, rows = (pattern.findall(of_frames) for pattern in (_COLUMN, _ROW))
    numbers = [[int.from_bytes(value, "little", signed=True) for value in values] for values in (columns, rows)]
    return list(zip(*numbers, strict=True))
