"""Write one slide into a store: written under a temporary name, each file listed with its digest, synced, renamed.

```
write(level, y, x, block)    returns at once
        └ chunks → encoder threads ─┐ in slot order
                                    └ disk threads: write, digest │ sync, rename, add to the journal
                                                                  └ the block is released: `write` accepts another
```

With an identity, the slide is written in a folder named after it, and a writer that was killed can be continued there:
files in the journal that are still intact are not written again. Unfinished slides of other identities are removed.
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

from data.arrays import Mask, Pixels
from data.cores import usable_cores
from data.files import json_bytes, publish_directory, sha256_of, sync_tree, upload_directory
from data.location import is_remote
from data.store import metadata
from data.store.codec import Buffers, with_checksum
from data.store.layout import CHUNK_PX, SHARD_PX, ArrayLayout, StoredLevel
from data.store.shard import write_file
from data.store.sharded_array import ShardedArray
from data.store.slide_store import FORMAT, slide_path
from data.store.tissue_grid import TissueGrid, halve_mask
from data.store.unfinished import JOURNAL, Journal, make_private, unfinished_folder, working_folder
from hyfi_core.plan.box import Box

_BLOCKS_IN_FLIGHT = 2
_FILES_IN_FLIGHT = 16
"""Files being written or synced at a time: a disk serves many waiting writers at once."""


class SlideWriter:
    """A slide being written. A context manager; the slide appears in the store only if `publish` was called.

    Not thread-safe. Memory: two of the caller's blocks, and their encoded form.

    Args:
        store: The folder of the store, which must exist, or a place on object storage.
        slide_id: Name of the slide.
        levels: Finest first, from `pyramid_levels` or those of a scanner.
        tissue: Tissue mask, whose corner is the slide's corner, and its microns per pixel: chunks without tissue are
            left out and listed as blank. None: all chunks are written.
        identity: JSON of what determines the slide's pixels (parameters, the source's size and time). A new writer
            resumes the slide of a killed one with the same identity. None: every writer starts from the beginning.
        threads: Number of chunks encoded at a time; 0: one for each core of this process.
        scratch: For a store on object storage: folder on a local disk from which the finished slide is uploaded;
            default: the system's temporary folder.

    Raises:
        OSError: The store cannot be written.
    """

    def __init__(
        self,
        store: Path,
        slide_id: str,
        levels: Sequence[StoredLevel],
        *,
        tissue: tuple[Mask, float] | None = None,
        identity: Mapping[str, Any] | None = None,
        threads: int = 0,
        scratch: Path | None = None,
    ) -> None:
        self.final = slide_path(store, slide_id)
        local = slide_path(working_folder(store, scratch), slide_id)
        make_private(store, scratch)
        local.parent.mkdir(parents=True, exist_ok=True)
        self.levels = tuple(levels)
        self._resumable = identity is not None
        self._uploading = False  # while `publish` copies the finished slide to object storage
        # Layouts are part of the identity: files with another layout or codec must not count as finished.
        layouts = [[level.layout.to_json(), level.mpp] for level in self.levels]
        self.path = unfinished_folder(local, None if identity is None else [dict(identity), layouts, FORMAT])
        self._tissue = [_tissue_grid(level, tissue) for level in self.levels]
        for k, level in enumerate(self.levels):
            self._make_array(str(k), level.layout)
        self._journal = Journal(self.path)
        # A bounded semaphore raises an error if a block is released twice.
        self._free_blocks = threading.BoundedSemaphore(_BLOCKS_IN_FLIGHT)
        self._threads = threads or usable_cores()
        # Two pools: disk threads wait for encoded chunks, and in one pool they could occupy all threads.
        self._encoders = ThreadPoolExecutor(self._threads, "store-encode")
        self._disk = ThreadPoolExecutor(_FILES_IN_FLIGHT, "store-write")
        self._pending: list[Future[None]] = []  # files that disk threads write
        self._label_mpp: list[tuple[float, float]] = []  # of each level of the tissue mask that was written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # First, because the threads of these pools write into the folder that may be removed below.
        for pool in (self._encoders, self._disk):
            pool.shutdown(wait=True, cancel_futures=True)
        self._journal.close()
        # A later run can go on after an interruption (KeyboardInterrupt, SystemExit) or a failed upload; another error
        # would occur again.
        can_go_on = kind is not None and (self._uploading or not issubclass(kind, Exception))
        if not (self._resumable and can_go_on):
            # After `publish`, there is nothing to remove: it has renamed this folder, unless it uploaded a copy.
            shutil.rmtree(self.path, ignore_errors=True)

    def finished(self, level: int, y0: int, x0: int) -> bool:
        """Whether an earlier run finished the shard that starts at ``(y0, x0)``; it is not written again."""
        layout = self.levels[level].layout
        row, column = y0 // layout.shard_px[0], x0 // layout.shard_px[1]
        return self._journal.finished(f"{level}/{layout.file_name((row, column))}")

    def read_back(self, level: int, box: Box) -> Pixels | None:
        """Return the pixels of ``box`` ``(3, h, w)`` that this run or an earlier one wrote.

        None if a file is not finished, the codec is lossy, or chunks without tissue are left out.
        """
        layout = self.levels[level].layout
        names = [f"{level}/{layout.file_name(file)}" for file in layout.files(box)]
        if not layout.codec.exact or self._tissue[level] is not None or not all(map(self._journal.finished, names)):
            return None
        return ShardedArray(self.path / str(level), layout).read(box, self._threads)

    def write(self, level: int, y0: int, x0: int, block: Pixels) -> None:
        """Write a block of whole shards of a level; returns before they are on disk.

        Args:
            level: Index of the level; 0 is the finest.
            y0: Row where the block starts, a multiple of ``SHARD_PX``.
            x0: Column where the block starts, likewise.
            block: ``(3, h, w)``, ``SHARD_PX`` squared or up to the level's border. Not copied; do not change it.

        Raises:
            OSError: An earlier block could not be written.
        """
        layout = self.levels[level].layout
        self._write_block(str(level), layout, y0, x0, block, self._tissue[level])

    def write_encoded(self, level: int, file: tuple[int, int], bodies: Sequence[Buffers | None]) -> None:
        """Write one file of a level from chunks that are encoded already; returns before it is on disk.

        Args:
            level: Index of the level; 0 is the finest.
            file: (row, column) of the file.
            bodies: Encoded bytes, in pieces and without checksum, for each of ``layout.used_slots(file)``; None leaves
                the chunk out.

        Raises:
            OSError: An earlier file could not be written.
        """
        layout, tissue = self.levels[level].layout, self._tissue[level]
        name = f"{level}/{layout.file_name(file)}"
        if self._journal.finished(name):
            return

        def chunks() -> Iterator[tuple[int, Buffers | None]]:
            for slot, body in zip(layout.used_slots(file), bodies, strict=True):
                left_out = body is None or (tissue is not None and tissue.is_glass(layout.chunk_box(file, slot)))
                yield slot, None if body is None or left_out else with_checksum(*body)

        self._acquire_block()
        self._submit(name, layout, chunks(), self._free_blocks.release)

    def write_tissue(self, mask: Mask, mpp_um: float) -> None:
        """Write the tissue label with as many levels as the image has, as NGFF requires.

        Args:
            mask: ``(h, w)`` finest level; its corner is the slide's corner.
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
                self._write_block(f"labels/tissue/{k}", layout, y, x, block, tissue=None)
            self._label_mpp.append((mpp_um * 2**k, mpp_um * 2**k))
            mask = halve_mask(mask)

    def publish(self, attributes: dict[str, Any]) -> None:
        """Wait for pending writes, write the file list, sync, then rename the slide to its final name.

        Args:
            attributes: The `hyfi` attributes. Added to them: ``format``, ``shards`` (the file list), ``metadata`` (size
                and digest of the JSON files of groups and arrays) and ``metadata_sha256`` of the slide's own JSON.

        Raises:
            OSError: A file could not be written.
        """
        # First, because the list of files must name only files that exist.
        for future in self._pending:
            future.result()
        self._encoders.shutdown()
        self._disk.shutdown()
        self._write_groups(attributes)
        sync_tree(self.path, only="zarr.json")  # pixel files are synced already
        if is_remote(self.final):
            self._upload()
            return
        # Not earlier: if the process is killed before, the journal is needed to resume.
        self._journal.remove()
        publish_directory(self.path, self.final)

    def _upload(self) -> None:
        """Copy the slide to object storage; if that is interrupted, the next writer resumes by the journal."""
        self._journal.close()
        # From here on the slide is complete, and an error keeps the folder: see `__exit__`.
        self._uploading = True
        upload_directory(self.path, self.final, without=(JOURNAL,))
        self._uploading = False

    def _write_groups(self, attributes: dict[str, Any]) -> None:
        """Write the metadata of all groups, at last that of the slide, with the lists of all files."""
        groups = {"labels": metadata.labels_attributes()} if self._label_mpp else {}
        if self._label_mpp:
            groups["labels/tissue"] = metadata.label_attributes(self._label_mpp, self.levels[0].mpp)
        for name, ome in groups.items():
            self._write_json(name, metadata.group_json({"ome": ome}))
        files = sorted(f.relative_to(self.path).as_posix() for f in self.path.rglob("zarr.json"))
        listed = {name: _listed(self.path / name) for name in files if name != "zarr.json"}
        shards = {name: entry.to_json() for name, entry in sorted(self._journal.entries.items())}
        hyfi = {"format": FORMAT, **attributes, "shards": shards, "metadata": listed}
        group = metadata.group_json({"ome": metadata.image_attributes([v.mpp for v in self.levels]), "hyfi": hyfi})
        group["attributes"]["hyfi"]["metadata_sha256"] = metadata.digest_of_group(group)
        self._write_json("", group)

    def _make_array(self, name: str, layout: ArrayLayout) -> None:
        """Write the metadata of an array, and make the folders of its files."""
        self._write_json(name, layout.to_json())
        # All folders now: disk threads then only create files.
        for row in {row for row, _ in layout.files()}:
            (self.path / name / layout.file_name((row, 0))).parent.mkdir(parents=True, exist_ok=True)

    def _write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write the ``zarr.json`` of a group or array; the slide's own has the name ""."""
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "zarr.json").write_bytes(json_bytes(value))

    def _write_block(
        self, array: str, layout: ArrayLayout, y0: int, x0: int, block: Pixels, tissue: TissueGrid | None
    ) -> None:
        """Encode a block of an array and write the files that it fills, except files that are finished.

        Args:
            array: Name of the array.
            layout: Layout of the array.
            y0: First row of the block.
            x0: First column of the block.
            block: ``(…, h, w)``.
            tissue: The tissue of the slide: chunks without tissue are blank; None: all chunks are written.
        """
        box = Box(y0, y0 + block.shape[-2], x0, x0 + block.shape[-1])
        names = {file: f"{array}/{layout.file_name(file)}" for file in layout.files(box)}
        unfinished = [file for file, name in names.items() if not self._journal.finished(name)]
        if not unfinished:
            return
        self._acquire_block()
        # One block may fill several files; it is released when the last of them is written.
        release = _Countdown(len(unfinished), self._free_blocks.release)
        for file in unfinished:
            chunks = [
                (slot, self._encode(layout, layout.chunk_box(file, slot), box, block, tissue))
                for slot in layout.used_slots(file)
            ]
            self._submit(names[file], layout, _results(chunks), release)

    def _encode(
        self, layout: ArrayLayout, chunk: Box, box: Box, block: Pixels, tissue: TissueGrid | None
    ) -> Future[bytes] | None:
        """Start encoding the chunk at box ``chunk``, a part of ``block`` at box ``box``; None if it has no tissue."""
        if tissue is not None and tissue.is_glass(chunk):
            return None
        return self._encoders.submit(lambda: layout.codec.encode(_whole_chunk(layout, chunk, box, block)))

    def _submit(
        self,
        name: str,
        layout: ArrayLayout,
        chunks: Iterator[tuple[int, Buffers | None]],
        when_written: Callable[[], object],
    ) -> None:
        """Write a file in a disk thread; call ``when_written`` once, when it is written (not yet synced) or failed."""
        once = _Once(when_written)
        future = self._disk.submit(self._store, name, layout, chunks, once)
        # Also if the file fails: otherwise its block would never be released, and `write` would wait for ever.
        future.add_done_callback(once)
        self._pending.append(future)

    def _store(
        self, name: str, layout: ArrayLayout, chunks: Iterator[tuple[int, Buffers | None]], written: _Once
    ) -> None:
        """Write a file, and then its line in the journal; runs in a disk thread."""
        self._journal.add(name, write_file(self.path / name, layout, chunks, written))

    def _acquire_block(self) -> None:
        """Wait until fewer than ``_BLOCKS_IN_FLIGHT`` blocks are being written; raise the error of an earlier block."""
        self._free_blocks.acquire()
        # Check earlier files now: after an error, further work would be in vain.
        written = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        try:
            for future in written:
                future.result()
        except BaseException:
            # The caller's block will not be written, so nothing else would release it.
            self._free_blocks.release()
            raise


