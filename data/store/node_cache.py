"""A cache of decoded chunks that all processes of a node share: each chunk is read and decoded once on a node.

```
FOLDER/<digest>          crc32c, then the pixels of one chunk; appears complete, by renaming
FOLDER/locks/<0 … 255>   held by the process that reads a row of chunks from the store, while others wait for the result
FOLDER/locks/index-<…>   held by the process that reads the index of a file
FOLDER/locks/room        the first process that finds the disk full removes it, and prints a warning
```

The folder is on a disk of the node, or in ``/dev/shm``, and only its user may read it. Names are digests of the slide's
content and the chunk's place, so that a slide that was ingested again has other names. The chunks used longest ago are
removed first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from data.arrays import Pixels
from data.files import private_folder
from data.store.codec import CRC_BYTES, joined, with_checksum, without_checksum

VARIABLE = "HYFI_NODE_CACHE"
"""Environment variable ``BYTES:FOLDER``, which child processes inherit; empty: no cache."""

INDEX = "@index"
_LOCKS = 256
_FILLED = 0.9
"""Fraction of the largest size to which the cache is trimmed."""
_OURS = re.compile(r"[0-9a-f]{40}|\.[0-9a-f]{40}-\d+-\d+")
"""Names of chunks, and of temporary files of chunks, also of killed processes."""
_CHECK_SHARE = 0.02
"""A process checks the cache's size each time it has written this fraction of the largest size."""

Load = Callable[[list[int]], Iterable[tuple[int, Pixels | None]]]
"""Reads and decodes chunks (slots) from the store: yields (slot, pixels), None for a blank chunk."""


def user_folder(folder: Path | None = None) -> Path:
    """Return this user's folder for the cache, inside ``folder`` (default: the system's temporary folder)."""
    return (folder or Path(tempfile.gettempdir())) / f"hyfi-chunks-{os.getuid()}"


def share_on_node(size_bytes: int, folder: Path | None = None) -> None:
    """Use the node's cache in this process and in those that it starts.

    Args:
        size_bytes: Most bytes of the cache; 0: no cache.
        folder: Folder on a disk of the node, used for nothing else; default: `user_folder`.

    Raises:
        OSError: The folder cannot be written.
    """
    os.environ[VARIABLE] = f"{size_bytes}:{(folder or user_folder()).absolute()}" if size_bytes else ""
    cache = node_cache()
    if cache is not None:
        # An earlier run on the node may have found the disk full: this run warns anew.
        cache.announce_room()


@dataclass(frozen=True)
class CacheRoom:
    """The room on the disk of a cache.

    Attributes:
        usable_bytes: Free bytes of the disk, plus the bytes of chunks that are in the cache.
        disk_bytes: Size of the disk.
    """

    usable_bytes: int
    disk_bytes: int


def node_cache() -> NodeCache | None:
    """Return this process's view of the node's cache; None if there is none.

    Raises:
        OSError: Its folder cannot be written.
    """
    return _cache_of(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=8)
def _cache_of(setting: str) -> NodeCache | None:
    size, _, folder = setting.partition(":")
    return NodeCache(Path(folder), int(size)) if setting else None


