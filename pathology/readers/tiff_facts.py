"""What a TIFF says about itself beside its pixels: microns per pixel, orientation, whether it is an OME-TIFF."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import tifffile

from pathology.readers.mpp import UM_PER_OME_UNIT, first_sensible, mpp_of_resolution, parse_mpp

_UNITS = {1: "", 2: "inch", 3: "centimeter", 4: "millimeter", 5: "micrometer"}
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