class _Countdown:
    """Calls ``action`` when it has been called ``count`` times; thread-safe."""

    def __init__(self, count: int, action: Any) -> None:
        self._count, self._action, self._lock = count, action, threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._action()


class _Once:
    """Calls ``action`` the first time it is called, and does nothing afterwards; not thread-safe."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action: Callable[[], object] | None = action

    def __call__(self, *_: object) -> None:
        # The disk thread calls it before its future is done, so the callback never comes at the same time.
        action, self._action = self._action, None
        if action is not None:
            action()


def _results(chunks: list[tuple[int, Future[bytes] | None]]) -> Iterator[tuple[int, Buffers | None]]:
    """Yield (slot, bytes) in order, waiting for each chunk; yielded chunks are not kept in memory."""
    chunks.reverse()  # `pop` takes the last item of a list at no cost
    while chunks:
        slot, future = chunks.pop()
        yield slot, None if future is None else (future.result(),)


def _whole_chunk(layout: ArrayLayout, chunk: Box, box: Box, block: Pixels) -> Pixels:
    """Return a chunk's pixels; beyond the array's border, background, or for JPEG copies of the border's pixels."""
    inside = chunk.intersect(box)
    pixels = block[(..., *inside.relative_to(box).slices())]
    if inside == chunk:
        return pixels
    padding = [(0, 0)] * (pixels.ndim - 2) + [(0, chunk.y1 - inside.y1), (0, chunk.x1 - inside.x1)]
    # JPEG spreads a sharp edge over its blocks of 8 × 8 or 16 × 16: background would show inside the image.
    if layout.codec.exact:
        return np.pad(pixels, padding, constant_values=layout.fill)
    return np.pad(pixels, padding, mode="edge")


def _tissue_grid(level: StoredLevel, tissue: tuple[Mask, float] | None) -> TissueGrid | None:
    """Return (mask, its microns per pixel) as a grid aligned with a level; None without a mask."""
    if tissue is None:
        return None
    shape = level.layout.shape
    mask, mpp_um = tissue
    return TissueGrid.under(mask, (mpp_um, mpp_um), (shape[-2], shape[-1]), level.mpp)


def _listed(path: Path) -> dict[str, Any]:
    """Return the entry of a JSON file in the list ``metadata``."""
    return {"size": path.stat().st_size, "sha256": sha256_of(path)}
