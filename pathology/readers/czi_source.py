"""CZI slides (Zeiss). OpenSlide does not decode JPEG XR, the compression that Zeiss scanners use."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np

from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.readers.czi_file import JPEG_XR, ZSTD, ZSTD_1, CziBlock, CziFile, read_czi
from pathology.readers.facts.levels import StatedLevel, believed_levels
from pathology.readers.facts.pictures import SCENES_FLAG, WHOLE, Pick
from pathology.readers.facts.pixel_size import checked_mpp
from pathology.readers.facts.slide_facts import Note, StatedMpp
from pathology.readers.slide_file import SlideFile
from pathology.readers.source_level import RGB, BadTile, SourceLevel, translation
from pathology.readers.threads import decode_threads, run_in_pool

_CACHE_BYTES = 128 * 2**20
_WHITE = 255
_SUBBLOCK = struct.Struct("<16sqqiiq")
_JPEG_XR_MAGIC = b"II\xbc"


class CziSource:
    """A CZI file, read block by block; see `pathology.readers.slide_source.SlideSource`.

    Blocks are large (up to 2056 × 2464 px). Where they overlap, the one with the highest order is on top, as in Zeiss'
    own libCZI. Areas between scenes are white.
    A block that is missing, truncated or of an unexpected size is an error. JPEG XR has no checksum: changed bytes
    inside a block give wrong pixels, which no decoder can detect.
    Memory: 128 MiB of decoded blocks, and one block for each thread.

    Args:
        path: The slide's file.
        pick: The scene and the focal plane to show; by default all scenes, where they are on the slide.

    Raises:
        SlideError: The file is damaged, or its pixel type or compression is not supported.
    """

    def __init__(self, path: Path, pick: Pick = WHOLE) -> None:
        self._path, self._file, self._pick = path, SlideFile(path), pick
        try:
            self._describe(read_czi(self._file, pick))
        except BaseException:
            # Close it here, because the caller gets no object: an archive may have many refused files.
            self._file.close()
            raise

    def _describe(self, czi: CziFile) -> None:
        """Set the attributes of `SlideSource`, and check the levels."""
        self._czi = czi
        stated = () if czi.mpp is None else (StatedMpp(czi.mpp, "the CZI metadata"),)
        checked = checked_mpp(stated, czi.objective_power, czi.size_px)
        self.mpp, self.facts, self.objective_power = checked.um, checked.facts, czi.objective_power
        self.facts = self.facts.noting(*_scenes_note(czi, self._pick))
        self.vendor = "zeiss"
        self.icc: bytes | None = None
        self.levels = tuple(map(self._level, czi.downsamples, czi.blocks))
        self.bounds = Box.of_size(*czi.size_px)
        self.to_file_px = translation((0, 0))
        # Round once: reading in parts must place a block at the same pixels as reading the whole.
        self._areas = [[self._area(block) for block in blocks] for blocks in czi.blocks]
        largest = max(level.tile_px[0] * level.tile_px[1] * 3 for level in self.levels)
        self._cache: OrderedDict[int, RGB] = OrderedDict()  # by position in the file, least recently used first
        self._cached_blocks = max(2, _CACHE_BYTES // largest)
        # Last, because it reads pixels, which needs all other attributes.
        self._check_levels()

    def _check_levels(self) -> None:
        """Leave out levels that show another picture than the finest one, with a note."""
        stated = [StatedLevel((level.height_px, level.width_px), level.tile_px) for level in self.levels]
        believed = believed_levels(stated, self.levels, self.read)
        blocks = tuple(self._czi.blocks[k] for k in believed.kept)
        self._czi = replace(
            self._czi, blocks=blocks, downsamples=tuple(self._czi.downsamples[k] for k in believed.kept)
        )
        self._areas = [self._areas[k] for k in believed.kept]
        self.levels = believed.levels
        self.facts = self.facts.noting(*believed.notes)

    def __reduce__(self) -> tuple[Any, ...]:
        return CziSource, (self._path, self._pick)

    def _level(self, downsample: int, blocks: Sequence[CziBlock]) -> SourceLevel:
        """Return the level with these blocks, whose largest counts as its tile."""
        height, width = self._czi.size_px
        tile = max(b.height_px for b in blocks), max(b.width_px for b in blocks)
        return SourceLevel(max(1, height // downsample), max(1, width // downsample), (float(downsample),) * 2, tile)

    def _area(self, block: CziBlock) -> Box:
        """Return the box of a block on its level, to the nearest pixel."""
        y = round((block.y0 - self._czi.origin[0]) / block.downsample)
        x = round((block.x0 - self._czi.origin[1]) / block.downsample)
        return Box(y, y + block.height_px, x, x + block.width_px)

    def read(self, box: Box, level: int) -> RGB:
        """Return ``(h, w, 3)``; see `pathology.readers.slide_source.SlideSource.read`."""
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        self.read_into(box, level, out)
        return out

    def read_into(self, box: Box, level: int, out: RGB, bad: list[BadTile] | None = None) -> None:
        """Fill ``out``; see `pathology.readers.slide_source.SlideSource.read_into`."""
        out[...] = _WHITE
        extent = Box.of_size(self.levels[level].height_px, self.levels[level].width_px)
        areas = self._areas[level]
        overlapping = [k for k, area in enumerate(areas) if not area.intersect(box).empty]
        at_a_time = decode_threads()
        # One block for each thread at a time, because each decoded block takes up to 15 MB.
        for start in range(0, len(overlapping), at_a_time):
            group = overlapping[start : start + at_a_time]
            decoded = run_in_pool(lambda k: self._decoded(level, k), group)
            for k, pixels in zip(group, decoded, strict=True):  # in order: where blocks overlap, the last is on top
                shared = areas[k].intersect(box)
                if isinstance(pixels, TileError):
                    if bad is None:
                        raise pixels
                    bad.append(BadTile(areas[k].intersect(extent), str(pixels)))
                    out[shared.relative_to(box).slices()] = _WHITE
                else:
                    out[shared.relative_to(box).slices()] = pixels[shared.relative_to(areas[k]).slices()]

    def _decoded(self, level: int, index: int) -> RGB | TileError:
        """Return a block's pixels, or the error if it cannot be decoded.

        No lock is needed: each operation on the cache is atomic. Two threads may decode the same block.
        """
        block = self._czi.blocks[level][index]
        # The key is the block's position in the file, because indices change when levels are left out.
        cached = self._cache.get(block.position)
        if cached is not None:
            with suppress(KeyError):
                self._cache.move_to_end(block.position)
            return cached
        try:
            pixels = _decode(block, self._data(block))
        except SlideError:  # the whole file cannot be read
            raise
        except Exception as error:
            area = self._areas[level][index]
            where = f"rows {area.y0}–{area.y1}, columns {area.x0}–{area.x1} of level {level}"
            return TileError(f"the block of {where} cannot be decoded: {error}")
        self._cache[block.position] = pixels
        while len(self._cache) > self._cached_blocks:
            with suppress(KeyError):
                self._cache.popitem(last=False)
        return pixels

    def _data(self, block: CziBlock) -> bytes:
        """Return a block's encoded pixels."""
        head = self._file.read(block.position, _SUBBLOCK.size)
        if len(head) < _SUBBLOCK.size or not head.startswith(b"ZISRAWSUBBLOCK\0"):
            raise ValueError(f"there is no block at byte {block.position}")
        metadata_bytes, _, size = _SUBBLOCK.unpack(head)[3:]
        # A segment's own head has 32 bytes; then come the block's header, its metadata and its pixels.
        at = block.position + 32 + block.header_bytes + max(0, metadata_bytes)
        data = self._file.read(at, max(0, size))
        if not data or len(data) < size:
            raise ValueError("the file ends before it")
        return data

    def close(self) -> None:
        """Close the file and drop the decoded blocks."""
        self._file.close()
        self._cache.clear()


