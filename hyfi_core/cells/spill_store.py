"""Stores for spilled maps: blocks of an unnamed file, or blocks of host memory.

    file    │ map 0 │ map 1 … │ free │ … map 1 │ …     aligned blocks; a map may be in several ranges of them

Free blocks are reused before the file grows, for maps of any size, so the file is never longer than the largest amount
that it has held. It is unlinked when it is created, so nothing remains of it, however the process ends.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from hyfi_core.errors import RequestError

BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, eq=False, slots=True)
class SpillPlace:
    """Where a store keeps the bytes of a map: in a file or in host memory.

    Attributes:
        ranges: (start, stop) byte offsets in the file, in the order of the map's bytes.
        memory: the block of host memory.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    memory: torch.Tensor | None = None


class SpillStore(Protocol):
    """Stores the bytes of storages; several threads may call ``write`` and ``read`` for different places.

    Storages of a GPU are copied on the thread's current stream, and the thread waits for the copy.
    """

    @property
    def held_bytes(self) -> int:
        """The store's size on disk, or in host memory."""
        ...

    def take(self, storage: torch.UntypedStorage) -> SpillPlace:
        """Return a free place of the storage's size."""
        ...

    def give_back(self, place: SpillPlace) -> None:
        """Release a place."""
        ...

    def write(self, storage: torch.UntypedStorage, place: SpillPlace) -> None:
        """Write a storage's bytes to a place."""
        ...

    def read(self, storage: torch.UntypedStorage, place: SpillPlace) -> None:
        """Fill a storage with the bytes of a place."""
        ...

    def require(self, needed_bytes: int) -> None:
        """Make sure that this many bytes can be stored.

        Raises:
            RequestError: there is too little room; the message says how many bytes are needed.
        """
        ...


Job = Callable[[torch.UntypedStorage, SpillPlace], None]
"""``write`` or ``read`` of a store."""


def queued(threads: ThreadPoolExecutor, job: Job, storage: torch.UntypedStorage, place: SpillPlace) -> Future[None]:
    """Let a thread of the pool write or read a storage.

    On a GPU, the thread copies on a stream of its own, after all work that is in the current stream now. The copy
    overlaps with work that the current stream gets later, and only that thread waits for it.
    """
    if storage.device.type != "cuda":
        return threads.submit(job, storage, place)
    computed = torch.cuda.Event()
    # Recorded in this thread, whose current stream computes the map; the pool's threads have other streams.
    computed.record()
    return threads.submit(_on_own_stream, computed, job, storage, place)


def _on_own_stream(computed: torch.cuda.Event, job: Job, storage: torch.UntypedStorage, place: SpillPlace) -> None:
    """Write or read a storage on a new stream, after the event ``computed``."""
    stream = torch.cuda.Stream(storage.device)
    with torch.cuda.stream(stream):
        stream.wait_event(computed)
        job(storage, place)


class SpillFile:
    """A file of blocks.

    Args:
        folder: folder of the file.

    Raises:
        RequestError: no file can be created there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blocks = FreeBlocks()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as this object)
        except OSError as error:
            raise RequestError(
                f"plan.spill is {folder}, where no file can be created: {error.strerror}; use another folder"
            ) from error

    @property
    def held_bytes(self) -> int:
        """Length of the file as far as it has been used; see ``SpillStore``."""
        return self._blocks.end_bytes

    def take(self, storage: torch.UntypedStorage) -> SpillPlace:
        """Return free blocks; see ``SpillStore``."""
        return SpillPlace(self._blocks.take(storage.nbytes()))

    def give_back(self, place: SpillPlace) -> None:
        """Release blocks; see ``SpillStore``."""
        self._blocks.give_back(place.ranges)

    def require(self, needed_bytes: int) -> None:
        """Reserve room on the disk, so that a running step cannot run out of it; see ``SpillStore``."""
        # The blocks that the disk has reserved, always in units of 512 bytes; the file's length may be without blocks.
        reserved = os.fstat(self._file.fileno()).st_blocks * 512
        if needed_bytes <= reserved:
            return
        free = shutil.disk_usage(self._folder).free
        try:
            if needed_bytes - reserved > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Not ``truncate``, which only sets the length: a later write could still find the disk full.
            os.posix_fallocate(self._file.fileno(), 0, needed_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise RequestError(
                f"a step spills up to {needed_bytes:,} bytes to {self._folder} (plan.spill), which has "
                f"{free + reserved:,} bytes free; use a folder with more free space, a larger plan.memory_bytes, or "
                f"smaller images"
            ) from error

    def write(self, storage: torch.UntypedStorage, place: SpillPlace) -> None:
        """Write a storage's bytes; see ``SpillStore``.

        Raises:
            RequestError: the disk is full.
        """
        host = _on_host(storage)
        view = _bytes_of(host)
        try:
            for start, stop in place.ranges:
                piece, view, written = view[: stop - start], view[stop - start :], 0
                while written < len(piece):
                    # A call writes at most 2 GiB on Linux, and may write less.
                    written += os.pwrite(self._file.fileno(), piece[written:], start + written)
        except OSError as error:
            raise RequestError(
                f"cannot write to {self._folder} (plan.spill): {error.strerror}; free some space there and resume "
                f"from the last checkpoint, or use another folder"
            ) from error

    def read(self, storage: torch.UntypedStorage, place: SpillPlace) -> None:
        """Read a storage's bytes; see ``SpillStore``."""
        if storage.device.type != "cpu":
            buffer = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
            self.read(buffer.untyped_storage(), place)
            _tensor_of(storage).copy_(buffer)
            return
        view = _bytes_of(storage)
        for start, stop in place.ranges:
            piece, view, count_read = view[: stop - start], view[stop - start :], 0
            while count_read < len(piece):
                count = os.preadv(self._file.fileno(), [piece[count_read:]], start + count_read)
                # At the end of the file, ``preadv`` returns 0, and the loop would never end.
                if count <= 0:
                    raise OSError("the file of plan.spill is shorter than what was written to it")
                count_read += count


