"""Boxes out of a sharded zarr 3 array, by positional reads, with every chunk under its checksum.

A shard is one file::

    [chunk][chunk][chunk] … [index: one (offset, length) pair for each chunk of the shard][crc32c of the index]
     └ zstd(pixels) + crc32c                                   little-endian uint64

Specification: zarr core 3.0 and its `sharding_indexed` codec. Only the codecs that this project
writes are read; whatever is missing or altered is an error, never background. No file stays open
between reads and nothing is shared but a cache of indexes, so a reader may be forked or pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
from imagecodecs import zstd_decode

from data.errors import StoreError
from hyfi_core.plan.box import Box

_ABSENT = np.uint64(2**64 - 1)
_CRC_BYTES = 4

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Piece:
    """One chunk of a read: where it lies in its shard and which box of the array it holds."""

    shard: tuple[int, int]
    slot: int
    box: Box


@dataclass(slots=True)
class ShardedArray:
    """A read-only uint8 array ``(y, x)`` or ``(c, y, x)`` of one directory with a ``zarr.json``.

    Attributes:
        path: The array's directory.
        shape: Its shape in pixels; all but the last two axes lie whole in every chunk.
        chunk_px: Height and width of a chunk.
        shard_px: Height and width of a shard, multiples of those of a chunk.
    """

    path: Path
    shape: tuple[int, ...]
    chunk_px: tuple[int, int]
    shard_px: tuple[int, int]
    _index: dict[tuple[int, int], npt.NDArray[np.uint64]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path) -> ShardedArray:
        """Read the metadata of the array in ``path``.

        Raises:
            StoreError: There is no readable ``zarr.json`` or it says something that is not read here.
        """
        meta = read_json(path / "zarr.json")
        try:
            shape, chunk, shard = _parse_metadata(meta)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise StoreError(f"{path / 'zarr.json'}: not an array of this project's stores ({error})") from error
        return cls(path, shape, chunk, shard)

    def read_into(self, box: Box, out: Pixels, threads: int = 1) -> None:
        """Fill ``out`` with the pixels of ``box``, which must lie inside the array.

        Args:
            box: Rectangle of the array.
            out: Array ``(…, box.height, box.width)`` of the caller; any strides.
            threads: Chunks decoded at a time.

        Raises:
            StoreError: A shard or a chunk is missing, cut short or altered; names file and cause.
        """
        pieces = list(self._pieces(box))
        if threads <= 1 or len(pieces) <= 2:
            for piece in pieces:
                self._read_piece(piece, box, out)
            return
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda piece: self._read_piece(piece, box, out), pieces):
                pass

    def _pieces(self, box: Box) -> Iterator[_Piece]:
        (ch, cw), (sh, sw) = self.chunk_px, self.shard_px
        rows, columns = sh // ch, sw // cw
        for y in range(box.y0 // ch, -(-box.y1 // ch)):
            for x in range(box.x0 // cw, -(-box.x1 // cw)):
                slot = (y % rows) * columns + x % columns
                yield _Piece((y // rows, x // columns), slot, Box(y * ch, (y + 1) * ch, x * cw, (x + 1) * cw))

    def _read_piece(self, piece: _Piece, box: Box, out: Pixels) -> None:
        chunk = self._read_chunk(piece)
        common = piece.box.intersect(box)
        here, there = common.relative_to(piece.box).slices(), common.relative_to(box).slices()
        out[(..., *there)] = chunk[(..., *here)]

    def shard_path(self, shard: tuple[int, int]) -> Path:
        """Return the file of the shard in this (row, column) of shards."""
        leading = ["0"] * (len(self.shape) - 2)
        return self.path.joinpath("c", *leading, str(shard[0]), str(shard[1]))

    def _read_chunk(self, piece: _Piece) -> Pixels:
        path = self.shard_path(piece.shard)
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise StoreError(f"{path}: the shard cannot be read ({error.strerror})") from error
        try:
            offset, length = self._index_of(handle, path, piece.shard)[piece.slot]
            if offset == _ABSENT or length == _ABSENT:
                raise StoreError(f"{path}: chunk {piece.slot} is not in its shard; ingest the slide again")
            data = os.pread(handle, int(length), int(offset))
        except OSError as error:
            raise StoreError(f"{path}: the shard cannot be read ({error.strerror})") from error
        finally:
            os.close(handle)
        if len(data) != length:
            raise StoreError(f"{path}: the shard is cut short; ingest the slide again")
        return self._decode(data, path, piece.slot)

    def _decode(self, data: bytes, path: Path, slot: int) -> Pixels:
        body = _checked(data, path, f"chunk {slot}")
        shape = (*self.shape[:-2], *self.chunk_px)
        try:
            pixels = np.frombuffer(zstd_decode(body), np.uint8)
            return pixels.reshape(shape)
        except (ValueError, RuntimeError) as error:
            raise StoreError(f"{path}: chunk {slot} does not decode ({error}); ingest the slide again") from error

    def _index_of(self, handle: int, path: Path, shard: tuple[int, int]) -> npt.NDArray[np.uint64]:
        index = self._index.get(shard)
        if index is None:
            slots = (self.shard_px[0] // self.chunk_px[0]) * (self.shard_px[1] // self.chunk_px[1])
            length = slots * 16 + _CRC_BYTES
            size = os.fstat(handle).st_size
            if size < length:
                raise StoreError(f"{path}: {size} bytes are too few for a shard; ingest the slide again")
            body = _checked(os.pread(handle, length, size - length), path, "its index")
            index = np.frombuffer(body, "<u8").reshape(slots, 2)
            self._index[shard] = index
        return index


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``.

    Raises:
        StoreError: The file is missing, unreadable or holds no JSON object.
    """
    try:
        value = json.loads(path.read_bytes().decode("utf-8", "surrogateescape"))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise StoreError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path}: holds no JSON object")
    return value


def _checked(data: bytes, path: Path, what: str) -> bytes:
    """Return ``data`` without the crc32c at its end, after comparing it."""
    body, stored = data[:-_CRC_BYTES], int.from_bytes(data[-_CRC_BYTES:], "little")
    if google_crc32c.value(body) != stored:
        raise StoreError(f"{path}: the checksum of {what} is wrong, the file is damaged; ingest the slide again")
    return body


def _parse_metadata(meta: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, int], tuple[int, int]]:
    shape = tuple(int(n) for n in meta["shape"])
    shard = tuple(int(n) for n in meta["chunk_grid"]["configuration"]["chunk_shape"])
    (codec,) = meta["codecs"]
    inner = codec["configuration"]
    chunk = tuple(int(n) for n in inner["chunk_shape"])
    names = [c["name"] for c in inner["codecs"]]
    if meta["zarr_format"] != 3 or meta["data_type"] != "uint8" or codec["name"] != "sharding_indexed":
        raise ValueError("expected a sharded uint8 array of zarr format 3")
    if names != ["bytes", "zstd", "crc32c"] or inner.get("index_location", "end") != "end":
        raise ValueError(f"expected the inner codecs bytes, zstd, crc32c; found {', '.join(names)}")
    if chunk[:-2] != shape[:-2] or shard[:-2] != shape[:-2]:
        raise ValueError("expected all channels in one chunk")
    if any(s % c for s, c in zip(shard[-2:], chunk[-2:], strict=True)):
        raise ValueError("expected shards that are whole multiples of chunks")
    return shape, (chunk[-2], chunk[-1]), (shard[-2], shard[-1])
