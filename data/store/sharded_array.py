"""Reading of boxes from a zarr 3 array: positional reads, every chunk checked against its checksum.

A shard is one file::

    [chunk][chunk][chunk] … [index: one (offset, length) pair for each chunk of the shard][crc32c of the index]
     └ codec(pixels) + crc32c                                  little-endian uint64

Without shards each chunk is a file. Specification: zarr core 3.0 and its `sharding_indexed` codec; only the layouts of
`data.store.layout` are supported. Missing or altered data is an error, never background: chunks that were left out on
purpose are listed. No file stays open between reads, and the only shared state is a cache of indexes and one thread
pool per process, so a reader may be forked or pickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.arrays import Pixels
from data.errors import StoreError
from data.location import OpenFile, ahead, each, is_far, opened
from data.store.codec import CRC_BYTES, without_checksum
from data.store.layout import ArrayLayout
from data.store.node_cache import INDEX, NodeCache, node_cache
from hyfi_core.plan.box import Box

ABSENT = np.uint64(2**64 - 1)
_LONGEST_READ_BYTES = 2**22
_LONGEST_RUN = 8
"""Most chunks that one task reads and decodes; with few, all threads are equally busy."""

Index = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _ChunkRun:
    """Chunks of one file that are adjacent in a row of the array."""

    file: tuple[int, int]
    slots: tuple[int, ...]


@dataclass(slots=True)
class ShardedArray:
    """A read-only uint8 array ``(y, x)`` or ``(c, y, x)``: a directory with a ``zarr.json``.

    Attributes:
        path: The array's directory.
        layout: Its shape, chunks, shards and codec.
        blank: File name -> slots of chunks that were left out on purpose; they read as background.
        sizes: File name -> bytes that the file must have; another size is an error. Empty: unknown.
        digest: Identifies the array's content in the names of its chunks in the node's cache; empty: not cached there.
    """

    path: Path
    layout: ArrayLayout
    blank: Mapping[str, Collection[int]] = field(default_factory=dict, repr=False)
    sizes: Mapping[str, int] = field(default_factory=dict, repr=False)
    digest: str = ""
    _index: dict[tuple[int, int], Index] = field(default_factory=dict, repr=False)

    @classmethod
    def open(
        cls,
        path: Path,
        blank: Mapping[str, Collection[int]] | None = None,
        sizes: Mapping[str, int] | None = None,
        digest: str = "",
    ) -> ShardedArray:
        """Read the metadata of the array in ``path``.

        Raises:
            StoreError: ``zarr.json`` is missing, unreadable, or describes an unsupported layout.
        """
        meta = read_json(path / "zarr.json")
        try:
            layout = ArrayLayout.from_json(meta)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise StoreError(f"{path / 'zarr.json'}: not an array of a hyfi store ({error})") from error
        return cls(path, layout, blank or {}, sizes or {}, digest)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.layout.shape

    def read_into(self, box: Box, out: Pixels, threads: int = 1) -> None:
        """Fill ``out`` with the pixels of ``box``, which must lie inside the array.

        Memory in addition to ``out``: one chunk and a read of at most a few MB, for each thread; over a network, for
        each of at most 32 simultaneous requests.

        Args:
            box: Rectangle of the array.
            out: The caller's array ``(…, box.height, box.width)`` of any strides.
            threads: Chunks decoded at a time.

        Raises:
            StoreError: A shard or a chunk is missing, cut short or altered; names file and cause.
        """
        runs = list(self._runs(box))
        if is_far(self.path):
            self._read_far(runs, box, out, threads)
        elif threads <= 1 or len(runs) <= 1:
            for run in runs:
                self._read_run(run, box, out)
        else:
            for _ in thread_pool(threads).map(lambda run: self._read_run(run, box, out), runs):
                pass

    def _read_far(self, runs: list[_ChunkRun], box: Box, out: Pixels, threads: int) -> None:
        """Fill ``out`` over a network: first the indexes, then the chunks, many requests at a time."""
        if self._cache() is None and len(runs) > 1:  # otherwise indexes are read with their chunks
            files = [file for file in dict.fromkeys(run.file for run in runs) if file not in self._index]
            each(self._load_index, files, self.path)
        # Decode in the threads that wait for the network; but with ``threads=1`` and no cache, only in this thread.
        if threads > 1 or self._cache() is not None:
            each(lambda run: self._read_run(run, box, out), runs, self.path)
            return
        for run, chunks in zip(runs, ahead(lambda run: list(self._read_chunks(run)), runs, self.path), strict=True):
            self._place(run, chunks, box, out)

    def read(self, box: Box, threads: int = 1) -> Pixels:
        """Return the pixels of ``box`` as a new array; see `read_into`."""
        out: Pixels = np.empty((*self.shape[:-2], *box.shape), np.uint8)
        self.read_into(box, out, threads)
        return out

    def _runs(self, box: Box) -> Iterator[_ChunkRun]:
        """Yield the chunks that ``box`` overlaps, in runs of at most ``_LONGEST_RUN``."""
        layout = self.layout
        # Columns of chunks in a shard, including those beyond the array's border: slots count them all.
        (ch, cw), columns = layout.chunk_px, layout.slots[1]
        for file in layout.files(box):
            inside = layout.file_box(file).intersect(box)
            # Rows and columns of chunks inside this file.
            y0, x0 = file[0] * layout.shard_px[0], file[1] * layout.shard_px[1]
            first, end = (inside.x0 - x0) // cw, -(-(inside.x1 - x0) // cw)
            for row in range((inside.y0 - y0) // ch, -(-(inside.y1 - y0) // ch)):
                for start in range(first, end, _LONGEST_RUN):
                    stop = min(end, start + _LONGEST_RUN)
                    yield _ChunkRun(file, tuple(range(row * columns + start, row * columns + stop)))

    def _read_run(self, run: _ChunkRun, box: Box, out: Pixels) -> None:
        """Read a run of chunks, from the node's cache if there is one, and copy their part of ``box`` into ``out``."""
        cache = self._cache()
        if cache is None:
            self._place(run, self._read_chunks(run), box, out)
            return
        file = f"{self.digest}/{self.layout.file_name(run.file)}"
        names = {slot: f"{file}#{slot}" for slot in run.slots}
        # One lock for the whole row of chunks, because runs of other boxes may overlap this one.
        lock_name = f"{file}@{run.slots[0] // self.layout.slots[1]}"
        for slot, pixels in cache.read(
            lock_name, names, self.layout.chunk_shape, lambda slots: self._decoded(run, slots)
        ):
            self._place_chunk(run, slot, pixels, box, out)

    def _cache(self) -> NodeCache | None:
        """Return the node's cache of decoded chunks, if this array's are shared."""
        return node_cache() if self.digest else None

    def _decoded(self, run: _ChunkRun, slots: list[int]) -> Iterator[tuple[int, Pixels | None]]:
        """Yield the pixels of chunks, each valid until the next; None for a chunk that was left out on purpose."""
        for slot, data in self._read_chunks(_ChunkRun(run.file, tuple(slots))):
            yield slot, None if data is None else self._decode(data, self.file_path(run.file), slot)

    def _place(self, run: _ChunkRun, chunks: Iterable[tuple[int, Pixels | None]], box: Box, out: Pixels) -> None:
        """Decode chunks, ``(slot, encoded bytes)``, and copy their part of ``box`` into ``out``."""
        for slot, data in chunks:
            pixels = None if data is None else self._decode(data, self.file_path(run.file), slot)
            self._place_chunk(run, slot, pixels, box, out)

    def _place_chunk(self, run: _ChunkRun, slot: int, pixels: Pixels | None, box: Box, out: Pixels) -> None:
        """Copy a chunk's part of ``box`` into ``out``; without pixels (None), background."""
        chunk_box = self.layout.chunk_box(run.file, slot)
        common = chunk_box.intersect(box)
        target = out[(..., *common.relative_to(box).slices())]
        target[...] = self.layout.fill if pixels is None else pixels[(..., *common.relative_to(chunk_box).slices())]

    def file_path(self, file: tuple[int, int]) -> Path:
        """Return the path of the file at this (row, column)."""
        return self.path / self.layout.file_name(file)

    def _read_chunks(self, run: _ChunkRun) -> Iterator[tuple[int, Pixels | None]]:
        """Yield (slot, encoded bytes) of each chunk; None for a chunk that was left out on purpose."""
        path = self.file_path(run.file)
        blank = self.blank.get(self.layout.file_name(run.file), ())
        # Without shards, a blank chunk has no file.
        if not self.layout.sharded and 0 in blank:
            yield 0, None
            return
        try:
            with opened(path) as file:
                index = self._index_of(file, path, run.file)
                stored = [slot for slot in run.slots if not self._is_blank(index, slot, blank, path)]
                yield from ((slot, None) for slot in run.slots if slot not in stored)
                for group in _adjacent(index, stored):
                    yield from _slices(_read(file, path, index, group), index, group)
        except OSError as error:
            raise _unreadable(path, error) from error

    def _is_blank(self, index: Index, slot: int, blank: Collection[int], path: Path) -> bool:
        """Whether a chunk was left out on purpose; raise if it is missing without being listed in ``blank``."""
        if index[slot, 0] != ABSENT and index[slot, 1] != ABSENT:
            return False
        if slot not in blank:
            raise StoreError(f"{path}: chunk {slot} is missing in its shard; ingest the slide again")
        return True

    def _decode(self, data: Pixels, path: Path, slot: int) -> Pixels:
        """Return the pixels of a chunk from its bytes.

        Raises:
            StoreError: They are damaged.
        """
        shape = self.layout.chunk_shape
        try:
            body = without_checksum(data)
        except ValueError as error:
            raise StoreError(f"{path}: {error} in chunk {slot}, the file is damaged; ingest the slide again") from error
        try:
            return self.layout.codec.decode(body, shape)
        except (ValueError, RuntimeError) as error:
            raise StoreError(f"{path}: chunk {slot} cannot be decoded ({error}); ingest the slide again") from error

    def _load_index(self, file: tuple[int, int]) -> None:
        """Read the index of a file ahead of its chunks."""
        path, name = self.file_path(file), self.layout.file_name(file)
        # Without shards, a blank chunk has no file: slot 0 is the only one.
        if not self.layout.sharded and 0 in self.blank.get(name, ()):
            return
        try:
            with opened(path) as open_file:
                self._index_of(open_file, path, file)
        except OSError as error:
            raise _unreadable(path, error) from error

    def _index_of(self, open_file: OpenFile, path: Path, file: tuple[int, int]) -> Index:
        """Return the index of the file at this (row, column); cached."""
        index = self._index.get(file)
        if index is None:
            # Two threads may read it at the same time, with equal results.
            index = self._index[file] = self._read_index(open_file, path, self.layout.file_name(file))
        return index

    def _read_index(self, open_file: OpenFile, path: Path, name: str) -> Index:
        """Return the index of a file, from the node's cache if it is there."""
        cache, expected = self._cache(), self.sizes.get(name)
        if cache is None or not self.layout.sharded:
            return read_index(open_file, path, self.layout, expected)

        def load(slots: list[int]) -> list[tuple[int, Pixels | None]]:
            # As bytes, because the cache has arrays of uint8.
            return [(0, read_index(open_file, path, self.layout, expected).astype("<u8").reshape(-1).view(np.uint8))]

        # For the cache, the index is one more chunk of the file.
        key, size = f"{self.digest}/{name}{INDEX}", self.layout.index_bytes - CRC_BYTES
        ((_, stored),) = cache.read(key, {0: key}, (size,), load)
        assert stored is not None, "every index has bytes"
        # A copy: this object keeps the index, but an array of the cache is valid only until the cache returns the next.
        return np.frombuffer(stored.tobytes(), "<u8").reshape(-1, 2)


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: the shard cannot be read ({error.strerror}); make it readable again, or ingest the slide again"
    )