class SpillMemory:
    """Blocks of host memory; for maps of a GPU, pinned."""

    def __init__(self) -> None:
        self._free: dict[int, list[SpillPlace]] = {}  # size in bytes -> pinned blocks to use again
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks; see ``SpillStore``."""
        return self._held_bytes

    def take(self, storage: torch.UntypedStorage) -> SpillPlace:
        """Return a block of a storage's size; see ``SpillStore``."""
        free = self._free.get(storage.nbytes())
        if free:
            return free.pop()
        self._held_bytes += storage.nbytes()
        pinned = storage.device.type == "cuda"
        return SpillPlace(memory=torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned))

    def give_back(self, place: SpillPlace) -> None:
        """Release a block; pinned ones are reused, because pinning is slow; see ``SpillStore``."""
        assert place.memory is not None
        if place.memory.is_pinned():
            self._free.setdefault(place.memory.numel(), []).append(place)
        else:
            self._held_bytes -= place.memory.numel()

    def require(self, needed_bytes: int) -> None:
        """Do nothing: the system allocates memory on first use; see ``SpillStore``."""

    def write(self, storage: torch.UntypedStorage, place: SpillPlace) -> None:
        """Copy a storage's bytes; see ``SpillStore``."""
        assert place.memory is not None
        place.memory.copy_(_tensor_of(storage))

    def read(self, storage: torch.UntypedStorage, place: SpillPlace) -> None:
        """Fill a storage with the bytes of a block; see ``SpillStore``."""
        assert place.memory is not None
        _tensor_of(storage).copy_(place.memory)


class FreeBlocks:
    """Allocator of blocks of a file.

    Attributes:
        end_bytes: length of the file.
    """

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []  # (start, stop), ascending, not adjacent
        self.end_bytes = 0

    def take(self, size: int) -> tuple[tuple[int, int], ...]:
        """Return ranges of blocks for ``size`` bytes: one free range if one is long enough, else several."""
        missing = blocks_bytes(size)
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= missing:
                # First fit: blocks near the beginning of the file are reused, so that it grows less.
                self._free[at : at + 1] = [(start + missing, stop)] if stop - start > missing else []
                return ((start, start + missing),)
        ranges = []
        while missing and self._free:
            start, stop = self._free.pop(0)
            if stop - start > missing:
                self._free.insert(0, (start + missing, stop))
                stop = start + missing
            ranges.append((start, stop))
            missing -= stop - start
        if missing:
            ranges.append((self.end_bytes, self.end_bytes + missing))
            self.end_bytes += missing
        return tuple(ranges)

    def give_back(self, ranges: tuple[tuple[int, int], ...]) -> None:
        """Release ranges of blocks."""
        for start, stop in ranges:
            at = bisect.bisect(self._free, (start, stop))
            # Merged with its neighbours, so that a later large map finds one long range.
            if at < len(self._free) and self._free[at][0] == stop:
                stop = self._free.pop(at)[1]
            if at and self._free[at - 1][1] == start:
                at -= 1
                start = self._free.pop(at)[0]
            self._free.insert(at, (start, stop))


def blocks_bytes(size: int) -> int:
    """Return the size rounded up to whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _tensor_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return the storage itself if it is on the host, else a pinned copy."""
    if storage.device.type == "cpu":
        return storage
    buffer = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
    return buffer.copy_(_tensor_of(storage)).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Return a view of a host storage's bytes; not through numpy, which would prevent resizing it."""
    size = storage.nbytes()
    return memoryview((ctypes.c_char * size).from_address(storage.data_ptr())).cast("B")
