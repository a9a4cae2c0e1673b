"""Write one slide into a store: prepared beside, every file listed with size and digest, synced, renamed.

```
write(level, y, x, block)   the caller continues at once: chunks are encoded by threads, files written by others
        └ chunks → encoders ─┐ in slot order
                             └ file: written, digested │ synced, renamed, noted in the journal
                                                       └ from here on another block may be under way
```

A slide whose writer knows its identity is prepared in a folder named after it. After a kill it continues there: files
that the journal knows and that are still whole are not written again. Unfinished slides of another identity go.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from data.cores import usable_cores
from data.files import publish_directory, sha256_of, sync_tree
from data.store import metadata
from data.store.codec import Buffers, Pixels, with_checksum
from data.store.layout import CHUNK_PX, SHARD_PX, ArrayLayout, StoredLevel
from data.store.shard import write_file
from data.store.sharded_array import ShardedArray
from data.store.slide_store import FORMAT, slide_path
from data.store.tissue_grid import Mask, TissueGrid, halve_mask
from data.store.unfinished import Journal, unfinished_folder
from hyfi_core.plan.box import Box

_BLOCKS_IN_FLIGHT = 2
_FILES_IN_FLIGHT = 16
"""Files that are written or wait for the disk, which takes many waiting writers in one turn."""


class SlideWriter:
    """A slide that is being written; a context manager that publishes nothing unless ``publish`` was called.

    To be used by one thread. Memory: two of the caller's blocks under way, and their encoded form.

    Args:
        store: The folder of the store; must exist.
        slide_id: Name of the slide.
        levels: Finest first, from `pyramid_levels` or those of a scanner.
        glass: Tissue mask from the slide's corner and its microns per pixel: chunks without tissue are left out, and
            listed as such. None: all are written.
        identity: JSON that says what decides the slide's pixels (parameters, the source's size and time): a writer
            that was killed is continued by the next of the same identity. None: every writer starts afresh.
        threads: Chunks encoded at a time; 0: as many as this process has cores.

    Raises:
        OSError: The store cannot be written.
    """

    def __init__(
        self,
        store: Path,
        slide_id: str,
        levels: Sequence[StoredLevel],
        *,
        glass: tuple[Mask, float] | None = None,
        identity: Mapping[str, Any] | None = None,
        threads: int = 0,
    ) -> None:
        self.final = slide_path(store, slide_id)
        self.levels = tuple(levels)
        self._resumable = identity is not None
        layouts = [[level.layout.to_json(), level.mpp] for level in self.levels]
        self.path = unfinished_folder(self.final, None if identity is None else [dict(identity), layouts, FORMAT])
        self._glass = [_under(level, glass) for level in self.levels]
        for k, level in enumerate(self.levels):
            self._make_array(str(k), level.layout)
        self._journal = Journal(self.path)
        self._free_blocks = threading.BoundedSemaphore(_BLOCKS_IN_FLIGHT)
        self._threads = threads or usable_cores()
        self._encoders = ThreadPoolExecutor(self._threads, "store-encode")
        self._disk = ThreadPoolExecutor(_FILES_IN_FLIGHT, "store-write")
        self._pending: list[Future[None]] = []
        self._label_mpp: list[tuple[float, float]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in (self._encoders, self._disk):
            pool.shutdown(wait=True, cancel_futures=True)
        self._journal.close()
        # A stopped run (not an Exception) can be continued; a failed one would fail again.
        stopped = kind is not None and not issubclass(kind, Exception)
        if not (self._resumable and stopped):
            shutil.rmtree(self.path, ignore_errors=True)

    def finished(self, level: int, y0: int, x0: int) -> bool:
        """Whether the shard that starts at ``(y0, x0)`` was finished by an earlier run: it is not written again."""
        layout = self.levels[level].layout
        row, column = y0 // layout.shard_px[0], x0 // layout.shard_px[1]
        return self._journal.finished(f"{level}/{layout.file_name((row, column))}")

    def read_back(self, level: int, box: Box) -> Pixels | None:
        """Return the pixels of ``box`` ``(3, h, w)`` as they were written, by an earlier run or this one.

        None if it is not complete, or not stored losslessly.
        """
        layout = self.levels[level].layout
        names = [f"{level}/{layout.file_name(file)}" for file in layout.files(box)]
        if not layout.codec.exact or self._glass[level] is not None or not all(map(self._journal.finished, names)):
            return None
        return ShardedArray(self.path / str(level), layout).read(box, self._threads)

    def write(self, level: int, y0: int, x0: int, block: Pixels) -> None:
        """Take whole files of a level; returns before they are written.

        Args:
            level: 0 is the finest.
            y0: Row where the block starts, a multiple of ``SHARD_PX``.
            x0: Column likewise.
            block: ``(3, h, w)``, ``SHARD_PX`` squared or the rest of the level; must not be changed afterwards.

        Raises:
            OSError: An earlier block could not be written.
        """
        layout = self.levels[level].layout
        self._write_block(str(level), layout, y0, x0, block, self._glass[level])

    def write_encoded(self, level: int, file: tuple[int, int], bodies: Sequence[Buffers | None]) -> None:
        """Take the used chunks of one file of a level as encoded bytes, in parts, without checksum; returns at once.

        Args:
            level: 0 is the finest.
            file: (row, column) of the file.
            bodies: One for each of ``layout.used_slots(file)``; None leaves the chunk out.

        Raises:
            OSError: An earlier file could not be written.
        """
        layout, glass = self.levels[level].layout, self._glass[level]
        name = f"{level}/{layout.file_name(file)}"
        if self._journal.finished(name):
            return

        def chunks() -> Iterator[tuple[int, Buffers | None]]:
            for slot, body in zip(layout.used_slots(file), bodies, strict=True):
                left_out = body is None or (glass is not None and glass.is_glass(layout.chunk_box(file, slot)))
                yield slot, None if body is None or left_out else with_checksum(*body)

        self._take()
        self._submit(name, layout, chunks(), self._free_blocks.release)

    def write_tissue(self, mask: Mask, mpp_um: float) -> None:
        """Write the tissue label from its finest level, with as many levels as the image has (NGFF asks for that).

        Args:
            mask: ``(h, w)``; pixel 0 starts where the slide does.
            mpp_um: Microns per pixel of the mask.
        """
        sharded = self.levels[0].layout.sharded
        side = SHARD_PX if sharded else CHUNK_PX
        for k in range(len(self.levels)):
            layout = ArrayLayout(mask.shape, shard_px=(side, side), sharded=sharded)
            self._make_array(f"labels/tissue/{k}", layout)
            pixels = mask.astype(np.uint8)
            for y, x in np.ndindex(-(-mask.shape[0] // SHARD_PX), -(-mask.shape[1] // SHARD_PX)):
                y, x = y * SHARD_PX, x * SHARD_PX
                block = pixels[y : y + SHARD_PX, x : x + SHARD_PX]
                self._write_block(f"labels/tissue/{k}", layout, y, x, block, None)
            self._label_mpp.append((mpp_um * 2**k, mpp_um * 2**k))
            mask = halve_mask(mask)

    def publish(self, attributes: dict[str, Any]) -> None:
        """Wait for pending writes, write the file list, sync, then rename the slide to its final name.

        Args:
            attributes: The `hyfi` attributes; ``format``, ``shards`` and ``metadata`` (the arrays' own JSON, with size
                and digest) are added here, and ``metadata_sha256`` of the slide's own.

        Raises:
            OSError: Something could not be written.
        """
        for future in self._pending:
            future.result()
        self._encoders.shutdown()
        self._disk.shutdown()
        self._write_groups(attributes)
        sync_tree(self.path, only="zarr.json")  # the pixels are on the disk already
        # The last thing before the name: killed while it syncs, a slide without a journal would be made all over again.
        self._journal.remove()
        publish_directory(self.path, self.final)

    def _write_groups(self, attributes: dict[str, Any]) -> None:
        groups = {"labels": metadata.labels_attributes()} if self._label_mpp else {}
        if self._label_mpp:
            groups["labels/tissue"] = metadata.label_attributes(self._label_mpp, self.levels[0].mpp)
        for name, ome in groups.items():
            self._write_json(name, metadata.group_json({"ome": ome}))
        files = sorted(f.relative_to(self.path).as_posix() for f in self.path.rglob("zarr.json"))
        listed = {name: _listed(self.path / name) for name in files if name != "zarr.json"}
        shards = {name: entry.to_json() for name, entry in sorted(self._journal.entries.items())}
        ours = {"format": FORMAT, **attributes, "shards": shards, "metadata": listed}
        group = metadata.group_json({"ome": metadata.image_attributes([v.mpp for v in self.levels]), "hyfi": ours})
        group["attributes"]["hyfi"]["metadata_sha256"] = metadata.digest_of_group(group)
        self._write_json("", group)

    def _make_array(self, name: str, layout: ArrayLayout) -> None:
        self._write_json(name, layout.to_json())
        for row in {row for row, _ in layout.files()}:
            (self.path / name / layout.file_name((row, 0))).parent.mkdir(parents=True, exist_ok=True)

    def _write_json(self, name: str, value: dict[str, Any]) -> None:
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "zarr.json").write_bytes(metadata.encoded(value))

    def _write_block(
        self, array: str, layout: ArrayLayout, y0: int, x0: int, block: Pixels, glass: TissueGrid | None
    ) -> None:
        box = Box(y0, y0 + block.shape[-2], x0, x0 + block.shape[-1])
        names = {file: f"{array}/{layout.file_name(file)}" for file in layout.files(box)}
        new = [file for file, name in names.items() if not self._journal.finished(name)]
        if not new:
            return
        self._take()
        left = _Countdown(len(new), self._free_blocks.release)
        for file in new:
            chunks = [
                (slot, self._encode(layout, layout.chunk_box(file, slot), box, block, glass))
                for slot in layout.used_slots(file)
            ]
            self._submit(names[file], layout, _results(chunks), left)

    def _encode(
        self, layout: ArrayLayout, chunk: Box, box: Box, block: Pixels, glass: TissueGrid | None
    ) -> Future[bytes] | None:
        if glass is not None and glass.is_glass(chunk):
            return None
        return self._encoders.submit(lambda: layout.codec.encode(_whole_chunk(layout, chunk, box, block)))

    def _submit(
        self, name: str, layout: ArrayLayout, chunks: Iterator[tuple[int, Buffers | None]], then: Callable[[], object]
    ) -> None:
        """Have a file written; ``then`` is called when it is, before it is synced, or when it cannot be."""
        once = _Once(then)
        future = self._disk.submit(self._store, name, layout, chunks, once)
        future.add_done_callback(once)
        self._pending.append(future)

    def _store(
        self, name: str, layout: ArrayLayout, chunks: Iterator[tuple[int, Buffers | None]], written: _Once
    ) -> None:
        self._journal.add(name, write_file(self.path / name, layout, chunks, written))

    def _take(self) -> None:
        """Wait until another block may be under way; raise what ended an earlier one."""
        self._free_blocks.acquire()
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        try:
            for future in done:
                future.result()
        except BaseException:
            self._free_blocks.release()
            raise


class _Countdown:
    """Calls a function when it was called ``count`` times, by any threads."""

    def __init__(self, count: int, then: Any) -> None:
        self._count, self._then, self._lock = count, then, threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._then()


class _Once:
    """Calls a function the first time that it is called itself; by one thread at a time."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then: Callable[[], object] | None = then

    def __call__(self, *_: object) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


