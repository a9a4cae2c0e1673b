"""Microns per pixel as the places of a TIFF state them: OME-XML, ImageJ's text, Aperio's text, resolution tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import tifffile

from pathology.readers.facts.slide_facts import APERIO, StatedMpp
from pathology.readers.mpp import agree, mpp_of_resolution, parse_number

TAGS = "the resolution tags"
_FEWEST_LEVELS = 2
"""Number of coarser levels whose tags must agree: then the values were computed from the sizes of levels."""
_UNITS = {1: "", 2: "inch", 3: "centimeter", 4: "millimeter", 5: "micrometer"}
_UM_PER_UNIT = {
    "pm": 1e-6,
    "\u212b": 1e-4,  # the sign for ångström; the next one is the letter
    "Å": 1e-4,
    "nm": 1e-3,
    "nanometer": 1e-3,
    "µm": 1.0,
    "μm": 1.0,
    "um": 1.0,
    "micron": 1.0,
    "microns": 1.0,
    "micrometer": 1.0,
    "micrometre": 1.0,
    "\\u00b5m": 1.0,
    "angstrom": 1e-4,
    "meter": 1e6,
    "mm": 1e3,
    "millimeter": 1e3,
    "cm": 1e4,
    "centimeter": 1e4,
    "dm": 1e5,
    "m": 1e6,
    "thou": 25.4,
    "in": 25_400.0,
    "inch": 25_400.0,
    "ft": 304_800.0,
    "pt": 25_400.0 / 72,
    "li": 25_400.0 / 12,
}
"""Micrometres per unit of length, for the units of OME-XML and ImageJ in which a slide could be measured."""


def stated_by_tiff(tiff: tifffile.TiffFile, page: Any) -> tuple[StatedMpp, ...]:
    """Return the statements about microns per pixel for a page of a TIFF, which must be open."""
    statements = [_of_ome(tiff.ome_metadata or "", page) if tiff.is_ome else _of_aperio(page.description)]
    if page.is_imagej:
        statements.append(_of_imagej(page))
    return tuple(stated for stated in (*statements, _of_tags(page)) if stated is not None)


def stated_by_coarser(pages: Sequence[Any]) -> StatedMpp | None:
    """Return the microns per pixel of the finest level that follow from tags of coarser levels; None if these differ.

    Ignored are levels with the same tags as the finest one, which some programs copy, and with a resolution of 0.

    Args:
        pages: The levels, the finest first.
    """
    finest, *coarser = pages
    of_finest = _of_tags(finest)
    # For each coarser level, the microns per pixel of the finest level that follow from its tags and size.
    derived_um: list[tuple[float, float]] = []
    for page in coarser:
        tags = _of_tags(page)
        if tags is None or min(tags.um) <= 0 or (of_finest is not None and agree(tags.um, of_finest.um)):
            continue
        y, x = tags.um
        derived_um.append((y * page.imagelength / finest.imagelength, x * page.imagewidth / finest.imagewidth))
    if len(derived_um) < _FEWEST_LEVELS or not all(agree(um, derived_um[0]) for um in derived_um):
        return None
    return StatedMpp(derived_um[0], f"{TAGS} of its coarser levels")


def power_of_ome(xml: str) -> float | None:
    """Return the magnification that OME-XML states for all its objectives; None if there is none or several."""
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError:
        return None
    powers = {element.get("NominalMagnification", "") for element in elements(root, "Objective")}
    try:
        return parse_number(powers.pop()) if len(powers) == 1 else None
    except ValueError:
        return None


def um_of_unit(unit: str) -> tuple[float, str] | None:
    """Return (micrometres of a unit of length, correction that was needed to read it or ``""``); None if unknown.

    The µ is often garbled by a program that reads UTF-8 in another encoding (``Âµm``, ``碌m``, ``Î¼m``) or writes ASCII
    (``?m``).
    """
    plain = unit.strip()
    # First as it is written: Å is a key, but its small letter is not.
    um = _UM_PER_UNIT.get(plain) or _UM_PER_UNIT.get(plain.lower())
    if um is not None:
        return um, ""
    prefix = plain.removesuffix("m")
    if prefix != plain and 0 < len(prefix) <= 3 and (not prefix.isascii() or prefix == "?"):
        return 1.0, f"the unit {plain!r} is read as µm, in which the µ was garbled"
    return None


def _of_aperio(description: str) -> StatedMpp | None:
    """Return the MPP in a page's description; None if there is none, or it is no number."""
    match = re.search(r"\|\s*MPP\s*=\s*([0-9.,]+)", description)
    try:
        return None if match is None else StatedMpp((parse_number(match[1]),) * 2, APERIO)
    except ValueError:
        return None


