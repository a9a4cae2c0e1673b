"""Writing of one shard file: chunks in order, then the index; digested while written, then synced and renamed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from data.arrays import Pixels
from data.store.codec import Buffers, joined, with_checksum
from data.store.layout import ArrayLayout
from data.store.sharded_array import ABSENT

TEMPORARY = ".tmp-"
"""Marks the name of an incomplete file."""
_BATCH_BYTES = 2**18
"""Small chunks are written and digested in batches: one by one, switching threads would take longer than the work."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Entry of a slide's file list.

    Attributes:
        size: Bytes; None if the file was omitted because all its chunks are blank.
        sha256: Digest of the file.
        blank: Slots of chunks that were left out on purpose; they read as background.
    """

    size: int | None
    sha256: str | None = None
    blank: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON; ``blank`` only if not empty, ``size`` and ``sha256`` only if there is a file."""
        entry: dict[str, Any] = {} if self.size is None else {"size": self.size, "sha256": self.sha256}
        return {**entry, "blank": list(self.blank)} if self.blank else entry

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> FileEntry:
        """Return the entry from what `to_json` gave.

        Raises:
            ValueError: It is not such an entry.
        """
        size, digest, blank = value.get("size"), value.get("sha256"), value.get("blank", [])
        if not isinstance(blank, list) or not all(isinstance(k, int) for k in blank):
            raise ValueError(f"blank: {blank!r} is not a list of slots")
        if (size is None and not blank) or (size is not None and not (isinstance(size, int) and digest)):
            raise ValueError(f"{value!r} has neither size and digest nor a list of omitted chunks")
        return cls(size, digest, tuple(blank))


def write_file(
    path: Path,
    layout: ArrayLayout,
    chunks: Iterable[tuple[int, Buffers | None]],
    written: Callable[[], object] = lambda: None,
) -> FileEntry:
    """Write one shard, or one chunk of an array without shards; it appears complete and synced, or not at all.

    Args:
        path: Final path; its folder exists.
        layout: The array's layout.
        chunks: (slot, encoded bytes with checksum) of each used slot, in ascending order; None omits the chunk.
        written: Called when the operating system has all bytes; afterwards the chunks' memory is no longer needed.

    Raises:
        OSError: The file cannot be written.
    """
    blank: list[int] = []
    places: list[tuple[int, int, int]] = []
    with _TemporaryFile(path) as file:
        for slot, data in chunks:
            if data is None:
                blank.append(slot)
            else:
                begin = file.size
                file.write(data)
                places.append((slot, begin, file.size - begin))
        if layout.sharded:
            file.write(with_checksum(_index(layout, places)))
        # Before `written`, which lets the caller reuse the memory of the chunks.
        file.flush()
        written()
        if not file.size:
            return FileEntry(None, None, tuple(blank))
        file.publish()
    return FileEntry(file.size, file.digest.hexdigest(), tuple(blank))


def _index(layout: ArrayLayout, places: list[tuple[int, int, int]]) -> bytes:
    """Return the index of a shard, from the (slot, offset, length) of its chunks."""
    # zarr: 2⁶⁴ − 1 in both numbers means that the chunk is absent.
    index = np.full((layout.slots[0] * layout.slots[1], 2), ABSENT, "<u8")
    if places:
        slots, *where = np.array(places, "<u8").T
        index[slots.astype(np.intp)] = np.stack(where, axis=1)
    return index.tobytes()


class _TemporaryFile:
    """A file under a temporary name; `publish` gives it its final name, otherwise leaving the context deletes it."""

    def __init__(self, path: Path) -> None:
        self._final = path
        # With the process id in its name, the file of a killed writer does not disturb the one that resumes.
        self._path = path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}")
        self._handle = self._path.open("wb", buffering=_BATCH_BYTES)
        self._waiting: list[bytes | Pixels] = []  # bytes of the next batch
        self._waiting_bytes = 0
        self.digest = hashlib.sha256()  # of the bytes that were flushed
        self.size = 0  # with those that wait

    def write(self, data: Buffers) -> None:
        """Append bytes; they are written in batches."""
        length = sum(map(len, data))
        self._waiting += data
        self._waiting_bytes += length
        self.size += length
        if self._waiting_bytes >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Digest the waiting bytes, and pass them to the operating system."""
        data: Any = self._waiting[0] if len(self._waiting) == 1 else joined(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        self.digest.update(data)
        self._handle.write(data)
        self._handle.flush()

    def publish(self) -> None:
        """Sync the file and give it its final name."""
        # Sync the content before renaming; `SlideWriter.publish` syncs the folders, once for the whole slide.
        os.fsync(self._handle.fileno())
        self._path.replace(self._final)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # publish has synced it, or an error is being raised already
            self._handle.close()
        self._path.unlink(missing_ok=True)