def _scenes_note(czi: CziFile, pick: Pick) -> list[Note]:
    """Return a note that lists the scenes of a file with several."""
    if len(czi.scenes_px) < 2:
        return []
    sizes = [f"scene {k}: {rows} × {columns} px (rows × columns)" for k, (rows, columns) in enumerate(czi.scenes_px, 1)]
    shown = f"scene {pick.scene} of" if pick.scene else "where they are on the glass, all"
    return [Note(SCENES_FLAG, f"{shown} {len(sizes)} scenes ({'; '.join(sizes)})")]


def _decode(block: CziBlock, data: bytes) -> RGB:
    """Return ``(h, w, 3)`` uint8; raises any exception if the data is damaged."""
    shape = block.height_px, block.width_px, 3
    if block.compression == JPEG_XR and data.startswith(_JPEG_XR_MAGIC):
        pixels: RGB = imagecodecs.jpegxr_decode(data)  # RGB, whichever order the stream is in
        if pixels.dtype != np.uint8 or pixels.shape != shape:
            raise ValueError(f"its image has shape {pixels.shape} {pixels.dtype}; expected {shape}")
        return pixels
    if block.compression in (ZSTD, ZSTD_1):
        data = _without_header(data) if block.compression == ZSTD_1 else data
        data = bytes(imagecodecs.zstd_decode(data))
    if len(data) != shape[0] * shape[1] * 3:
        raise ValueError(f"it has {len(data)} bytes; expected {shape[0] * shape[1] * 3}")
    # The file has blue first.
    return np.frombuffer(data, np.uint8).reshape(shape)[..., ::-1]


def _without_header(data: bytes) -> bytes:
    """Return a ZSTD_1 stream without its header of one or three bytes.

    Raises:
        ValueError: The header is invalid, or states that high and low bytes were packed apart (16-bit pixels only).
    """
    if data[0] not in (1, 3) or (data[0] == 3 and (data[1] != 1 or data[2] & 1)):
        raise ValueError(f"its zstd header {data[:3].hex()} is not supported")
    return data[data[0] :]
