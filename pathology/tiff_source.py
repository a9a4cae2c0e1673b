"""Tiled and striped TIFF, OME-TIFF with its levels in SubIFDs included: parsed by tifffile, read tile by tile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import tifffile

from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.mpp import mpp_of_resolution, parse_mpp
from pathology.source_level import RGB, SourceLevel, snapped_levels

_JPEG = {6, 7}
_EOI = b"\xff\xd9"
_UNITS = {1: "", 2: "inch", 3: "centimeter", 4: "millimeter", 5: "micrometer"}
_OME_UNITS_UM = {"µm": 1.0, "μm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "m": 1e6}


class TiffSource:
    """A slide in a TIFF; see `pathology.sources.SlideSource`. Memory: the result and one tile.

    Raises:
        SlideError: Not a TIFF, or its pixels are not 8-bit RGB.
    """

    def __init__(self, path: Path) -> None:
        try:
            with tifffile.TiffFile(path) as tiff:
                series = _largest_series(tiff)
                self._pages = [_keyframe(level) for level in series.levels]
                for page in self._pages:
                    _check_page(page)
                    _ = page.decode  # built while the file is open (it looks for a JFIF header), used after
                self.mpp = _ome_mpp(tiff) if tiff.is_ome else None
                self.vendor = "ome-tiff" if tiff.is_ome else "generic-tiff"
        except (tifffile.TiffFileError, OSError, IndexError, ValueError, KeyError) as error:
            raise SlideError(f"neither OpenSlide nor tifffile can open it: {error}") from error
        first = self._pages[0]
        self.levels: tuple[SourceLevel, ...] = snapped_levels([(p.imagelength, p.imagewidth) for p in self._pages])
        self.bounds = Box.of_size(first.imagelength, first.imagewidth)
        self.mpp = self.mpp or _tag_mpp(first)
        self.objective_power: float | None = None
        self.icc: bytes | None = getattr(first, "iccprofile", None) or None
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise SlideError(f"the file cannot be read: {error.strerror}") from error

    def read(self, box: Box, level: int) -> RGB:
        """Return ``(h, w, 3)``; see `pathology.sources.SlideSource.read`."""
        page = self._pages[level]
        height, width = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, page.imagewidth)
        columns = -(-page.imagewidth // width)
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        for row in range(box.y0 // height, -(-box.y1 // height)):
            for column in range(box.x0 // width, -(-box.x1 // width)):
                tile = self._decode(page, row * columns + column)
                origin = Box(row * height, row * height + tile.shape[0], column * width, column * width + tile.shape[1])
                common = origin.intersect(box)
                out[common.relative_to(box).slices()] = tile[common.relative_to(origin).slices()]
        return out

    def _decode(self, page: Any, index: int) -> RGB:
        offset, length = page.dataoffsets[index], page.databytecounts[index]
        try:
            data = os.pread(self._handle, length, offset)
        except OSError as error:
            raise TileError(
                f"tile {index} of level {page.imagewidth} × {page.imagelength}: {error.strerror}"
            ) from error
        if length == 0 or len(data) != length:
            raise TileError(f"tile {index} of level {page.imagewidth} × {page.imagelength} is missing or cut off")
        if page.compression in _JPEG and _EOI not in data[-16:]:
            raise TileError(f"tile {index} of level {page.imagewidth} × {page.imagelength}: its JPEG is cut off")
        try:
            decoded, _, _ = page.decode(data, index, jpegtables=page.jpegtables, jpegheader=page.jpegheader)
        except Exception as error:  # each codec of imagecodecs has its own exception
            raise TileError(f"tile {index} of level {page.imagewidth} × {page.imagelength}: {error}") from error
        if decoded is None:
            raise TileError(f"tile {index} of level {page.imagewidth} × {page.imagelength} does not decode")
        pixels: RGB = decoded[0, ..., :3]
        return pixels

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


def _largest_series(tiff: tifffile.TiffFile) -> Any:
    """Return the series with the most pixels: labels, macros and thumbnails are smaller."""
    if not tiff.series:
        raise SlideError("the TIFF holds no picture")
    return max(tiff.series, key=lambda s: int(np.prod(s.shape, dtype=np.int64)))


def _keyframe(level: Any) -> Any:
    if len(level.pages) != 1:
        raise SlideError(f"the TIFF is a stack of {len(level.pages)} planes; a slide has one")
    page = level.pages[0]
    return page.aspage() if isinstance(page, tifffile.TiffFrame) else page


def _check_page(page: Any) -> None:
    kind = f"{page.samplesperpixel} × {page.bitspersample} bit, {page.photometric!s}"
    if page.samplesperpixel not in (3, 4) or page.bitspersample != 8 or page.planarconfig != 1:
        raise SlideError(f"its pixels are not 8-bit RGB but {kind}")
    if page.photometric not in (2, 6):
        raise SlideError(f"its colours are not RGB or YCbCr but {kind}")
    if page.tags.get("Orientation") is not None and int(page.tags["Orientation"].value) != 1:
        raise SlideError("the TIFF is turned or mirrored (tag Orientation), which no reader here can show upright")


def _tag_mpp(page: Any) -> tuple[float, float] | None:
    tags = page.tags
    if "XResolution" not in tags or "YResolution" not in tags:
        return None
    unit = _UNITS.get(int(tags["ResolutionUnit"].value) if "ResolutionUnit" in tags else 2, "")
    y, x = (mpp_of_resolution(_ratio(tags[name].value), unit) for name in ("YResolution", "XResolution"))
    return None if y is None or x is None else (y, x)


def _ratio(value: tuple[int, int]) -> float:
    return value[0] / value[1] if value[1] else 0.0


def _ome_mpp(tiff: tifffile.TiffFile) -> tuple[float, float] | None:
    """Return PhysicalSizeY and X of the first image of the OME-XML, in micrometres."""
    try:
        root = ElementTree.fromstring(tiff.ome_metadata or "")
    except ElementTree.ParseError:
        return None
    pixels = next((e for e in root.iter() if e.tag.rpartition("}")[2] == "Pixels"), None)
    if pixels is None:
        return None
    sizes = []
    for axis in "YX":
        unit = _OME_UNITS_UM.get(pixels.get(f"PhysicalSize{axis}Unit", "µm"))
        try:
            size = parse_mpp(pixels.get(f"PhysicalSize{axis}", ""))
        except ValueError:
            return None
        if unit is None:
            return None
        sizes.append(size * unit)
    return sizes[0], sizes[1]
