"""Metadata of TIFF files: orientation and page sizes; whether a file is an OME-TIFF, or truncated."""

from __future__ import annotations

import logging
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import tifffile

from data.location import is_remote

_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_DATA_TAGS = {273: 279, 324: 325}
"""Tags with the offsets of strips and tiles, and those with their byte counts."""
_MAX_DIRECTORIES = 10_000
tifffile.logger().setLevel(logging.CRITICAL + 1)  # readers raise errors of their own instead
PARSE_ERRORS = (
    tifffile.TiffFileError,
    OSError,
    LookupError,
    ValueError,
    TypeError,
    ArithmeticError,
    AttributeError,
    MemoryError,
    RuntimeError,
    struct.error,
)
"""What tifffile raises for damaged numbers: it divides by sizes of 0, and takes one value where there are several."""


def is_ome_tiff(path: Path) -> bool:
    """Whether a file is a TIFF with OME-XML, whatever its name; False if it cannot be read."""
    try:
        with tifffile.TiffFile(path) as tiff:
            return bool(tiff.is_ome)
    except PARSE_ERRORS:
        return False  # the reader will report what is wrong with it


def largest_page(path: Path) -> tuple[int, int]:
    """Return (height, width) of the largest page of a TIFF; (0, 0) for other files."""
    try:
        with tifffile.TiffFile(path) as tiff:
            sizes = [(int(page.imagelength), int(page.imagewidth)) for page in map(keyframe, tiff.pages)]
    except PARSE_ERRORS:
        return 0, 0
    return max(sizes, key=math.prod, default=(0, 0))


def is_truncated(path: Path) -> bool:
    """Whether a TIFF refers to directories, tag values or tiles beyond its end; False for other files.

    Always False for classic TIFFs of 4 GiB or more: some scanners write these with non-standard offsets.
    """
    if is_remote(path):
        return False
    try:
        with path.open("rb") as file:
            size, head = os.fstat(file.fileno()).st_size, file.read(8)
            order = {b"II": "<", b"MM": ">"}.get(head[:2])
            if order is None or len(head) < 8:
                return False
            version = struct.unpack(f"{order}H", head[2:4])[0]
            if version not in (42, 43) or (version == 42 and size >= 2**32):
                return False
            return any(end > size for end in _ends(file, order, big=version == 43))
    except (OSError, ValueError):
        return False  # the reader will report what is wrong with it
    except struct.error:
        return True  # the file ends within a directory


def _ends(file: BinaryIO, order: str, big: bool) -> Iterator[int]:
    """Yield the end offsets of all tag values and image data of a TIFF (TIFF 6.0, section 2; BigTIFF)."""
    # Formats of an offset and of the number of entries, and bytes of an entry and of an offset.
    wide, count_format, entry_bytes = ("Q", "Q", 20) if big else ("I", "H", 12)
    word = 8 if big else 4
    file.seek(word)
    visited: set[int] = set()
    (at,) = struct.unpack(f"{order}{wide}", file.read(word))
    # In a damaged file the chain of directories may lead back to its start.
    while at and at not in visited and len(visited) < _MAX_DIRECTORIES:
        visited.add(at)
        file.seek(at)
        (count,) = struct.unpack(f"{order}{count_format}", file.read(struct.calcsize(count_format)))
        # The end of the entries and of the next offset. The caller stops if it lies beyond the file: `read` would take
        # memory for a damaged count.
        yield at + count * entry_bytes + word
        entries, following = file.read(count * entry_bytes), file.read(word)
        values = {}
        for tag, field_type, number, inline in struct.iter_unpack(f"{order}HH{wide}{word}s", entries):
            length = _TYPE_BYTES.get(field_type, 1) * number
            # Values that do not fit into the entry lie elsewhere, and must end inside the file.
            if length > word:
                (offset,) = struct.unpack(f"{order}{wide}", inline)
                yield offset + length
            if tag in _DATA_TAGS or tag in _DATA_TAGS.values():
                values[tag] = _integers(file, order, field_type, number, inline)
        for offsets_tag, lengths_tag in _DATA_TAGS.items():
            pairs = zip(values.get(offsets_tag, ()), values.get(lengths_tag, ()), strict=False)
            yield max((offset + length for offset, length in pairs if length), default=0)
        (at,) = struct.unpack(f"{order}{wide}", following)


def _integers(file: BinaryIO, order: str, field_type: int, number: int, inline: bytes) -> tuple[int, ...]:
    """Return the values of a tag of type SHORT, LONG or LONG8; () for other types.

    Args:
        file: The file.
        order: Order of bytes, ``<`` or ``>``.
        field_type: Number of the type.
        number: Number of values.
        inline: The values; if they do not fit into 4 (BigTIFF: 8) bytes, their offset.
    """
    letter = {3: "H", 4: "I", 16: "Q"}.get(field_type)
    if letter is None:
        return ()
    length = _TYPE_BYTES[field_type] * number
    if length > len(inline):
        file.seek(struct.unpack(f"{order}{'Q' if len(inline) == 8 else 'I'}", inline)[0])
        inline = file.read(length)
    return struct.unpack(f"{order}{number}{letter}", inline[:length])


def keyframe(page: Any) -> Any:
    """Return a page of tifffile with all its tags; some pages come as light ``TiffFrame`` objects without them."""
    return page.aspage() if isinstance(page, tifffile.TiffFrame) else page


def orientation_of_file(path: Path) -> int:
    """Return the tag Orientation of a TIFF's first page; 1 (upright) for other files and for invalid values."""
    try:
        with tifffile.TiffFile(path) as tiff:
            return orientation_of_page(tiff.pages.first)
    except PARSE_ERRORS:
        return 1  # the reader will report what is wrong with it


def orientation_of_page(page: Any) -> int:
    """Return the tag Orientation of a page; 1 (upright) for invalid values."""
    tag = page.tags.get("Orientation")
    value = 1 if tag is None else int(tag.value)
    return value if 1 <= value <= 8 else 1
