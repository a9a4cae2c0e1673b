"""Slides read with OpenSlide. Only this module imports OpenSlide and uses its ``(x, y)`` order."""

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
from pathology.readers.dicom.frames import jpeg_frames
from pathology.readers.dicom.spacing import stated_by_coarser_files
from pathology.readers.facts.levels import StatedLevel, believed_levels, fitted_levels
from pathology.readers.facts.pixel_size import checked_mpp, noted_if_contrary
from pathology.readers.facts.slide_facts import APERIO, StatedMpp, merged
from pathology.readers.facts.stated_mpp import TAGS
from pathology.readers.mpp import mpp_of_resolution, parse_number
from pathology.readers.per_thread import PerThread
from pathology.readers.source_level import (
    RGB,
    Affine,
    BadTile,
    SourceLevel,
    levels_of_sizes,
    split_on_grid,
    translation,
)
from pathology.readers.threads import run_in_pool

_BLOCK_PX = 1024
_CACHE_BYTES = 16 * 2**20
_OF_TAGS = ("generic-tiff", "hamamatsu", "trestle")
"""Formats whose microns per pixel OpenSlide takes from the resolution tags."""


class UnsupportedFormatError(SlideError):
    """OpenSlide does not support the format or its compression; another reader may."""


def open_handle(path: Path) -> openslide.OpenSlide:
    """Return OpenSlide's own handle, for benchmarks that compare with it."""
    return openslide.OpenSlide(path)