def read_index(file: OpenFile, path: Path, layout: ArrayLayout, expected_size: int | None = None) -> Index:
    """Return (offset, length) of each slot of an open file as ``(slots, 2)``; both ``ABSENT`` for a missing chunk.

    Raises:
        StoreError: The file does not have its expected size, is too short, or its index is altered.
    """
    # Without shards, a file is one chunk and has no index: read one byte, to learn the file's size.
    length = layout.index_bytes if layout.sharded else 1
    tail, size = file.tail(length)
    if expected_size is not None and size != expected_size:
        raise StoreError(f"{path}: the shard has {size} bytes, expected {expected_size}; ingest the slide again")
    if not layout.sharded:
        return np.array([[0, size]], np.uint64)
    if size < length:
        raise StoreError(f"{path}: too small for a shard ({size} bytes); ingest the slide again")
    try:
        body = without_checksum(tail)
    except ValueError as error:
        raise StoreError(f"{path}: {error} in its index, the file is damaged; ingest the slide again") from error
    return np.frombuffer(body, "<u8").reshape(-1, 2)


def _adjacent(index: Index, slots: list[int]) -> Iterator[list[int]]:
    """Group slots whose chunks are consecutive in the file, up to ``_LONGEST_READ_BYTES``: one read for each group."""
    group: list[int] = []
    length = 0
    for slot in slots:
        offset, size = (int(n) for n in index[slot])
        # Compare the offsets, because zarr allows the chunks of a shard in any order.
        follows = group and offset == int(index[group[-1]].sum()) and length + size <= _LONGEST_READ_BYTES
        if group and not follows:
            yield group
            group, length = [], 0
        group.append(slot)
        length += size
    if group:
        yield group