def _results(chunks: list[tuple[int, Future[bytes] | None]]) -> Iterator[tuple[int, Buffers | None]]:
    """Yield (slot, bytes) in order as they come, and release each."""
    chunks.reverse()
    while chunks:
        slot, future = chunks.pop()
        yield slot, None if future is None else (future.result(),)


def _whole_chunk(layout: ArrayLayout, chunk: Box, box: Box, block: Pixels) -> Pixels:
    """Return the pixels of a chunk; beyond the array's border they repeat its last ones (JPEG) or are background."""
    inside = chunk.intersect(box)
    pixels = block[(..., *inside.relative_to(box).slices())]
    if inside == chunk:
        return pixels
    missing = [(0, 0)] * (pixels.ndim - 2) + [(0, chunk.y1 - inside.y1), (0, chunk.x1 - inside.x1)]
    if layout.codec.exact:
        return np.pad(pixels, missing, constant_values=layout.fill)
    return np.pad(pixels, missing, mode="edge")


def _under(level: StoredLevel, glass: tuple[Mask, float] | None) -> TissueGrid | None:
    shape = level.layout.shape
    if glass is None:
        return None
    mask, mpp_um = glass
    return TissueGrid.under(mask, (mpp_um, mpp_um), (shape[-2], shape[-1]), level.mpp)


def _listed(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256_of(path)}
