"""A slide that is an OME-Zarr store, written by another program or by `hyfi ingest`; on a disk or object storage."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import StoreError
from data.store.slide_store import SlideStore
from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.readers.facts.levels import LEVELS_FLAG, StatedLevel, believed_levels, fitted_levels
from pathology.readers.facts.pictures import WHOLE, Pick, picked_directory, picked_scene, scenes_among
from pathology.readers.facts.pixel_size import CheckedMpp, checked_mpp
from pathology.readers.facts.slide_facts import Note, SlideFacts, StatedMpp
from pathology.readers.facts.stated_mpp import power_of_ome
from pathology.readers.ngff.arrays import LevelArray, OwnLevel, ZarrLevel
from pathology.readers.ngff.groups import is_own_slide
from pathology.readers.ngff.image import NgffImage, images_of
from pathology.readers.ngff.stated import SCALE, colour_order, picture_of, refuse_dark_ground, stated_mpp
from pathology.readers.source_level import RGB, BadTile, split_on_grid, translation
from pathology.readers.threads import run_in_pool

ABSENT_FLAG = "chunks_absent"
_BLOCK_PX = 1024
_WHITE = 255
_OVERVIEW_PX = 1024
_SHOWN = 40.0
"""Chunks count as lost if the mean of another level's pixels there differs from the fill value by more than this."""
_AGREE = 0.05


