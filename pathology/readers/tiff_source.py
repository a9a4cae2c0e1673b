"""Tiled and striped TIFF, also OME-TIFF with levels in SubIFDs: parsed once, read and decoded in parallel.

```
box → its tiles → combined reads of adjacent tiles (pread, ≤ 8 MiB) → decoded on threads → copied into the result
```
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.readers.facts.levels import StatedLevel, believed_levels, fitted_levels
from pathology.readers.facts.pictures import WHOLE, Pick, PlanesError, check_plane, pages_of_ome, picked_plane
from pathology.readers.facts.pixel_size import checked_mpp, noted_if_contrary
from pathology.readers.facts.slide_facts import Note, merged
from pathology.readers.facts.stated_mpp import power_of_ome, stated_by_coarser, stated_by_tiff
from pathology.readers.slide_file import SlideFile, coalesced
from pathology.readers.slide_source import SlideSource
from pathology.readers.source_level import RGB, Affine, BadTile, SourceLevel, levels_of_sizes, translation
from pathology.readers.threads import decode_threads, in_pool, submit
from pathology.readers.tiff_level import TiffLevel, parse_level, propagate_missing_tiles, shown_by_finer
from pathology.readers.tiff_metadata import PARSE_ERRORS, is_truncated, keyframe, orientation_of_page

_TASK_PX = 2**19
_MAX_PENDING_BYTES = 24 * 2**20
_WHITE, _HEADER_BYTES = 255, 8
_ASPECT_TOLERANCE = 0.02

FillMissing = Callable[[Box, int, RGB], None]
"""Fills in the pixels of tiles that the scanner left out: (box, level, out)."""


class TiffSource:
    """A slide in a TIFF; see `pathology.readers.slide_source.SlideSource`.

    Memory: the result, 24 MiB of encoded tiles, one decoded tile for each thread.

    Args:
        path: The file.
        by_openslide: The same slide opened with OpenSlide. If given, the levels are the pages with the sizes of its
            levels, and its metadata is used.
        fill_missing: Fills in tiles that the scanner left out; by default they show the next finer level or, at the
            finest one, white. Not called for a file of several focal planes: it would show another plane.
        stored: Indices of the levels of ``by_openslide`` that are stored in the file; default: all.
        pick: Which of the file's pictures to open, if it has several.
        reopen: Opens the file again when the source is unpickled; default: this class, without the other arguments.

    Raises:
        SlideError: The file is not a TIFF, not 8-bit RGB or grey, or has no pages for the levels of ``by_openslide``.
    """

    def __init__(
        self,
        path: Path,
        by_openslide: SlideSource | None = None,  # the same slide, whose metadata is then used
        fill_missing: FillMissing | None = None,
        stored: Sequence[int] | None = None,  # indices of the levels of `by_openslide` that the file stores
        reopen: Callable[[Path], SlideSource] | None = None,  # called when the source is unpickled
        pick: Pick = WHOLE,
    ) -> None:
        self._path, self._reopen = path, reopen or TiffSource
        try:
            with tifffile.TiffFile(path, _multifile=False) as tiff:  # a set's other files are slides of their own
                pages, notes = _pages(tiff, path.name, pick, by_openslide, stored)
                self.is_one_of_planes = by_openslide is not None and len(_of_one_size(tiff, pages[0])) > 1
                self._fill_missing = None if self.is_one_of_planes else fill_missing
                levels = _complete_levels([parse_level(page) for page in pages], path.stat().st_size)
                self._levels = (
                    propagate_missing_tiles(levels) if by_openslide and by_openslide.vendor == "aperio" else levels
                )
                first = pages[0]
                power = by_openslide.objective_power if by_openslide else power_of_ome(tiff.ome_metadata or "")
                stated = merged(by_openslide.facts.mpp if by_openslide else (), stated_by_tiff(tiff, first))
                checked = noted_if_contrary(checked_mpp(stated, power, _size(first)), stated_by_coarser(pages))
                self.orientation = orientation_of_page(first)
                of_format = "ome-tiff" if tiff.is_ome else "generic-tiff"
                self.vendor = by_openslide.vendor if by_openslide else of_format
                # The tag itself: OpenSlide's binding returns the profile as rewritten by Little CMS.
                self.icc: bytes | None = first.iccprofile or (by_openslide.icc if by_openslide else None)
        except PARSE_ERRORS as error:
            text = str(error) or type(error).__name__
            reason = "the file is truncated within its directories" if is_truncated(path) else text
            raise SlideError(f"neither OpenSlide nor tifffile can open it: {reason}") from error
        self.mpp, self.facts, self.objective_power = checked.um, checked.facts.noting(*notes), power
        self.facts = self.facts.noting(*dict.fromkeys(level.note for level in self._levels if level.note))
        self.bounds = Box.of_size(self._levels[0].height_px, self._levels[0].width_px)
        self.to_file_px: Affine = translation((0, 0))
        # For each level of `levels`, its index among the pages from `_pages`.
        self._kept = list(range(len(self._levels)))
        sizes = [(level.height_px, level.width_px) for level in self._levels]
        self.levels = tuple(map(_described, levels_of_sizes(sizes), self._levels))
        self._file = SlideFile(path)
        try:
            # At the end, because it reads pixels: the file must be open and the levels described.
            self._check_levels()
        except BaseException:
            self._file.close()  # the caller gets no source that it could close
            raise

    def _check_levels(self) -> None:
        """Keep the levels that fit the finest one and show the same picture, cut off their padding, note the others."""
        stated = [StatedLevel((v.height_px, v.width_px), (v.tile_height_px, v.tile_width_px)) for v in self._levels]
        believed = believed_levels(stated, fitted_levels(stated), self._read_stored)
        self._kept = list(believed.kept)
        self._levels = [
            replace(self._levels[k], height_px=level.height_px, width_px=level.width_px)
            for k, level in zip(believed.kept, believed.levels, strict=True)
        ]
        self.levels = tuple(map(_described, believed.levels, self._levels))
        self.facts = self.facts.noting(*believed.notes)

    def _read_stored(self, box: Box, level: int) -> RGB:
        """Return the pixels of a box; raise TileError if the scanner left a tile of it out, which shows nothing."""
        lengths = self._levels[level].lengths
        if any(lengths[index] == 0 for index in self._levels[level].tiles_in(box)):
            raise TileError("a tile was left out by the scanner")
        return self.read(box, level)

    @property
    def tiff_levels(self) -> tuple[TiffLevel, ...]:
        """The levels with the positions of their tiles in the file, for callers that copy encoded tiles."""
        return tuple(self._levels)

    @property
    def kept(self) -> tuple[int, ...]:
        """For each level, its index among those that the file has; some may have been left out."""
        return tuple(self._kept)

    @property
    def file(self) -> SlideFile:
        """The open file."""
        return self._file

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, (self._path,)

    def read(self, box: Box, level: int) -> RGB:
        """Return ``(h, w, 3)``; see `pathology.readers.slide_source.SlideSource.read`."""
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        self.read_into(box, level, out)
        return out

    def read_into(self, box: Box, level: int, out: RGB, bad: list[BadTile] | None = None) -> None:
        """Fill ``out`` with a box of a level; see `pathology.readers.slide_source.SlideSource.read_into`."""
        failed = _BoxReader(self._levels[level], self._file, box, out).run()
        missing = [index for index in self._levels[level].tiles_in(box) if self._levels[level].lengths[index] == 0]
        for index in missing:
            failed += self._fill_missing_tile(index, level, box, out)
        if failed and bad is None:
            raise TileError(f"level {level} ({self.levels[level].width_px} px wide), {failed[0].reason}")
        if bad is not None:
            bad += failed

    def _fill_missing_tile(self, index: int, level: int, box: Box, out: RGB) -> list[BadTile]:
        """Fill the pixels of a tile that the file does not have; return the tile if this fails and it is left white.

        Without `fill_missing` they are taken from the next finer level; they are white where that has no tile either.
        """
        tile_box = self._levels[level].tile_box(index)
        common = tile_box.intersect(box)
        part = out[common.relative_to(box).slices()]
        part[...] = _WHITE
        try:
            if self._fill_missing is not None:
                self._fill_missing(common, self._kept[level], part)
            elif (shown := shown_by_finer(self._levels, level, common, self.read)) is not None:
                part[...] = shown
        except TileError as error:
            part[...] = _WHITE
            return [BadTile(tile_box, str(error))]
        return []

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _BoxReader:
    """Reads one box of a level: groups of encoded tiles are read here and decoded on the pool's threads."""

    def __init__(self, level: TiffLevel, file: SlideFile, box: Box, out: RGB) -> None:
        self._level, self._file, self._box, self._out = level, file, box, out
        self._tiles = [index for index in level.tiles_in(box) if level.lengths[index] > 0]

    def run(self) -> list[BadTile]:
        """Read and decode all tiles; return those that failed, by position."""
        in_place = decode_threads() == 1 or in_pool() or len(self._tiles) < 2
        bad: list[BadTile] = []
        pending: deque[tuple[Future[list[BadTile]], int]] = deque()
        try:
            for group in self._groups():
                if in_place:
                    bad += self._decode(group)
                    continue
                pending.append((submit(self._decode, group), sum(len(data) for _, data in group)))
                # Bounded by number and by bytes: reading is faster than decoding, and would hold the whole box encoded.
                while len(pending) > 4 * decode_threads() or sum(n for _, n in pending) > _MAX_PENDING_BYTES:
                    bad += pending.popleft()[0].result()
        finally:  # wait for all: no thread may write into the caller's memory after an exception is raised
            for future, _ in pending:
                future.exception()
        bad += [tile for future, _ in pending for tile in future.result()]
        return sorted(bad, key=lambda tile: (tile.box.y0, tile.box.x0))

    def _groups(self) -> Iterator[list[tuple[int, bytes]]]:
        """Yield groups of (tile index, encoded bytes); a thread decodes one group at a time."""
        tile_px = self._level.tile_height_px * self._level.tile_width_px
        # Large enough that a task outweighs its start, and at least two for each thread.
        size = max(1, min(_TASK_PX // tile_px, len(self._tiles) // (2 * decode_threads())))
        tiles = self._encoded()
        while group := list(islice(tiles, size)):
            yield group

    def _encoded(self) -> Iterator[tuple[int, bytes]]:
        """Yield (tile index, encoded bytes) in the order of the file."""
        offsets = self._level.offsets[self._tiles].tolist()
        lengths = self._level.lengths[self._tiles].tolist()
        for span in coalesced(offsets, lengths):
            data = self._read_or_nothing(span.offset, span.length)
            for member in span.members:
                start = offsets[member] - span.offset
                # A bad sector makes the combined read fail; most of its tiles may still be readable one by one.
                tile = data[start : start + lengths[member]] or self._read_or_nothing(offsets[member], lengths[member])
                yield self._tiles[member], tile

    def _read_or_nothing(self, offset: int, length: int) -> bytes:
        """Return bytes of the file; fewer at its end, none if the disk fails."""
        try:
            return self._file.read(offset, length)
        except OSError:
            return b""

    def _decode(self, tiles: Sequence[tuple[int, bytes]]) -> list[BadTile]:
        """Decode tiles into the result; return those that failed, which are white."""
        bad = []
        for index, data in tiles:
            tile_box = self._level.tile_box(index)
            common = tile_box.intersect(self._box)
            part = self._out[common.relative_to(self._box).slices()]
            try:
                pixels = self._pixels(index, data, tile_box)
            except ValueError as error:
                part[...] = _WHITE
                bad.append(
                    BadTile(tile_box, f"rows {tile_box.y0}–{tile_box.y1}, columns {tile_box.x0}–{tile_box.x1}: {error}")
                )
            else:
                part[...] = pixels[common.relative_to(tile_box).slices()]
        return bad

    def _pixels(self, index: int, data: bytes, tile_box: Box) -> RGB:
        """Return a tile's pixels; raise ValueError with the reason if it is damaged."""
        if self._level.offsets[index] < _HEADER_BYTES:
            raise ValueError(f"the file states no place of the tile, but {self._level.lengths[index]} bytes")
        expected = int(self._level.lengths[index])
        if len(data) != expected:
            raise ValueError(f"the tile is truncated or cannot be read: {len(data)} of {expected} bytes")
        try:
            pixels = self._level.decode(data, index)
        except MemoryError:
            raise
        except Exception as error:  # each codec raises its own types
            raise ValueError(f"the tile cannot be decoded: {error}") from error
        if pixels.shape[0] < tile_box.height or pixels.shape[1] < tile_box.width:
            raise ValueError(f"the tile cannot be decoded: {pixels.shape[:2]} px instead of {tile_box.shape}")
        return pixels


def _described(level: SourceLevel, tiles: TiffLevel) -> SourceLevel:
    """Return the level with the size of its tiles, and the number of those that the scanner left out."""
    missing = int((tiles.lengths == 0).sum())
    return replace(level, tile_px=(tiles.tile_height_px, tiles.tile_width_px), missing_tiles=missing)


def _complete_levels(levels: Sequence[TiffLevel], size_bytes: int) -> list[TiffLevel]:
    """Return the finest level, and those of the others whose tiles all lie within the file."""
    # Tiles of length 0 are left out, wherever their offset points.
    ends = [int(np.max((level.offsets + level.lengths)[level.lengths > 0], initial=0)) for level in levels]
    return [level for k, level in enumerate(levels) if k == 0 or ends[k] <= size_bytes]


def _pages(
    tiff: tifffile.TiffFile, name: str, pick: Pick, by_openslide: SlideSource | None, stored: Sequence[int] | None
) -> tuple[list[Any], list[Note]]:
    """Return the pages of the picked picture, finest first, and notes."""
    if by_openslide is not None:
        return _pages_known(tiff, by_openslide, stored, pick), []
    picked_pages = pages_of_ome(tiff, name, pick) if tiff.is_ome else None
    return picked_pages or (_pages_of_series(tiff, pick), [])


def _pages_of_series(tiff: tifffile.TiffFile, pick: Pick) -> list[Any]:
    """Return the pages of the series with the most pixels, finest first; labels, macros and thumbnails are smaller."""
    try:
        if not tiff.series:
            raise SlideError("the TIFF has no image")
    except tifffile.TiffFileError:
        if pages := _pages_before_the_damage(tiff):
            return pages
        raise
    largest = max(tiff.series, key=lambda s: int(np.prod(s.shape, dtype=np.int64)))
    # A list of pages for each level: one page, or several focal planes of the same size.
    finest, *coarser = [[keyframe(page) for page in level.pages if page is not None] for level in largest.levels]
    size = _size(finest[0])
    if tiff.is_imagej and len(finest) == 1 and (count := _images_of_imagej(finest[0])) > 1:
        raise PlanesError(f"it is an ImageJ stack of {count} pictures of {size[0]} × {size[1]} px in one; export one")
    planes = finest if len(finest) > 1 else _of_one_size(tiff, finest[0])  # each may be a series of its own
    if len(planes) == 1 and all(len(level) == 1 for level in coarser):
        check_plane(pick, 1)
        return [finest[0], *(level[0] for level in coarser)]
    picked = picked_plane(planes, pick, size)
    with_all_planes = (level for level in coarser if len(level) == len(planes))
    return [picked, *(level[pick.plane - 1] for level in with_all_planes)]


def _images_of_imagej(page: Any) -> int:
    """Return the number of pictures that ImageJ's text states for a page, behind one directory."""
    match = re.search(r"^images=(\d+)$", page.description, re.MULTILINE)
    return 1 if match is None else int(match[1])


def _of_one_size(tiff: tifffile.TiffFile, page: Any) -> list[Any]:
    """Return all pages of the size of this one that are not marked as reduced, in the order of the file."""
    return [
        page_of_size
        for page_of_size in map(keyframe, tiff.pages)
        if _size(page_of_size) == _size(page) and not page_of_size.is_reduced
    ]


def _pages_before_the_damage(tiff: tifffile.TiffFile) -> list[Any]:
    """Return the largest tiled page before the first damaged directory, and the others of the same aspect ratio."""
    undamaged: list[Any] = []
    with suppress(tifffile.TiffFileError):
        for k in range(len(tiff.pages)):
            undamaged.append(keyframe(tiff.pages[k]))
    tiled = sorted((page for page in undamaged if page.is_tiled), key=lambda page: -math.prod(_size(page)))
    height, width = _size(tiled[0]) if tiled else (1, 1)
    return [page for page in tiled if abs(_size(page)[0] * width / (_size(page)[1] * height) - 1) < _ASPECT_TOLERANCE]


def _pages_known(
    tiff: tifffile.TiffFile, by_openslide: SlideSource, stored: Sequence[int] | None, pick: Pick
) -> list[Any]:
    """Return for each stored level of ``by_openslide`` the tiled page of its size; of several planes the picked one.

    Pages have the same indices as ``stored``, so a level that lacks planes is left out with all coarser ones.
    """
    level_pages, pages = [], _tiled_pages(tiff)
    levels = by_openslide.levels if stored is None else [by_openslide.levels[k] for k in stored]
    sizes = [(level.height_px, level.width_px) for level in levels]
    first = next((page for page in pages if _size(page) == sizes[0]), None)
    planes = [] if first is None else _of_one_size(tiff, first)
    if len(planes) > 1:
        picked = picked_plane(planes, pick, sizes[0])
        # OpenSlide's levels of an Aperio slide are all its tiled pages, one for each plane.
        coarser = [[page for page in pages if _size(page) == size] for size in dict.fromkeys(sizes) if size != sizes[0]]
        complete = takewhile(lambda pages_of_level: len(pages_of_level) == len(planes), coarser)
        return [picked, *(pages_of_level[pick.plane - 1] for pages_of_level in complete)]
    check_plane(pick, 1)
    is_plain = by_openslide.vendor == "generic-tiff"
    if is_plain:  # as OpenSlide does: the first page and those marked as reduced copies of it
        pages = [page for page in pages if page.index == 0 or page.is_reduced]
    for height, width in sizes:
        same = [page for page in pages if _size(page) == (height, width)]
        if not same or (len(same) > 1 and not is_plain):
            raise SlideError(f"the TIFF has {len(same)} tiled pages of {width} × {height} px")
        level_pages.append(same[0])
    return level_pages


def tiled_sizes(path: Path) -> set[tuple[int, int]]:
    """Return (height, width) of all tiled pages of a TIFF; none for other files."""
    try:
        with tifffile.TiffFile(path) as tiff:
            return {_size(page) for page in _tiled_pages(tiff)}
    except (tifffile.TiffFileError, OSError, IndexError, ValueError, KeyError):
        return set()


def _tiled_pages(tiff: tifffile.TiffFile) -> list[Any]:
    return [page for page in map(keyframe, tiff.pages) if page.is_tiled]


def _size(page: Any) -> tuple[int, int]:
    return int(page.imagelength), int(page.imagewidth)