def _of_imagej(page: Any) -> StatedMpp | None:
    """Return the statement of ImageJ: the unit is in its text, pixels per unit are in the resolution tags."""
    match = re.search(r"^unit=(.*)$", page.description, re.MULTILINE)
    unit = None if match is None else um_of_unit(match[1])
    tags = page.tags
    if unit is None or "XResolution" not in tags or "YResolution" not in tags:
        return None
    um, correction = unit
    y, x = (_ratio(tags[name].value) for name in ("YResolution", "XResolution"))
    return StatedMpp((um / y, um / x), "ImageJ", repaired=correction) if x > 0 and y > 0 else None


def _of_tags(page: Any) -> StatedMpp | None:
    """Return the statement of the tags XResolution and YResolution; None if they state nothing, or are damaged."""
    tags = page.tags
    if "XResolution" not in tags or "YResolution" not in tags:
        return None
    # TIFF 6.0: without the tag, the unit is the inch.
    number = tags["ResolutionUnit"].value if "ResolutionUnit" in tags else 2
    unit = _UNITS.get(number, "") if isinstance(number, int) else ""
    y, x = (mpp_of_resolution(_ratio(tags[name].value), unit) for name in ("YResolution", "XResolution"))
    return None if y is None or x is None else StatedMpp((y, x), TAGS)


def _ratio(value: Any) -> float:
    """Return the number that a tag has as (numerator, denominator); 0, which states nothing, of any other value."""
    try:
        return float(value[0] / value[1])
    except (TypeError, IndexError, ZeroDivisionError):
        return 0.0


def _of_ome(xml: str, page: Any) -> StatedMpp | None:
    """Return PhysicalSizeY and PhysicalSizeX of a page's image in OME-XML (2016-06)."""
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError:
        return None
    pixels = _pixels_of_page(root, page)
    return None if pixels is None else stated_by_pixels(pixels)


def stated_by_pixels(pixels: ElementTree.Element) -> StatedMpp | None:
    """Return PhysicalSizeY and PhysicalSizeX of an element Pixels of OME-XML; None if one is missing."""
    sizes, repaired = [], ""
    for axis in "YX":
        unit = um_of_unit(pixels.get(f"PhysicalSize{axis}Unit", "µm"))
        try:
            size = parse_number(pixels.get(f"PhysicalSize{axis}", ""))
        except ValueError:
            return None
        if unit is None:
            return None
        um, correction = unit
        sizes.append(size * um)
        repaired = repaired or correction
    return StatedMpp((sizes[0], sizes[1]), "OME-XML", _size_of(pixels), repaired)


def _size_of(pixels: ElementTree.Element) -> tuple[int, int] | None:
    try:
        return int(pixels.get("SizeY", "")), int(pixels.get("SizeX", ""))
    except ValueError:
        return None


def _pixels_of_page(root: ElementTree.Element, page: Any) -> ElementTree.Element | None:
    """Return the element Pixels of a page: the only one, else by size and page index (there may be a label image)."""
    candidates = elements(root, "Pixels")
    if len(candidates) < 2:
        return next(iter(candidates), None)
    size = [str(page.imagelength), str(page.imagewidth)]
    same = [pixels for pixels in candidates if [pixels.get("SizeY"), pixels.get("SizeX")] == size]
    index = str(page.index)
    named = [pixels for pixels in same if any(data.get("IFD", "0") == index for data in elements(pixels, "TiffData"))]
    return next(iter(named or same), None)


def elements(parent: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    """Return all elements below ``parent`` with a name, whatever their XML namespace."""
    return [element for element in parent.iter() if element.tag.rpartition("}")[2] == name]