def _read(file: OpenFile, path: Path, index: Index, group: list[int]) -> bytes | memoryview:
    """Read the bytes of a group of consecutive chunks."""
    start, end = int(index[group[0], 0]), int(index[group[-1]].sum())
    data = file.read(start, end - start)
    if len(data) != end - start:
        raise StoreError(f"{path}: the shard is cut short; ingest the slide again")
    return data


def _slices(data: bytes | memoryview, index: Index, group: list[int]) -> Iterator[tuple[int, Pixels]]:
    """Yield (slot, bytes) of each chunk in the bytes of a group."""
    start, stored = int(index[group[0], 0]), np.frombuffer(data, np.uint8)
    for slot in group:
        offset, size = (int(n) for n in index[slot])
        yield slot, stored[offset - start : offset - start + size]


_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def thread_pool(threads: int) -> ThreadPoolExecutor:
    """Return this process's thread pool; threads do not survive a fork, so a forked child makes its own."""
    key = (os.getpid(), threads)
    pool = _pools.get(key)
    if pool is None:
        # `setdefault`: two threads that create it at the same time get the same pool.
        pool = _pools.setdefault(key, ThreadPoolExecutor(threads, thread_name_prefix="store-read"))
    return pool


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``.

    Raises:
        StoreError: The file is missing, unreadable, or not a JSON object.
    """
    try:
        value = json.loads(path.read_bytes().decode("utf-8", "surrogateescape"))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise StoreError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise StoreError(f"{path}: not a JSON object")
    return value
