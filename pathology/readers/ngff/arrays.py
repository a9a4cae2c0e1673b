"""The pixels of one level: an array of any zarr store, or of a slide that `hyfi ingest` wrote.

Chunks that are not stored have the array's fill value; a store does not state whether they were empty or got lost.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from data.errors import StoreError
from data.location import files_below, is_remote
from data.object_client import as_file_errors, client_of
from data.object_path import ObjectPath
from data.store.layout import ArrayLayout
from data.store.slide_store import SlideStore
from hyfi_core.plan.box import Box
from pathology.errors import SlideError, TileError
from pathology.readers.facts.sample_kinds import array_conversion
from pathology.readers.ngff.image import NgffImage
from pathology.readers.source_level import RGB

_LARGEST_CHUNK_PX = 2**26


class LevelArray(Protocol):
    """The pixels of a level.

    Attributes:
        size_px: (height, width).
        tile_px: (height, width) of the blocks that are decoded one by one.
        fill: The value of chunks that are not stored.
    """

    size_px: tuple[int, int]
    tile_px: tuple[int, int]
    fill: int

    def read(self, box: Box, out: RGB) -> None:
        """Write the pixels of a box inside the level.

        Raises:
            TileError: A chunk cannot be read or decoded.
        """

    def absent(self) -> list[Box]:
        """Return the boxes of the files (chunks, or shards of them) that are not stored; none if that is unknown."""


class OwnLevel:
    """A level of a slide that `hyfi ingest` wrote, whose chunks have checksums; see `LevelArray`."""

    def __init__(self, slide: SlideStore, index: int) -> None:
        self._slide, self._index = slide, index
        level = slide.levels[index]
        layout: ArrayLayout = slide.images[level.path].layout
        self.size_px, self.tile_px, self.fill = (level.height_px, level.width_px), layout.chunk_px, layout.fill

    def read(self, box: Box, out: RGB) -> None:
        """See `LevelArray`."""
        try:
            self._slide.read(box, self._index, out=out.transpose(2, 0, 1))
        except StoreError as error:
            raise TileError(str(error)) from error

    def absent(self) -> list[Box]:
        """Return none: chunks that were left out on purpose are listed, and any other missing chunk is an error."""
        return []


class ZarrLevel:
    """A level of any zarr store; see `LevelArray`.

    Memory while reading: the chunks of the box, decoded.

    Args:
        image: The image.
        path: The level's place below its group.

    Raises:
        SlideError: There is no such array, or its pixels are not 8-bit.
    """

    def __init__(self, image: NgffImage, path: str) -> None:
        self._axes, self._path = image.axes, image.group.path / path
        self.array = _opened(image, path)
        # Index of the focal plane, and of the channels that are red, green and blue; the source sets both.
        self.plane = 0
        self.order: Sequence[int] = (0,)
        _check_axes(image, path, self.array.ndim)
        if self.array.dtype != np.uint8:
            array_path = f"{image.group.path.name}/{path}" if image.group.path.name.isdecimal() else path
            kind = _KINDS.get(self.array.dtype.kind, str(self.array.dtype))
            raise SlideError(
                f"its pixels are {kind} of {self.array.dtype.itemsize * 8} bits; slides have unsigned 8-bit samples. "
                f"{array_conversion(self.array.dtype, self._names, array_path)}"
            )
        self.size_px = self._along("y", self.array.shape), self._along("x", self.array.shape)
        self.tile_px = self._along("y", self.array.chunks), self._along("x", self.array.chunks)
        if math.prod(self.tile_px) > _LARGEST_CHUNK_PX:
            raise SlideError(
                f"its level {path} has chunks of {self.tile_px[0]} × {self.tile_px[1]} px; write it with smaller ones"
            )
        self.fill = int(self.array.fill_value or 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.array.shape)

    @staticmethod
    def finest_shape(image: NgffImage) -> tuple[int, ...]:
        """Return the shape of an image's finest level, whatever its pixels are.

        Raises:
            SlideError: It cannot be opened, or has other axes than stated.
        """
        shape = tuple(_opened(image, image.levels[0].path).shape)
        _check_axes(image, image.levels[0].path, len(shape))
        return shape

    @property
    def _names(self) -> list[str]:
        return [axis.name for axis in self._axes]

    def _along(self, name: str, values: Sequence[int]) -> int:
        """Return the value of an axis, of values that are in the order of the axes."""
        return int(values[self._names.index(name)])

    def read(self, box: Box, out: RGB) -> None:
        """See `LevelArray`."""
        by_axis = {"z": self.plane, "t": 0, "c": slice(None), "y": box.slices()[0], "x": box.slices()[1]}
        index = tuple(by_axis[name] for name in self._names)
        try:
            with as_file_errors(str(self._path)) if isinstance(self._path, ObjectPath) else nullcontext():
                values = np.asarray(self.array[index])
        except Exception as error:  # each codec raises its own types
            if is_remote(self._path) and isinstance(error, OSError):
                raise SlideError(f"{self._path} cannot be read: {error.strerror or error}") from error
            where = f"rows {box.y0}–{box.y1}, columns {box.x0}–{box.x1} of {self._path.name}"
            raise TileError(f"a chunk of {where} cannot be decoded: {error}") from error
        order = [name for name in self._names if name in "cyx"]
        # A grey array may have no axis of channels.
        if "c" not in order:
            values, order = values[..., None], [*order, "c"]
        pixels = values.transpose([order.index(name) for name in "yxc"])
        # For grey, `self.order` has one index, which is used for all three colours.
        for k in range(3):
            out[..., k] = pixels[..., self.order[k % len(self.order)]]

    def absent(self) -> list[Box]:
        """See `LevelArray`."""
        return [self._file_box(row, column) for row, column in sorted(self._absent)]

    @cached_property
    def _absent(self) -> set[tuple[int, int]]:
        """(row, column) of files that are not stored for at least one channel."""
        if isinstance(self._path, ObjectPath) and not self._path.can_list:
            return set()
        stored, metadata = set(files_below(self._path)), self.array.metadata
        # Number of files along each axis.
        counts = [-(-size // step) for size, step in zip(self.array.shape, self._file_shape, strict=True)]
        # Only files that are shown: one time, one focal plane, all channels.
        fixed = {"t": 0, "z": self.plane // self._along("z", self._file_shape) if "z" in self._names else 0}
        absent = set()
        for place in np.ndindex(*(1 if name in fixed else n for name, n in zip(self._names, counts, strict=True))):
            at = tuple(fixed.get(name, k) for name, k in zip(self._names, place, strict=True))
            # `encode_chunk_key`, because separators and prefixes of names differ between versions of zarr.
            if metadata.encode_chunk_key(at) not in stored:
                absent.add((self._along("y", at), self._along("x", at)))
        return absent

    @property
    def _file_shape(self) -> tuple[int, ...]:
        """Shape of what one file holds: a shard, or a chunk of an array without shards."""
        return tuple(self.array.shards or self.array.chunks)

    def _file_box(self, row: int, column: int) -> Box:
        height, width = self._along("y", self._file_shape), self._along("x", self._file_shape)
        y, x = row * height, column * width
        return Box(y, y + height, x, x + width).intersect(Box.of_size(*self.size_px))


_KINDS = {"i": "signed", "u": "unsigned", "f": "float", "b": "logical values"}


def _check_axes(image: NgffImage, path: str, dimensions: int) -> None:
    if dimensions != len(image.axes):
        names = ", ".join(axis.name for axis in image.axes)
        raise SlideError(f"its level {path} has {dimensions} dimensions, but its axes are {names}")


def _opened(image: NgffImage, path: str) -> Any:
    """Return the open zarr array of a level."""
    import zarr

    group, name = image.group, path.strip("/")
    array_path = group.path / name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zarr warns of codecs that are not in its specification yet
            if not isinstance(array_path, ObjectPath):
                return zarr.open_array(array_path, mode="r", zarr_format=group.zarr_format)
            from zarr.storage import ObjectStore

            bucket = array_path.parts[1]
            client = client_of(array_path.scheme, bucket)
            with as_file_errors(str(array_path)):
                store = ObjectStore(client, read_only=True)
                return zarr.open_array(store, path=array_path.key, mode="r", zarr_format=group.zarr_format)
    except FileNotFoundError as error:
        raise SlideError(f"its level {name} is missing, which its metadata (`multiscales`) list") from error
    except Exception as error:  # zarr raises many types for damaged metadata and unknown codecs
        raise SlideError(f"its level {name} cannot be opened: {error}") from error
