"""Slide files behind one protocol: a pyramid of RGB levels that is read by boxes.

This is the only place that knows OpenSlide's ``(x, y)`` order. Which reader opens a file:

```
OME-TIFF (OpenSlide does not see levels in SubIFDs)         → pathology.readers.tiff_source
what OpenSlide knows: TIFFs of no scanner (libtiff shows
                      damaged tiles as they come)           → pathology.readers.tiff_source, or refused
                      Aperio and NDPI that both show with
                      the same pixels (tried on open)       → pathology.readers.tiff_source; facts, gaps: OpenSlide
                      all else (MRXS, SCN, VMS, DICOM …)    → OpenSlide, one handle for each thread
CZI (OpenSlide has no JPEG XR; damage ends its process)     → pathology.readers.czi_source
what OpenSlide does not know                                → pathology.readers.tiff_source
```
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openslide
from PIL import ImageCms

from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.readers.czi_file import is_czi
from pathology.readers.czi_source import CziSource
from pathology.readers.file_check import check_file
from pathology.readers.mpp import first_sensible, mpp_of_resolution, parse_mpp
from pathology.readers.per_thread import PerThread
from pathology.readers.slide_source import SlideSource
from pathology.readers.source_level import RGB, Affine, BadTile, SourceLevel, moved_by, snapped_levels
from pathology.readers.threads import run_in_pool
from pathology.readers.tiff_facts import is_ome_tiff, largest_page, orientation_of_file
from pathology.readers.tiff_source import TiffSource, tiled_sizes
from pathology.readers.upright import UprightSource

SLIDE_SUFFIXES = frozenset(
    (
        *(".svs", ".tif", ".tiff", ".btf", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide", ".qptiff"),
        *(".czi", ".dcm"),
    )
)
"""What a folder is searched for; of DICOM files those that are whole slides."""

_PLAIN_TIFF = "generic-tiff"
_TILED_TIFF_VENDORS = frozenset(("aperio", _PLAIN_TIFF, "hamamatsu"))
_BLOCK_PX = 1024
_CACHE_BYTES = 64 * 2**20


def open_source(path: Path) -> SlideSource:
    """Open a slide file.

    Raises:
        SlideError: No reader knows the file, or it is damaged; the message says why.
    """
    check_file(path)
    if is_czi(path):
        return CziSource(path)
    if is_ome_tiff(path):
        return _upright(TiffSource(path), path)
    try:
        slow = OpenSlideSource(path)
    except openslide.OpenSlideUnsupportedFormatError:
        return _upright(TiffSource(path), path)
    except openslide.OpenSlideError as error:
        if "compression" in str(error):  # it knows the scanner, and not how this one packs its tiles
            return _upright(TiffSource(path), path)
        raise SlideError(f"OpenSlide cannot open it: {_why(error, path, 'Slidedat.ini or Index.dat')}") from error
    if slow.vendor not in _TILED_TIFF_VENDORS:
        return slow
    if slow.vendor == _PLAIN_TIFF:
        slow.close()
        size = slow.levels[0].height_px, slow.levels[0].width_px
        largest = largest_page(path) == size  # OpenSlide takes the first page, which may be a label
        return _upright(TiffSource(path, known=slow if largest else None), path)
    if orientation_of_file(path) != 1:  # OpenSlide turns each tile and leaves it in its place
        slow.close()
        return _upright(TiffSource(path, known=slow), path)
    return _faster(path, slow) or slow


def _why(error: openslide.OpenSlideError, path: Path, suspect: str) -> str:
    """Return what OpenSlide says; names of files and what is taken from them stand in plain quotes, to be found there.

    Args:
        error: Its error.
        path: Of the slide.
        suspect: What is damaged if the slide is an MRXS and the error names no file of its folder.
    """
    words = str(error).translate(dict.fromkeys(map(ord, "“”„"), '"'))
    words = re.sub(rf"{re.escape(str(path.parent))}/([^:]*)", r'"\1"', words)
    words = re.sub(r"\b\d+(\.\d+){3,}\b", r'"\g<0>"', words)  # the UIDs of DICOM
    named = path.suffix != ".mrxs" or re.search(r"\.(dat|ini)\b", words, re.IGNORECASE)
    return words if named else f"{words} ({suspect} in its folder is damaged or cut off)"


def _upright(stored: TiffSource, path: Path) -> SlideSource:
    orientation = orientation_of_file(path)
    return stored if orientation == 1 else UprightSource(stored, orientation)


def _faster(path: Path, slow: OpenSlideSource) -> TiffSource | None:
    """Return the fast reader where it shows what OpenSlide shows; None where it does not read the file."""
    stored = _stored_levels(path, slow) if slow.vendor == "hamamatsu" else list(range(len(slow.levels)))

    def fill_missing(box: Box, level: int, out: RGB) -> None:
        slow.read_into(box, stored[level], out)

    try:
        fast = TiffSource(path, known=slow, fill_missing=fill_missing, stored=stored)
    except SlideError:
        return None
    if all(_same_pixels(fast, k, slow, level) for k, level in enumerate(stored)):
        slow.close()  # until a tile that was left out is asked for
        return fast
    fast.close()
    return None


def _stored_levels(path: Path, slow: OpenSlideSource) -> list[int]:
    """Return those levels of an NDPI that stand in the file.

    OpenSlide adds halves of them, decoded at a smaller size; an area filter over the stored pixels says more.
    """
    sizes = tiled_sizes(path)
    found = [k for k, level in enumerate(slow.levels) if (level.height_px, level.width_px) in sizes]
    return found if found[:1] == [0] else list(range(len(slow.levels)))


def _same_pixels(fast: TiffSource, k: int, slow: OpenSlideSource, level: int) -> bool:
    """Whether a tile of level ``k``, ``level`` for OpenSlide, looks alike; the first of a coarse one, which it hits.

    True where it is damaged: the fast reader says so when it is read, and OpenSlide may show it as it comes.
    """
    size = fast.levels[k]
    height, width = size.tile_px
    y = size.height_px // 2 // height * height if level == 0 else 0
    x = size.width_px // 2 // width * width if level == 0 else 0
    box = Box(y, y + height, x, x + width).intersect(Box.of_size(size.height_px, size.width_px))
    try:
        return bool(np.array_equal(fast.read(box, k), slow.read(box, level)))
    except TileError:
        return True


class OpenSlideSource:
    """A slide read with OpenSlide; see `SlideSource`.

    Each thread has its own handle, so that blocks of a box are decoded in parallel. An error leaves a handle dead:
    it is replaced. Memory: the result, a block for each thread, a cache of 64 MiB of decoded tiles.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handles = PerThread(self._new_handle, openslide.OpenSlide.close)
        slide = self._handles.get()
        properties = slide.properties
        self.mpp = _stated_mpp(properties)
        self.vendor = properties.get(openslide.PROPERTY_NAME_VENDOR, "unknown")
        self.objective_power = _number(properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER))
        self.icc = _icc_profile(slide)
        self.bounds = _bounds(slide)
        self.to_file_px: Affine = moved_by((self.bounds.y0, self.bounds.x0))
        self._background = _background(properties)
        self._downsamples = slide.level_downsamples
        self.levels = tuple(self._described(slide, k, v) for k, v in enumerate(_whole_levels(slide)))

    def _new_handle(self) -> openslide.OpenSlide:
        slide = openslide.OpenSlide(self._path)
        slide.set_cache(openslide.OpenSlideCache(_CACHE_BYTES // 4))
        return slide

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenSlideSource, (self._path,)

    def _described(self, slide: openslide.OpenSlide, index: int, level: SourceLevel) -> SourceLevel:
        (fy, fx) = level.downsample
        names = [f"openslide.level[{index}].tile-{side}" for side in ("height", "width")]
        stated = [int(slide.properties.get(name, 0)) for name in names]
        tile = (stated[0], stated[1]) if all(16 <= v <= 4096 for v in stated) else level.tile_px
        return replace(
            level,
            height_px=min(level.height_px, max(1, math.ceil(self.bounds.height / fy - 1e-3))),
            width_px=min(level.width_px, max(1, math.ceil(self.bounds.width / fx - 1e-3))),
            tile_px=tile,
        )

    def read(self, box: Box, level: int) -> RGB:
        """Return ``(h, w, 3)``; see `SlideSource.read`. Transparent pixels show the slide's background colour."""
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        self.read_into(box, level, out)
        return out

    def read_into(self, box: Box, level: int, out: RGB, bad: list[BadTile] | None = None) -> None:
        """Fill ``out``; see `SlideSource.read_into`. Transparent pixels show the slide's background colour."""

        def read(block: Box) -> list[BadTile]:
            part = out[block.relative_to(box).slices()]
            if bad is None:
                self._read(block, level, part)
                return []
            return self._read_what_can_be(block, level, part)

        found = run_in_pool(read, _pieces(box, (_BLOCK_PX, _BLOCK_PX)))
        if bad is not None:
            bad += [tile for tiles in found for tile in tiles]

    def _read(self, block: Box, level: int, out: RGB) -> None:
        scale = self._downsamples[level]
        corner = (self.bounds.x0 + round(block.x0 * scale), self.bounds.y0 + round(block.y0 * scale))
        try:
            rgba = np.asarray(self._handle().read_region(corner, level, (block.width, block.height)))
        except openslide.OpenSlideError as error:
            self._handles.drop()
            place = f"rows {block.y0}–{block.y1}, columns {block.x0}–{block.x1} of level {level}"
            raise TileError(f"OpenSlide cannot decode {place}: {_why(error, self._path, 'a data file')}") from error
        self._put(rgba, out)

    def _read_what_can_be(self, block: Box, level: int, out: RGB) -> list[BadTile]:
        """Read a block whole; where that fails, tile by tile."""
        try:
            self._read(block, level, out)
            return []
        except TileError:
            pass
        bad = []
        size = self.levels[level]
        for place in _pieces(block, size.tile_px):
            part = out[place.relative_to(block).slices()]
            try:
                self._read(place, level, part)
            except TileError as error:
                part[...] = 255
                (y, x), (height, width) = (place.y0, place.x0), size.tile_px
                tile = Box.of_size(height, width).shift(y // height * height, x // width * width)
                bad.append(BadTile(tile.intersect(Box.of_size(size.height_px, size.width_px)), str(error)))
        return bad

    def _handle(self) -> openslide.OpenSlide:
        try:
            return self._handles.get()
        except openslide.OpenSlideError as error:
            raise SlideError(f"the file cannot be opened any more: {error}") from error

    def _put(self, rgba: RGB, out: RGB) -> None:
        alpha, colours = rgba[..., 3:], rgba[..., :3]
        if alpha.min() < 255:
            share = alpha.astype(np.float32) / 255
            colours = np.rint(colours * share + self._background * (1 - share)).astype(np.uint8)
        for k in range(3):  # a quarter of the time of all three at once, which NumPy copies by threes
            out[..., k] = colours[..., k]

    def close(self) -> None:
        """Close OpenSlide's handles; reading opens new ones."""
        self._handles.close()


def _pieces(box: Box, size: tuple[int, int]) -> list[Box]:
    """Cut a box along the lines of a grid that starts at (0, 0)."""
    height, width = size
    rows = range(box.y0 // height * height, box.y1, height)
    columns = range(box.x0 // width * width, box.x1, width)
    return [Box(y, y + height, x, x + width).intersect(box) for y in rows for x in columns]


def _whole_levels(slide: openslide.OpenSlide) -> tuple[SourceLevel, ...]:
    levels = snapped_levels([(h, w) for w, h in slide.level_dimensions])
    return tuple(_as_stated(level, levels[0], f) for level, f in zip(levels, slide.level_downsamples, strict=True))


def _as_stated(level: SourceLevel, finest: SourceLevel, factor: float) -> SourceLevel:
    """Return the level with the whole factor that its format states, where it states one.

    MRXS, Philips and Ventana know their factors (2, 4, 8 …). The sizes of coarse levels, rounded down or filled up to
    whole tiles, no longer tell: 2047 / 31 px is 66, and the factor was 64.
    """
    by_size = (finest.height_px / level.height_px + finest.width_px / level.width_px) / 2  # where none is stated
    stated = factor == round(factor) and abs(factor - by_size) > 1e-6 * factor
    return replace(level, downsample=(factor, factor)) if stated else level


def _stated_mpp(properties: Mapping[str, str]) -> tuple[float, float] | None:
    """Return (y, x): OpenSlide's own reading, else the maker's text (decimal commas too), else resolution tags."""
    pairs = [
        (properties.get(openslide.PROPERTY_NAME_MPP_Y), properties.get(openslide.PROPERTY_NAME_MPP_X)),
        (properties.get("aperio.MPP"), properties.get("aperio.MPP")),
    ]
    stated = [(_number(y), _number(x)) for y, x in pairs]
    unit = properties.get("tiff.ResolutionUnit", "")
    tags = [_number(properties.get(f"tiff.{axis}Resolution")) for axis in "YX"]
    stated.append((_mpp_of_tag(tags[0], unit), _mpp_of_tag(tags[1], unit)))
    return first_sensible(*[(y, x) for y, x in stated if y is not None and x is not None])


def _mpp_of_tag(pixels_per_unit: float | None, unit: str) -> float | None:
    return None if pixels_per_unit is None else mpp_of_resolution(pixels_per_unit, unit)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else parse_mpp(text)
    except ValueError:
        return None


def _bounds(slide: openslide.OpenSlide) -> Box:
    width, height = slide.dimensions
    names = (
        openslide.PROPERTY_NAME_BOUNDS_Y,
        openslide.PROPERTY_NAME_BOUNDS_X,
        openslide.PROPERTY_NAME_BOUNDS_HEIGHT,
        openslide.PROPERTY_NAME_BOUNDS_WIDTH,
    )
    try:
        y, x, h, w = (int(slide.properties[name]) for name in names)
    except (KeyError, ValueError):
        return Box.of_size(height, width)
    stated = Box(y, y + h, x, x + w).intersect(Box.of_size(height, width))
    return Box.of_size(height, width) if stated.empty else stated


def _background(properties: Mapping[str, str]) -> npt.NDArray[np.float32]:
    text = properties.get(openslide.PROPERTY_NAME_BACKGROUND_COLOR, "FFFFFF")
    try:
        values = [int(text[i : i + 2], 16) for i in (0, 2, 4)]
    except ValueError:
        values = [255, 255, 255]
    return np.array(values, np.float32)


def _icc_profile(slide: openslide.OpenSlide) -> bytes | None:
    try:
        profile = slide.color_profile
    except (openslide.OpenSlideError, ImageCms.PyCMSError, OSError, ValueError):
        return None  # a broken profile is no profile, its slide is still a slide
    return None if profile is None else bytes(profile.tobytes())
