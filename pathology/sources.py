"""Slide files behind one protocol: a pyramid of RGB levels that is read by boxes.

This is the only place that knows OpenSlide's ``(x, y)`` order. Which reader opens a file: OME-TIFF goes to
`pathology.tiff_source` (OpenSlide does not see the levels in SubIFDs), all else to OpenSlide, and what OpenSlide
does not know to `pathology.tiff_source`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import openslide
from PIL import ImageCms

from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.mpp import is_sensible, mpp_of_resolution, parse_mpp
from pathology.source_level import RGB, SourceLevel, snapped_levels
from pathology.tiff_source import TiffSource

SLIDE_SUFFIXES = frozenset(
    (".svs", ".tif", ".tiff", ".btf", ".ndpi", ".mrxs", ".scn", ".vms", ".vmu", ".bif", ".svslide", ".qptiff", ".czi")
)
"""What a folder is searched for."""


class SlideSource(Protocol):
    """An open slide file. Not to be shared between threads or processes.

    Attributes:
        levels: Finest first. A source that states bounds counts pixels from their first one.
        mpp: Microns per pixel (y, x) of the finest level, None where the file does not state them.
        bounds: The box of the file's finest level that ``levels`` show.
        vendor: Name of the scanner's maker or of the format.
        objective_power: As the file states it.
        icc: The ICC profile's bytes.
    """

    levels: tuple[SourceLevel, ...]
    mpp: tuple[float, float] | None
    bounds: Box
    vendor: str
    objective_power: float | None
    icc: bytes | None

    def read(self, box: Box, level: int) -> RGB:
        """Return ``(h, w, 3)`` uint8 of a box inside the level; the caller's own, of any strides, maybe read-only.

        Raises:
            TileError: Something in the box cannot be decoded. The source stays usable.
        """

    def close(self) -> None:
        """Let go of the file."""


def open_source(path: Path) -> SlideSource:
    """Open a slide file.

    Raises:
        SlideError: No reader knows the file, or it is damaged; the message says why.
    """
    _check_file(path)
    if path.name.lower().endswith((".ome.tif", ".ome.tiff", ".ome.btf")):
        return TiffSource(path)
    try:
        return OpenSlideSource(path)
    except openslide.OpenSlideUnsupportedFormatError:
        return TiffSource(path)
    except openslide.OpenSlideError as error:
        raise SlideError(f"OpenSlide cannot open it: {error}") from error


class OpenSlideSource:
    """A slide read with OpenSlide; see `SlideSource`. Reopened after an error, which leaves OpenSlide's handle dead."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._slide = openslide.OpenSlide(path)
        properties = self._slide.properties
        self.mpp = _stated_mpp(properties)
        self.vendor = properties.get(openslide.PROPERTY_NAME_VENDOR, "unknown")
        self.objective_power = _number(properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER))
        self.icc = _icc_profile(self._slide)
        self.bounds = _bounds(self._slide)
        self._background = _background(properties)
        self._downsamples = self._slide.level_downsamples
        self.levels = self._bounded_levels()

    def _bounded_levels(self) -> tuple[SourceLevel, ...]:
        whole = snapped_levels([(h, w) for w, h in self._slide.level_dimensions])
        found = []
        for level in whole:
            (fy, fx) = level.downsample
            height = min(level.height_px, max(1, int(self.bounds.height / fy + 0.999)))
            width = min(level.width_px, max(1, int(self.bounds.width / fx + 0.999)))
            found.append(SourceLevel(height, width, level.downsample))
        return tuple(found)

    def read(self, box: Box, level: int) -> RGB:
        """Return ``(h, w, 3)``; see `SlideSource.read`. Transparent pixels show the slide's background colour."""
        scale = self._downsamples[level]
        x = self.bounds.x0 + round(box.x0 * scale)
        y = self.bounds.y0 + round(box.y0 * scale)
        try:
            rgba = np.asarray(self._slide.read_region((x, y), level, (box.width, box.height)))
        except openslide.OpenSlideError as error:
            self._slide.close()
            self._slide = _reopened(self._path)
            raise TileError(f"OpenSlide cannot decode rows {box.y0}–{box.y1} of level {level}: {error}") from error
        return self._opaque(rgba)

    def _opaque(self, rgba: RGB) -> RGB:
        alpha = rgba[..., 3:]
        colours = rgba[..., :3]
        if alpha.min() == 255:
            return colours
        share = alpha.astype(np.float32) / 255
        mixed = colours * share + self._background * (1 - share)
        opaque: RGB = np.rint(mixed).astype(np.uint8)
        return opaque

    def close(self) -> None:
        """Close OpenSlide's handle."""
        self._slide.close()


def _reopened(path: Path) -> openslide.OpenSlide:
    try:
        return openslide.OpenSlide(path)
    except openslide.OpenSlideError as error:
        raise SlideError(f"the file cannot be opened any more: {error}") from error


def _check_file(path: Path) -> None:
    """Say in plain words what is wrong with a file that no reader will open.

    Raises:
        SlideError: The file is missing, unreadable, empty, another kind of picture, or a TIFF cut before its directory.
    """
    try:
        with path.open("rb") as file:
            head = file.read(16)
            size = os.fstat(file.fileno()).st_size
    except IsADirectoryError as error:
        raise SlideError("it is a folder, not a slide file") from error
    except OSError as error:
        raise SlideError(f"the file cannot be read: {error.strerror}") from error
    if size == 0:
        raise SlideError("the file is empty (0 bytes)")
    for magic, name in ((b"\x89PNG", "a PNG picture"), (b"\xff\xd8\xff", "a JPEG picture"), (b"%PDF", "a PDF")):
        if head.startswith(magic) and path.suffix.lower() in {".svs", ".tif", ".tiff"}:
            raise SlideError(f"the file is {name} under the name of a slide")
    first = _first_directory(head)
    if first is not None and first >= size:
        raise SlideError(f"the file is cut off: its directory should be at byte {first}, the file has {size} bytes")


def _first_directory(head: bytes) -> int | None:
    """Return the offset of a TIFF's first directory; None for other files (TIFF 6.0, and BigTIFF with 43)."""
    order = {b"II": "little", b"MM": "big"}.get(head[:2])
    if order is None or len(head) < 16:
        return None
    version = int.from_bytes(head[2:4], "little" if order == "little" else "big")
    part = {42: head[4:8], 43: head[8:16]}.get(version)
    return None if part is None else int.from_bytes(part, "little" if order == "little" else "big")


def _stated_mpp(properties: openslide._PropertyMap) -> tuple[float, float] | None:
    """Return (y, x): OpenSlide's own reading, else the maker's text (decimal commas too), else resolution tags."""
    pairs = [
        (properties.get(openslide.PROPERTY_NAME_MPP_Y), properties.get(openslide.PROPERTY_NAME_MPP_X)),
        (properties.get("aperio.MPP"), properties.get("aperio.MPP")),
    ]
    stated = [(_number(y), _number(x)) for y, x in pairs]
    unit = properties.get("tiff.ResolutionUnit", "")
    tags = [_number(properties.get(f"tiff.{axis}Resolution")) or 0.0 for axis in "YX"]
    stated.append((mpp_of_resolution(tags[0], unit), mpp_of_resolution(tags[1], unit)))
    known = [(y, x) for y, x in stated if y is not None and x is not None]
    return next((pair for pair in known if is_sensible(pair)), known[0] if known else None)


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


def _background(properties: openslide._PropertyMap) -> npt.NDArray[np.float32]:
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
