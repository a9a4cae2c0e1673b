"""What a TIFF says about itself beside its pixels: microns per pixel, orientation, whether it is an OME-TIFF."""

from __future__ import annotations

import logging
import math
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

import tifffile

from pathology.readers.mpp import UM_PER_OME_UNIT, first_sensible, mpp_of_resolution, parse_mpp

_UNITS = {1: "", 2: "inch", 3: "centimeter", 4: "millimeter", 5: "micrometer"}
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
_DATA_TAGS = {273: 279, 324: 325}
"""The tags that list where strips and tiles stand, and those that list their bytes."""
_MOST_DIRECTORIES = 10_000
tifffile.logger().setLevel(logging.CRITICAL + 1)  # what is wrong with a file, its reader says in plain words
_NO_TIFF = (tifffile.TiffFileError, OSError, IndexError, ValueError, KeyError, TypeError)


def mpp_of_tiff(tiff: tifffile.TiffFile, page: Any) -> tuple[float, float] | None:
    """Return (y, x) microns per pixel of a page: of OME-XML, Aperio's description, or resolution tags; else None."""
    stated = mpp_of_ome(tiff.ome_metadata or "", page) if tiff.is_ome else _mpp_of_aperio(page.description)
    return first_sensible(stated, _mpp_of_tags(page))


def _mpp_of_aperio(description: str) -> tuple[float, float] | None:
    found = re.search(r"\|\s*MPP\s*=\s*([0-9.,]+)", description)
    try:
        return None if found is None else (parse_mpp(found[1]),) * 2
    except ValueError:
        return None


def is_ome_tiff(path: Path) -> bool:
    """Whether a file is a TIFF with OME-XML in it, whatever its name."""
    try:
        with tifffile.TiffFile(path) as tiff:
            return bool(tiff.is_ome)
    except (*_NO_TIFF, struct.error):
        return False  # whatever is wrong with it, the reader will say


def largest_page(path: Path) -> tuple[int, int]:
    """Return (height, width) of the largest picture of a TIFF; (0, 0) for other files."""
    try:
        with tifffile.TiffFile(path) as tiff:
            sizes = [(int(page.imagelength), int(page.imagewidth)) for page in map(keyframe, tiff.pages)]
    except _NO_TIFF:
        return 0, 0
    return max(sizes, key=math.prod, default=(0, 0))


def is_truncated(path: Path) -> bool:
    """Whether a TIFF names directories, values of tags or tiles beyond its own end; False for other files.

    Of classic TIFFs beyond 4 GiB, which some scanners write with offsets of their own making, nothing is said.
    """
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
        return False  # what is wrong with it, its reader will say
    except struct.error:
        return True  # it ends within a directory


def _ends(file: BinaryIO, order: str, big: bool) -> Iterator[int]:
    """Yield where things end that the directories of a TIFF name (TIFF 6.0, section 2; BigTIFF)."""
    wide, count_format, entry_bytes = ("Q", "Q", 20) if big else ("I", "H", 12)
    word = 8 if big else 4
    file.seek(word)
    seen: set[int] = set()
    (at,) = struct.unpack(f"{order}{wide}", file.read(word))
    while at and at not in seen and len(seen) < _MOST_DIRECTORIES:
        seen.add(at)
        file.seek(at)
        (count,) = struct.unpack(f"{order}{count_format}", file.read(struct.calcsize(count_format)))
        entries, following = file.read(count * entry_bytes), file.read(word)
        values = {}
        for tag, kind, number, inline in struct.iter_unpack(f"{order}HH{wide}{word}s", entries):
            length = _TYPE_BYTES.get(kind, 1) * number
            if length > word:
                (offset,) = struct.unpack(f"{order}{wide}", inline)
                yield offset + length
            if tag in _DATA_TAGS or tag in _DATA_TAGS.values():
                values[tag] = _numbers(file, order, kind, number, inline)
        for places, lengths in _DATA_TAGS.items():
            pairs = zip(values.get(places, ()), values.get(lengths, ()), strict=False)
            yield max((offset + length for offset, length in pairs if length), default=0)
        (at,) = struct.unpack(f"{order}{wide}", following)


def _numbers(file: BinaryIO, order: str, kind: int, number: int, inline: bytes) -> tuple[int, ...]:
    """Return the whole numbers of a tag; none of another kind."""
    letter = {3: "H", 4: "I", 16: "Q"}.get(kind)
    if letter is None:
        return ()
    length = _TYPE_BYTES[kind] * number
    if length > len(inline):
        file.seek(struct.unpack(f"{order}{'Q' if len(inline) == 8 else 'I'}", inline)[0])
        inline = file.read(length)
    return struct.unpack(f"{order}{number}{letter}", inline[:length])


def keyframe(page: Any) -> Any:
    """Return a page of tifffile with all its tags."""
    return page.aspage() if isinstance(page, tifffile.TiffFrame) else page


def orientation_of_file(path: Path) -> int:
    """Return the tag Orientation of a TIFF's first page; 1 (upright) for other files and values without a meaning."""
    try:
        with tifffile.TiffFile(path) as tiff:
            tag = tiff.pages.first.tags.get("Orientation")
            value = 1 if tag is None else int(tag.value)
    except _NO_TIFF:
        return 1  # whatever is wrong with it, the reader will say
    return value if 1 <= value <= 8 else 1


def _mpp_of_tags(page: Any) -> tuple[float, float] | None:
    tags = page.tags
    if "XResolution" not in tags or "YResolution" not in tags:
        return None
    unit = _UNITS.get(int(tags["ResolutionUnit"].value) if "ResolutionUnit" in tags else 2, "")
    y, x = (mpp_of_resolution(_ratio(tags[name].value), unit) for name in ("YResolution", "XResolution"))
    return None if y is None or x is None else (y, x)


def _ratio(value: tuple[int, int]) -> float:
    return value[0] / value[1] if value[1] else 0.0


def mpp_of_ome(xml: str, page: Any) -> tuple[float, float] | None:
    """Return PhysicalSizeY and X of a page's image in OME-XML (2016-06), in micrometres; None where it has none."""
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError:
        return None
    pixels = _pixels_of_page(root, page)
    if pixels is None:
        return None
    sizes = []
    for axis in "YX":
        unit = UM_PER_OME_UNIT.get(pixels.get(f"PhysicalSize{axis}Unit", "µm"))
        try:
            size = parse_mpp(pixels.get(f"PhysicalSize{axis}", ""))
        except ValueError:
            return None
        if unit is None:
            return None
        sizes.append(size * unit)
    return sizes[0], sizes[1]


def _pixels_of_page(root: ElementTree.Element, page: Any) -> ElementTree.Element | None:
    """Return the only element Pixels, or that which has the page's size: beside the slide there may be a label."""
    found = _elements(root, "Pixels")
    if len(found) < 2:
        return next(iter(found), None)
    size = [str(page.imagelength), str(page.imagewidth)]
    same = [pixels for pixels in found if [pixels.get("SizeY"), pixels.get("SizeX")] == size]
    at = str(page.index)
    named = [pixels for pixels in same if any(data.get("IFD", "0") == at for data in _elements(pixels, "TiffData"))]
    return next(iter(named or same), None)


def _elements(parent: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in parent.iter() if element.tag.rpartition("}")[2] == name]
