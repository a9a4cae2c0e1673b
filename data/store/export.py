"""Export of a slide to NGFF 0.4, for viewers without 0.5: zarr format 2, no shards, blosc with zstd.

```
DIR/<slide_id>.zarr/   .zgroup .zattrs        multiscales, omero, and under `hyfi` which slide was copied
    0/ 1/ …            .zarray 0/0/0 …        (3, y, x) uint8, chunks (1, 1024, 1024)
    labels/tissue/     .zattrs 0/ 1/ …        (y, x) uint8
```

Specification: NGFF 0.4, zarr 2.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zarr
from zarr.storage import LocalStore

from data.errors import StoreError
from data.files import publish_directory, remove_leftovers, sync_tree, temporary_path
from data.store.metadata import omero
from data.store.sharded_array import ShardedArray, read_json
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box

_CHUNK_PX = 1024
_BLOCK_PX = 4096
_SOURCE_DIGEST = "metadata_sha256"
_FILE_DIGEST = "source_sha256"


def export_ngff04(slide: Path, folder: Path, threads: int, progress: Callable[[int], None] | None = None) -> bool:
    """Copy one slide of a store into ``folder``, under its own name; the copy appears complete or not at all.

    Memory: one block of 48 MiB and its encoded form.

    Args:
        slide: ``STORE/<slide_id>.zarr``.
        folder: Existing folder of the copy.
        threads: Chunks decoded at a time.
        progress: Called with the number of pixels copied since the last call.

    Returns:
        False if a copy of this version of the slide exists already.

    Raises:
        RequestError: A folder that is not such a copy has its name, or the copy of another slide.
        StoreError: The slide is missing or damaged.
        OSError: The copy cannot be written.
    """
    store = SlideStore.open(slide)
    final = slide_path(folder, store.slide_id)
    if _is_copy(final, store):
        return False
    # Before writing: the files that a killed export left may be as large as the slide.
    remove_leftovers(final)
    temporary = temporary_path(final)
    try:
        _write_in_thread(store, temporary, threads, progress or (lambda _: None))
        sync_tree(temporary)
        publish_directory(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return True


def pixels_of(slide: Path) -> int:
    """Return the number of pixels to copy; 0 if the slide cannot be opened."""
    try:
        return sum(level.height_px * level.width_px for level in SlideStore.open(slide).levels)
    except StoreError:
        return 0


def _is_copy(final: Path, store: SlideStore) -> bool:
    """Whether ``final`` is a copy of this version of the slide."""
    if not final.exists():
        return False
    try:
        source = dict(read_json(final / ".zattrs")["hyfi"]["copy_of"])
    except (StoreError, KeyError, TypeError, ValueError) as error:
        raise RequestError(f"{final} exists and was not written by hyfi export; choose another --out") from error
    identity = _identity(store)
    # The digest of the source file shows whether it is the same slide, ingested again, or another slide of this name.
    if source.get(_FILE_DIGEST, identity[_FILE_DIGEST]) != identity[_FILE_DIGEST]:
        raise RequestError(f"{final} is the copy of another slide of this name; choose another --out, or remove it")
    return bool(source == identity)


def _identity(store: SlideStore) -> dict[str, Any]:
    """Return what a copy records about its slide: name, and digests of its metadata and source file."""
    return {
        "slide_id": store.slide_id,
        _SOURCE_DIGEST: store.attributes.get(_SOURCE_DIGEST),
        _FILE_DIGEST: store.attributes.get("sha256"),
    }


def _write_in_thread(store: SlideStore, path: Path, threads: int, progress: Callable[[int], None]) -> None:
    """Write in a thread, so that Ctrl-C takes effect between blocks: inside a block, zarr would print long errors."""
    stop = threading.Event()

    def progress_or_stop(pixels: int) -> None:
        if stop.is_set():
            raise InterruptedError("the export was stopped")
        progress(pixels)

    files = _CopiedFiles(path)
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(_write, store, files, threads, progress_or_stop).result()
        finally:
            stop.set()
            files.stop()


class _CopiedFiles(LocalStore):
    """The files of a copy, which can be stopped.

    zarr writes the chunks of a block at the same time. If one fails, zarr raises an error but goes on writing the
    others, which would create the folder again after it has been removed.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._writing = 0
        self._stopped = False
        self._changed = threading.Condition()

    async def set(self, key: str, value: Any) -> None:
        """Write a file; zarr calls this for several at the same time.

        Raises:
            OSError: It cannot be written, or `stop` has been called.
        """
        # Count the files that are being written: `stop` waits until there are none.
        with self._changed:
            if self._stopped:
                raise InterruptedError("the export was stopped")
            self._writing += 1
        try:
            await super().set(key, value)
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    def stop(self) -> None:
        """Allow no more writes; return when no file is being written."""
        with self._changed:
            self._stopped = True
            self._changed.wait_for(lambda: self._writing == 0)


def _write(store: SlideStore, files: LocalStore, threads: int, progress: Callable[[int], None]) -> None:
    """Write the copy of a slide into a new folder."""
    ome = read_json(store.path / "zarr.json")["attributes"]["ome"]
    label = store.path / "labels" / "tissue"
    label_ome = read_json(label / "zarr.json")["attributes"]["ome"]
    root = zarr.create_group(files, zarr_format=2)
    for dataset in ome["multiscales"][0]["datasets"]:
        _copy(root, store.images[dataset["path"]], dataset["path"], threads, progress)
    for dataset in label_ome["multiscales"][0]["datasets"]:
        source = ShardedArray.open(label / dataset["path"])
        # Progress is that of the image: here it gets 0 pixels, and is called because it raises to stop the export.
        _copy(root, source, f"labels/tissue/{dataset['path']}", threads, lambda _: progress(0))
    image_label = {"version": "0.4", **label_ome["image-label"]}
    root["labels"].attrs["labels"] = ["tissue"]
    root["labels/tissue"].attrs.update({"multiscales": _multiscales(label_ome), "image-label": image_label})
    root.attrs.update(
        {
            "multiscales": _multiscales(ome),
            "omero": {"version": "0.4", **omero()},
            "hyfi": {"copy_of": _identity(store), "kind": store.attributes.get("kind")},
        }
    )


def _multiscales(ome: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"version": "0.4", **multiscale} for multiscale in ome["multiscales"]]


def _copy(root: Any, source: ShardedArray, name: str, threads: int, progress: Callable[[int], None]) -> None:
    """Copy an array into a group of zarr format 2, block by block; ``progress`` gets the pixels of each block."""
    from numcodecs import Blosc

    leading = len(source.shape) - 2
    target = root.create_array(
        name,
        shape=source.shape,
        dtype="uint8",
        chunks=(*(1,) * leading, _CHUNK_PX, _CHUNK_PX),
        # Shuffling helps only numbers of several bytes.
        compressors=Blosc(cname="zstd", clevel=1, shuffle=Blosc.NOSHUFFLE),
        fill_value=source.layout.fill,
        chunk_key_encoding={"name": "v2", "separator": "/"},
    )
    height, width = source.shape[-2:]
    # In blocks of whole chunks: to write a part of a chunk, zarr would read, change and write the whole chunk.
    for y in range(0, height, _BLOCK_PX):
        for x in range(0, width, _BLOCK_PX):
            box = Box(y, min(y + _BLOCK_PX, height), x, min(x + _BLOCK_PX, width))
            target[(..., *box.slices())] = source.read(box, threads)
            progress(box.area)
