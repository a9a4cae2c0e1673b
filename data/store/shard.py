"""One file of a store being written: chunks in order, index at the end, digest on the way, synced, renamed."""

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

from data.store.codec import Buffers, Pixels, joined, with_checksum
from data.store.layout import ArrayLayout
from data.store.sharded_array import ABSENT

BESIDE = ".tmp-"
"""Part of the name of an incomplete file."""
_TOGETHER_BYTES = 2**18
"""Small chunks are written and digested together: threads that take turns for each lose more than that takes."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Entry of the store's file list.

    Attributes:
        size: In bytes; None if the file was omitted because it is blank.
        sha256: Of the file.
        blank: Slots that were left out on purpose; they read as background.
    """

    size: int | None
    sha256: str | None = None
    blank: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the entry; ``blank`` only where there is one, ``size`` and ``sha256`` only where there is a file."""
        entry: dict[str, Any] = {} if self.size is None else {"size": self.size, "sha256": self.sha256}
        return {**entry, "blank": list(self.blank)} if self.blank else entry

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> FileEntry:
        """Return the entry of `to_json`.

        Raises:
            ValueError: It is none.
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
    """Write one shard, or one bare chunk, so that it appears whole and on the disk or not at all.

    Args:
        path: Final path; its folder exists.
        layout: Of the array.
        chunks: (slot, bytes in parts, with their checksum) of each used slot in rising order; None leaves the slot out.
        written: Called when the system has all bytes; what follows waits for the disk, and holds no memory.

    Raises:
        OSError: It cannot be written.
    """
    blank: list[int] = []
    places: list[tuple[int, int, int]] = []
    with _Beside(path) as file:
        for slot, data in chunks:
            if data is None:
                blank.append(slot)
            else:
                begin = file.size
                file.write(data)
                places.append((slot, begin, file.size - begin))
        if layout.sharded:
            file.write(with_checksum(_index(layout, places)))
        file.flush()
        written()
        if not file.size:
            return FileEntry(None, None, tuple(blank))
        file.publish()
    return FileEntry(file.size, file.digest.hexdigest(), tuple(blank))


def _index(layout: ArrayLayout, places: list[tuple[int, int, int]]) -> bytes:
    """Return the index of a shard whose chunks are (slot, offset, length)."""
    index = np.full((layout.slots[0] * layout.slots[1], 2), ABSENT, "<u8")
    if places:
        slots, *where = np.array(places, "<u8").T
        index[slots.astype(np.intp)] = np.stack(where, axis=1)
    return index.tobytes()


class _Beside:
    """A file under another name until it is whole; gone when it is not published."""

    def __init__(self, path: Path) -> None:
        self._final = path
        self._path = path.with_name(f".{path.name}{BESIDE}{os.getpid()}")
        self._handle = self._path.open("wb", buffering=_TOGETHER_BYTES)
        self._waiting: list[bytes | Pixels] = []
        self._waiting_bytes = 0
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Buffers) -> None:
        length = sum(map(len, data))
        self._waiting += data
        self._waiting_bytes += length
        self.size += length
        if self._waiting_bytes >= _TOGETHER_BYTES:
            self.flush()

    def flush(self) -> None:
        data: Any = self._waiting[0] if len(self._waiting) == 1 else joined(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        self.digest.update(data)
        self._handle.write(data)
        self._handle.flush()

    def publish(self) -> None:
        os.fsync(self._handle.fileno())
        self._path.replace(self._final)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # what matters was said by publish, or by the error under way
            self._handle.close()
        self._path.unlink(missing_ok=True)