class NodeCache:
    """One process's view of the cache; safe to use from several threads.

    Attributes:
        folder: Where the chunks are.
        store_bytes: Bytes of pixels that this process has read from the store and decoded.
        shared_bytes: Bytes of pixels that it has taken from the cache.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder, self._size_bytes = folder, size_bytes
        self._lock, self._unchecked_bytes = threading.Lock(), 0
        self.store_bytes = self.shared_bytes = 0
        self._full = False
        private_folder(folder)

    def room(self) -> CacheRoom:
        """Return the room on the disk.

        Raises:
            OSError: The folder cannot be read.
        """
        disk = shutil.disk_usage(self.folder)
        return CacheRoom(disk.free + sum(size for _, size, _ in self._chunks()), disk.total)

    def announce_room(self) -> None:
        """Make the next process that finds the disk full print a warning."""
        with contextlib.suppress(OSError):
            self._room_mark().touch(mode=0o600)

    def read(
        self, row: str, names: Mapping[int, str], shape: tuple[int, ...], load: Load
    ) -> Iterator[tuple[int, Pixels | None]]:
        """Yield (slot, pixels) of chunks, from the cache or else by ``load``; pixels are valid until the next chunk.

        Pixels are None for a blank chunk. If several processes need the same chunks, one calls ``load``, and the
        others wait for it.

        Args:
            row: Identifier of the row of chunks; one process at a time reads a row from the store. The identifier of a
                file's index ends in `INDEX`: it has another lock, because it is read while that of a row is held.
            names: Identifier of each chunk's content, by slot.
            shape: Shape of a chunk.
            load: Reads chunks from the store; its exceptions are passed on.
        """
        missing = []
        for slot, name in names.items():
            cached = self._get(name, shape)
            if cached is None:
                missing.append(slot)
            else:
                yield slot, cached
        if not missing:
            return
        with self._held(row):
            still = []
            # Look again under the lock: the process that held it before may have added the missing chunks.
            for slot in missing:
                cached = self._get(names[slot], shape)
                if cached is None:
                    still.append(slot)
                else:
                    yield slot, cached
            # One by one: only one chunk is in memory.
            for slot, pixels in load(still) if still else ():
                if pixels is not None:
                    self._put(names[slot], pixels)
                yield slot, pixels

    def _path(self, name: str) -> Path:
        return self.folder / hashlib.sha256(name.encode()).hexdigest()[:40]

    def _get(self, name: str, shape: tuple[int, ...]) -> Pixels | None:
        """Return the pixels of a chunk from the cache's folder; None if they are not there, or damaged."""
        path = self._path(name)
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError:
            return None
        try:
            # Mark it as used now, by the time of change: many disks do not record that of access (noatime, relatime).
            os.utime(handle)
            # Mapped pixels stay readable after the file is closed, and after another process has removed it.
            stored = np.frombuffer(mmap.mmap(handle, 0, prot=mmap.PROT_READ), np.uint8)
            body = without_checksum(stored)
        except (OSError, ValueError):  # damaged: read it from the store again
            path.unlink(missing_ok=True)
            return None
        finally:
            os.close(handle)
        if body.size != int(np.prod(shape)):
            return None
        with self._lock:
            self.shared_bytes += body.size
        return body.reshape(shape)

    def _put(self, name: str, pixels: Pixels) -> None:
        """Add a chunk to the cache; once the disk is full, this process adds no more chunks."""
        with self._lock:
            self.store_bytes += pixels.size
        if self._full:
            return
        path = self._path(name)
        # Processes and threads may add the same chunk at the same time: each writes its own file, and any may stay.
        temporary = path.with_name(f".{path.name}-{os.getpid()}-{threading.get_ident()}")
        try:
            with temporary.open("wb") as file:
                file.write(joined(with_checksum(np.ascontiguousarray(pixels).reshape(-1))))
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._stop_adding(error)
            return
        with self._lock:
            self._unchecked_bytes += pixels.size + CRC_BYTES
            # Count under the lock, trim outside of it: other threads go on while this one lists the folder.
            check = self._unchecked_bytes > _CHECK_SHARE * self._size_bytes
            self._unchecked_bytes = 0 if check else self._unchecked_bytes
        if check:
            self._trim()

    def _stop_adding(self, error: OSError) -> None:
        """Add no more chunks, because the disk is full; the first process of the node prints a warning."""
        self._full = True
        with contextlib.suppress(OSError):  # another was first
            # Exactly one process succeeds in removing the file, and that one warns.
            self._room_mark().unlink()
            room = self.room()
            logging.getLogger(__name__).warning(
                "data.node_cache: %s has no room left (%s; %.3g GB free of %.3g GB): no more chunks are shared from "
                "now on, others are read from the store by each process; give less than data.node_cache_bytes=%d, or "
                "another data.node_cache",
                self.folder,
                error.strerror,
                shutil.disk_usage(self.folder).free / 1e9,
                room.disk_bytes / 1e9,
                self._size_bytes,
            )

    def _room_mark(self) -> Path:
        return self._locks() / "room"

    def _chunks(self) -> list[tuple[int, int, str]]:
        """Return (time of last use in ns, bytes, path) of each chunk."""
        chunks = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if _OURS.fullmatch(entry.name):
                        chunks.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        return chunks

    def _trim(self) -> None:
        """Remove the chunks used longest ago if the cache is too large."""
        chunks = self._chunks()
        total = sum(size for _, size, _ in chunks)
        if total <= self._size_bytes:
            return
        # No lock is needed: processes that trim at the same time remove the same files.
        for _, size, path in sorted(chunks):
            if total <= _FILLED * self._size_bytes:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108
            total -= size

    @contextmanager
    def _held(self, row: str) -> Iterator[None]:
        """Context in which no other thread of the node reads the same row of chunks from the store.

        Where the disk has no locks, or the folder was removed meanwhile, chunks may be read twice.
        """
        # A fixed number of locks, although rows with the same number wait for each other: with a file for each row,
        # there would be ever more files.
        number = int(hashlib.sha256(row.encode()).hexdigest()[:8], 16) % _LOCKS
        # The holder of a row also locks an index. With the same locks for both, two processes could deadlock.
        name = f"index-{number}" if row.endswith(INDEX) else str(number)
        with contextlib.ExitStack() as opened:
            with contextlib.suppress(OSError):
                handle = os.open(self._locks() / name, os.O_RDWR | os.O_CREAT, 0o600)
                # Closing ends the lock, as does the end of the process, however it ends.
                opened.callback(os.close, handle)
                # `flock` belongs to the open file, so it also excludes other threads of this process, unlike `lockf`.
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _locks(self) -> Path:
        """Return the folder of locks; create it again if the system has removed old temporary files."""
        locks = self.folder / "locks"
        for folder in (self.folder, locks):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        return locks