class OpenSlideSource:
    """A slide read with OpenSlide; see `SlideSource`.

    Each thread has its own handle, so blocks of a box are decoded in parallel. After an error, a handle is unusable and
    is replaced. Memory: the result, and for each thread one block and a cache of 16 MiB of decoded tiles.

    Args:
        path: The file.
        checked: Whether to compare the levels with the finest one, and leave out those that do not fit, with a note.

    Raises:
        UnsupportedFormatError: OpenSlide does not support the format or its compression.
        SlideError: OpenSlide supports the format but cannot open the file.
    """

    def __init__(self, path: Path, checked: bool = False) -> None:
        # `checked`: whether levels that do not fit are left out at once; `_checked`: whether this was done.
        self._path, self._checked = path, False
        self._handles = PerThread(self._new_handle, openslide.OpenSlide.close)
        slide = self._first_handle()
        properties = slide.properties
        self.vendor = properties.get(openslide.PROPERTY_NAME_VENDOR, "unknown")
        self.objective_power = _number(properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER))
        stated = _stated_mpp(properties)
        believed = checked_mpp(stated, self.objective_power, slide.dimensions[::-1])
        if self.vendor == "dicom":
            believed = noted_if_contrary(believed, stated_by_coarser_files(path))
        self.mpp, self.facts = believed.um, believed.facts
        self.icc = _icc_profile(slide)
        self.bounds = _bounds(slide)
        self.to_file_px: Affine = translation((self.bounds.y0, self.bounds.x0))
        self._background = _background(properties)
        self._downsamples = slide.level_downsamples
        self.levels = tuple(self._described(slide, k, v) for k, v in enumerate(_whole_levels(slide)))
        self._frames = jpeg_frames(path) if self.vendor == "dicom" else {}
        # For each level of `levels`, its index in the file.
        self._stored = tuple(range(len(self.levels)))
        if checked:
            self.check_levels()

    def check_levels(self) -> None:
        """Leave out levels whose size does not fit the finest one, or that show another picture, with a note.

        Formats that state the downsample of a level (MRXS, Philips, Ventana) round its size to whole tiles.
        """
        if self._checked:
            return
        self._checked = True
        all_levels = _whole_levels(self._handle())
        stated = [StatedLevel((level.height_px, level.width_px), level.tile_px) for level in all_levels]
        # A level fits by its size, or by a downsample that its format states, which is equal along both axes.
        fitted = [
            level if by_size is not None or level.downsample[0] == level.downsample[1] else None
            for level, by_size in zip(self.levels, fitted_levels(stated), strict=True)
        ]
        believed = believed_levels(stated, fitted, self.read)
        self.levels, self._stored = believed.levels, believed.kept
        self.facts = self.facts.noting(*believed.notes)

    def _first_handle(self) -> openslide.OpenSlide:
        """Return this thread's handle of the file, which is opened here for the first time."""
        try:
            return self._handles.get()
        except openslide.OpenSlideUnsupportedFormatError as error:
            raise UnsupportedFormatError("OpenSlide does not know the format") from error
        except openslide.OpenSlideError as error:
            reason = f"OpenSlide cannot open it: {_reason(error, self._path, 'Slidedat.ini or Index.dat')}"
            # Unsupported: a compression, or a TIFF without a tag that TIFF does not require. OpenSlide has one class
            # for all errors, so only the text shows this.
            is_unsupported = "compression" in str(error) or "required TIFF tag" in str(error)
            raise (UnsupportedFormatError if is_unsupported else SlideError)(reason) from error

    def _new_handle(self) -> openslide.OpenSlide:
        slide = open_handle(self._path)
        slide.set_cache(openslide.OpenSlideCache(_CACHE_BYTES))
        return slide

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenSlideSource, (self._path, self._checked)

    def _described(self, slide: openslide.OpenSlide, index: int, level: SourceLevel) -> SourceLevel:
        """Return a level with its size inside the bounds, and the size of its tiles."""
        (fy, fx) = level.downsample
        names = [f"openslide.level[{index}].tile-{side}" for side in ("height", "width")]
        stated = [int(slide.properties.get(name, 0)) for name in names]
        # Damaged files state tiles of any size, and a tile is read at once.
        tile = (stated[0], stated[1]) if all(16 <= v <= 4096 for v in stated) else level.tile_px
        return replace(
            level,
            # OpenSlide's levels are of the whole file: reduce them to the bounds. 1e-3: downsamples are rounded.
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
            return self._read_undamaged(block, level, part)

        bad_by_block = run_in_pool(read, split_on_grid(box, (_BLOCK_PX, _BLOCK_PX)))
        if bad is not None:
            bad += [tile for tiles in bad_by_block for tile in tiles]

    def _read(self, block: Box, level: int, out: RGB) -> None:
        """Read a block, in pixels of its level, into ``out``."""
        stored = self._stored[level]
        scale = self._downsamples[stored]
        # `read_region` takes level-0 pixels of the whole file, whatever the level.
        corner = (self.bounds.x0 + round(block.x0 * scale), self.bounds.y0 + round(block.y0 * scale))
        try:
            rgba = np.asarray(self._handle().read_region(corner, stored, (block.width, block.height)))
        except openslide.OpenSlideError as error:
            # After an error, a handle of OpenSlide repeats it for every later read.
            self._handles.drop()
            where = f"rows {block.y0}–{block.y1}, columns {block.x0}–{block.x1} of level {level}"
            raise TileError(f"OpenSlide cannot decode {where}: {_reason(error, self._path, 'a data file')}") from error
        size = self.levels[level]
        if (frames := self._frames.get((size.height_px, size.width_px))) is not None:
            frames.check(block)
        self._put(rgba, out)

    def _read_undamaged(self, block: Box, level: int, out: RGB) -> list[BadTile]:
        """Read a block; if that fails, read it tile by tile and return the tiles that fail."""
        try:
            self._read(block, level, out)
            return []
        except TileError:
            pass
        bad = []
        size = self.levels[level]
        for tile_box in split_on_grid(block, size.tile_px):
            part = out[tile_box.relative_to(block).slices()]
            try:
                self._read(tile_box, level, part)
            except TileError as error:
                part[...] = 255
                (y, x), (height, width) = (tile_box.y0, tile_box.x0), size.tile_px
                tile = Box.of_size(height, width).shift(y // height * height, x // width * width)
                bad.append(BadTile(tile.intersect(Box.of_size(size.height_px, size.width_px)), str(error)))
        return bad

    def _handle(self) -> openslide.OpenSlide:
        try:
            return self._handles.get()
        except openslide.OpenSlideError as error:
            raise SlideError(f"the file cannot be opened any more: {error}") from error

    def _put(self, rgba: RGB, out: RGB) -> None:
        """Write the colours over the slide's background colour into ``out``."""
        alpha, colours = rgba[..., 3:], rgba[..., :3]
        if alpha.min() < 255:
            opacity = alpha.astype(np.float32) / 255
            colours = np.rint(colours * opacity + self._background * (1 - opacity)).astype(np.uint8)
        for k in range(3):  # channel by channel takes a quarter of the time of all three at once
            out[..., k] = colours[..., k]

    def close(self) -> None:
        """Close OpenSlide's handles. Reading again opens new ones."""
        self._handles.close()


def _whole_levels(slide: openslide.OpenSlide) -> tuple[SourceLevel, ...]:
    """Return the levels of the whole file, whatever bounds it states."""
    levels = levels_of_sizes([(h, w) for w, h in slide.level_dimensions])
    return tuple(_as_stated(level, levels[0], f) for level, f in zip(levels, slide.level_downsamples, strict=True))


def _as_stated(level: SourceLevel, finest: SourceLevel, factor: float) -> SourceLevel:
    """Return the level with OpenSlide's downsample ``factor`` if the format states it, else the level unchanged.

    MRXS, Philips and Ventana files state downsamples (2, 4, 8 …). These cannot be computed from the sizes of coarse
    levels, which are rounded down or padded to whole tiles: 2047 / 31 px is 66, but the downsample is 64.
    """
    # OpenSlide's value for formats that state no downsample.
    by_size = (finest.height_px / level.height_px + finest.width_px / level.width_px) / 2
    is_stated = factor == round(factor) and abs(factor - by_size) > 1e-6 * factor
    return replace(level, downsample=(factor, factor)) if is_stated else level


def _stated_mpp(properties: Mapping[str, str]) -> tuple[StatedMpp, ...]:
    """Return the statements of OpenSlide's property, Aperio's text (perhaps with a decimal comma) and the tags."""
    vendor = properties.get(openslide.PROPERTY_NAME_VENDOR, "")
    unit = properties.get("tiff.ResolutionUnit", "")
    tag_y, tag_x = (_mpp_of_tag(_number(properties.get(f"tiff.{axis}Resolution")), unit) for axis in "YX")
    own_y, own_x = (
        _number(properties.get(name)) for name in (openslide.PROPERTY_NAME_MPP_Y, openslide.PROPERTY_NAME_MPP_X)
    )
    aperio = _number(properties.get("aperio.MPP"))
    name = APERIO if vendor == "aperio" else f"the {vendor} metadata"
    statements = [
        # OpenSlide's value is often that of the tags.
        (own_y, own_x, TAGS if vendor in _OF_TAGS else name),
        (aperio, aperio, APERIO),
        (tag_y, tag_x, TAGS),
    ]
    return merged((), tuple(StatedMpp((y, x), where) for y, x, where in statements if y is not None and x is not None))


def _mpp_of_tag(pixels_per_unit: float | None, unit: str) -> float | None:
    return None if pixels_per_unit is None else mpp_of_resolution(pixels_per_unit, unit)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else parse_number(text)
    except ValueError:
        return None


def _bounds(slide: openslide.OpenSlide) -> Box:
    """Return the box of level 0 that is not empty, which some files state; else the whole level."""
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
    """Return the colour that OpenSlide states for pixels that are not in the file; white if it states none."""
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
        return None  # a slide with a damaged profile is treated as one without
    return None if profile is None else bytes(profile.tobytes())


def _reason(error: openslide.OpenSlideError, path: Path, suspect: str) -> str:
    """Return OpenSlide's message, with file names (without their folder) and DICOM UIDs in plain quotes.

    Args:
        error: OpenSlide's error.
        path: The slide's file.
        suspect: The file that is probably damaged if the slide is an MRXS and the message names none.
    """
    text = str(error).translate(dict.fromkeys(map(ord, "“”„"), '"'))
    text = re.sub(rf"{re.escape(str(path.parent))}/([^:]*)", r'"\1"', text)
    text = re.sub(r"\b\d+(\.\d+){3,}\b", r'"\g<0>"', text)  # DICOM UIDs
    names_a_file = path.suffix != ".mrxs" or re.search(r"\.(dat|ini)\b", text, re.IGNORECASE)
    return text if names_a_file else f"{text} ({suspect} in its folder is damaged or truncated)"