class OmeZarrSource:
    """An OME-Zarr store; see `pathology.readers.slide_source.SlideSource`.

    Memory: the result, and for each thread a block of 1024 × 1024 px, or a chunk if that is larger, with its chunks.

    Args:
        path: The store, or one image of it, as a folder or on object storage.
        pick: The image and the focal plane to read.

    Raises:
        SlideError: The store has no image of a slide, or is damaged; the message says what it is.
    """

    def __init__(self, path: Path, pick: Pick = WHOLE) -> None:
        self._path, self._pick = path, pick
        self.vendor = "ome-zarr"
        self.icc: bytes | None = None
        self.objective_power: float | None = None
        self.facts = SlideFacts()
        self.mpp: tuple[float, float] | None = None
        arrays = self._open_own(path) if is_own_slide(path) else self._open_of_others(path, pick)
        stated = [StatedLevel(array.size_px, array.tile_px) for array in arrays]
        # Boxes of each level whose chunks are not stored.
        absent_of_stated = [self._absent(array) for array in arrays]
        # `_read_present` uses the fields `_arrays` and `_lost`. They are set twice: `believed_levels` reads all stated
        # levels, what follows only the levels that it keeps.
        self._arrays, self._lost = arrays, absent_of_stated
        believed = believed_levels(stated, fitted_levels(stated), self._read_present)
        self.facts = self.facts.noting(*believed.notes)
        absent = [absent_of_stated[k] for k in believed.kept]
        self._arrays, self._lost = [arrays[k] for k in believed.kept], absent
        self.levels = tuple(
            replace(level, tile_px=array.tile_px, missing_tiles=len(boxes))
            for level, array, boxes in zip(believed.levels, self._arrays, absent, strict=True)
        )
        # An encoder may leave out empty chunks: from now on, only those count as lost in which a coarser level shows
        # something.
        self._lost = [self._shown_elsewhere(k, boxes) for k, boxes in enumerate(absent)]
        self.facts = self.facts.noting(
            *(note for k, boxes in enumerate(absent) for note in self._absence_notes(k, boxes))
        )
        self.bounds = Box.of_size(*self._arrays[0].size_px)
        self.to_file_px = translation((0, 0))

    def _open_own(self, path: Path) -> list[LevelArray]:
        """Open a slide of a store of this project; return its levels."""
        try:
            slide = SlideStore.open(path)
        except StoreError as error:
            raise SlideError(str(error)) from error
        self.vendor = "hyfi"
        source = slide.attributes.get("source", {})
        # With `--icc apply`, the ingest has converted the pixels to sRGB.
        if slide.attributes.get("icc") != "apply" and source.get("icc_profile"):
            self.icc = base64.b64decode(source["icc_profile"])
        stated = (StatedMpp(slide.levels[0].mpp, "the store"),)
        self._believe(checked_mpp(stated, power=None, size_px=_size(slide)))
        return [OwnLevel(slide, k) for k in range(len(slide.levels))]

    def _open_of_others(self, path: Path, pick: Pick) -> list[LevelArray]:
        """Open an image of another program; return its levels, and set facts, mpp and magnification."""
        images, xml = images_of(path)
        finest = [ZarrLevel.finest_shape(image) for image in images]
        pictures = [picture_of(image, shape) for image, shape in zip(images, finest, strict=True)]
        scenes = scenes_among(pictures)
        picture, notes = picked_scene(scenes, pick)
        image = images[next(k for k, picture_of_image in enumerate(pictures) if picture_of_image is picture)]
        plane = picked_directory(picture, pick)
        # Indices of the channels that are red, green and blue, and a note if these are not the first, second and third.
        order, recoloured = colour_order(image) if picture.channels == 3 else ((0,), None)
        arrays = _levels_of(image, plane, order)
        self.objective_power = power_of_ome(xml)
        self._believe(_checked(image, arrays, self.objective_power))
        more = [f"it has {image.more} more multiscale images in one group, which are not read"] * (image.more > 0)
        self.facts = self.facts.noting(*notes, *(Note(LEVELS_FLAG, text) for text in more))
        self.facts = self.facts.noting(*([recoloured] if recoloured else []))
        refuse_dark_ground(_median_of(arrays[-1]), picture)
        return list(arrays)

    def _believe(self, checked: CheckedMpp) -> None:
        self.mpp, self.facts = checked.um, checked.facts

    def _absent(self, array: LevelArray) -> list[Box]:
        try:
            return array.absent()
        except OSError as error:
            raise SlideError(f"its folders cannot be read: {error.strerror or error}") from error

    def _read_present(self, box: Box, level: int) -> RGB:
        """Return pixels of a stated level; raise TileError if a chunk of them is not stored, which shows nothing."""
        if any(not box.intersect(absent).empty for absent in self._lost[level]):
            raise TileError("a chunk is not stored")
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        self._arrays[level].read(box, out)
        return out

    def _shown_elsewhere(self, level: int, absent: Sequence[Box]) -> list[Box]:
        """Return the boxes of ``absent`` (not stored) where the coarsest level differs from the fill value."""
        last = len(self._arrays) - 1
        if level == last or not absent:
            return []
        array, coarsest = self._arrays[level], self.levels[last]
        ratio = [c / f for c, f in zip(coarsest.downsample, self.levels[level].downsample, strict=True)]
        extent, lost = Box.of_size(coarsest.height_px, coarsest.width_px), []
        for box in absent:
            rows, columns = int(box.y0 / ratio[0]), int(box.x0 / ratio[1])
            ends = max(rows + 1, int(box.y1 / ratio[0])), max(columns + 1, int(box.x1 / ratio[1]))
            with suppress(TileError):
                shown = self._read_present(Box(rows, ends[0], columns, ends[1]).intersect(extent), last)
                if shown.size and abs(float(shown.mean()) - array.fill) > _SHOWN:
                    lost.append(box)
        return lost

    def _absence_notes(self, level: int, absent: Sequence[Box]) -> list[Note]:
        """Return a note that a level lacks the files of the boxes ``absent``; empty if it lacks none."""
        if not absent:
            return []
        lost = len(self._lost[level])
        fill = self._arrays[level].fill
        text = f"level {level} lacks {len(absent)} of its files of chunks, whose pixels are then {fill}"
        if lost:
            text += f"; where {lost} of them are, a coarser level shows something: the store is not complete"
        return [Note(ABSENT_FLAG, text)]

    def __reduce__(self) -> tuple[Any, ...]:
        return OmeZarrSource, (self._path, self._pick)

    def read(self, box: Box, level: int) -> RGB:
        """Return ``(h, w, 3)``; see `pathology.readers.slide_source.SlideSource.read`."""
        out: RGB = np.empty((*box.shape, 3), np.uint8)
        self.read_into(box, level, out)
        return out

    def read_into(self, box: Box, level: int, out: RGB, bad: list[BadTile] | None = None) -> None:
        """Fill ``out``; see `pathology.readers.slide_source.SlideSource.read_into`."""
        height, width = self.levels[level].tile_px
        # Whole chunks, so that no chunk is decoded by two threads.
        block = max(1, _BLOCK_PX // height) * height, max(1, _BLOCK_PX // width) * width
        read = partial(self._read_block, level, box, out, bad is not None)
        bad_by_block = run_in_pool(read, split_on_grid(box, block))
        if bad is not None:
            bad += [tile for tiles in bad_by_block for tile in tiles]

    def _read_block(self, level: int, box: Box, out: RGB, tolerant: bool, block: Box) -> list[BadTile]:
        """Read a block into ``out``; if that fails, read it chunk by chunk, and return chunks that fail (white in out).

        Args:
            level: Index of the level.
            box: Box of ``out``.
            out: Pixels of ``box``.
            tolerant: Whether chunks may fail; otherwise the first raises an error.
            block: The part of ``box`` to read.
        """
        try:
            self._read_part(level, block, out[block.relative_to(box).slices()])
            return []
        except TileError:
            if not tolerant:
                raise
        bad, size = [], self.levels[level]
        for tile_box in split_on_grid(block, size.tile_px):
            part = out[tile_box.relative_to(box).slices()]
            try:
                self._read_part(level, tile_box, part)
            except TileError as error:
                part[...] = _WHITE
                height, width = size.tile_px
                tile = Box.of_size(height, width).shift(tile_box.y0 // height * height, tile_box.x0 // width * width)
                bad.append(BadTile(tile.intersect(Box.of_size(size.height_px, size.width_px)), str(error)))
        return bad

    def _read_part(self, level: int, box: Box, out: RGB) -> None:
        for lost in self._lost[level]:
            if not lost.intersect(box).empty:
                where = f"rows {lost.y0}–{lost.y1}, columns {lost.x0}–{lost.x1} of level {level}"
                raise TileError(f"the chunks of {where} are not stored, but a coarser level shows them")
        self._arrays[level].read(box, out)

    def close(self) -> None:
        """Do nothing: no file stays open."""


def scenes_of_store(path: Path) -> int:
    """Return the number of scenes of a store; 1 if it cannot be read, which `OmeZarrSource` reports."""
    try:
        if is_own_slide(path):
            return 1
        images, _ = images_of(path)
        return max(1, len(scenes_among([picture_of(image, ZarrLevel.finest_shape(image)) for image in images])))
    except SlideError:
        return 1


def _levels_of(image: NgffImage, plane: int, order: Sequence[int]) -> list[ZarrLevel]:
    """Return the arrays of an image's levels, finest first, after checking that they differ only in y and x.

    Args:
        image: The picture.
        plane: Index of the focal plane to read, from 0.
        order: Indices of the channels that are red, green and blue; one index for grey.

    Raises:
        SlideError: A level cannot be opened, or has other channels, focal planes or times than the finest.
    """
    arrays = [ZarrLevel(image, level.path) for level in image.levels]
    # Only y and x may have other lengths in coarser levels.
    other_axes = [k for k, axis in enumerate(image.axes) if axis.name not in "yx"]
    for array, level in zip(arrays, image.levels, strict=True):
        if any(array.shape[k] != arrays[0].shape[k] for k in other_axes):
            raise SlideError(f"its level {level.path} has the shape {array.shape}, the finest one {arrays[0].shape}")
        array.plane, array.order = plane, order
    finest_first = sorted(range(len(arrays)), key=lambda k: -arrays[k].size_px[0] * arrays[k].size_px[1])
    if finest_first != list(range(len(arrays))):
        raise SlideError(f"its levels are not listed from the finest to the coarsest: {_sizes(arrays)}")
    return arrays


def _sizes(arrays: Sequence[ZarrLevel]) -> str:
    return ", ".join(f"{array.size_px[0]} × {array.size_px[1]}" for array in arrays)


def _checked(image: NgffImage, arrays: Sequence[ZarrLevel], power: float | None) -> CheckedMpp:
    """Return the microns per pixel that are believed, after comparing the scales of all levels and OME-XML."""
    stated, doubt = stated_mpp(image)
    of_scale = next((statement for statement in stated if statement.where == SCALE), None)
    if of_scale is not None:
        stated += _of_coarser_levels(image, arrays, of_scale)
    checked = checked_mpp(stated, power, arrays[0].size_px)
    return replace(checked, facts=replace(checked.facts, mpp_doubt=checked.facts.mpp_doubt or doubt))


def _of_coarser_levels(image: NgffImage, arrays: Sequence[ZarrLevel], finest: StatedMpp) -> tuple[StatedMpp, ...]:
    """Return a statement from the first coarser level whose scale contradicts the finest one's; empty if none does."""
    y, x = image.axis("y"), image.axis("x")
    scale_of_finest = image.levels[0].scale
    if scale_of_finest is None or y is None or x is None:
        return ()
    for k, (array, level) in enumerate(zip(arrays, image.levels, strict=True)):
        scale = level.scale
        if k == 0 or scale is None:
            continue
        factors = [full / size for full, size in zip(arrays[0].size_px, array.size_px, strict=True)]
        # Microns per pixel of the finest level, if this level's scale is right.
        um = tuple(
            finest_um * scale[axis] / scale_of_finest[axis] / factor if scale_of_finest[axis] else 0.0
            for finest_um, axis, factor in zip(finest.um, (y, x), factors, strict=True)
        )
        # Sides of a few pixels are rounded so much that larger differences are allowed.
        tolerances = [max(_AGREE, 2 / size) for size in array.size_px]
        compared = zip(um, finest.um, tolerances, strict=True)
        if any(abs(derived_um - stated_um) > tolerance * stated_um for derived_um, stated_um, tolerance in compared):
            return (StatedMpp((um[0], um[1]), f"the scale of level {k}, by their sizes,"),)
    return ()


def _median_of(array: ZarrLevel) -> float:
    """Return how bright the middle of a level is: the median, over pixels that are not black, of the brightest channel.

    nan if all pixels are black, or they cannot be read.
    """
    height, width = (min(size, _OVERVIEW_PX) for size in array.size_px)
    y, x = (array.size_px[0] - height) // 2, (array.size_px[1] - width) // 2
    pixels: RGB = np.empty((height, width, 3), np.uint8)
    try:
        array.read(Box(y, y + height, x, x + width), pixels)
    except TileError:
        return float("nan")
    brightest = pixels.max(2)
    return float(np.median(brightest[brightest > 0])) if brightest.any() else float("nan")


def _size(slide: SlideStore) -> tuple[int, int]:
    return slide.levels[0].height_px, slide.levels[0].width_px
