"""Stores for spilled maps: blocks of an unnamed file, or blocks of host memory.

    file    │ map │ map │ free │ map …     aligned blocks

The file is unlinked when it is created, so nothing remains of it however the process ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Protocol

import torch

from hyfi_core.errors import RequestError

BLOCK_BYTES = 4096


class SpillStore(Protocol):
    """Stores the bytes of storages; methods may be called by several threads for different places."""

    def write(self, storage: torch.UntypedStorage, place: int) -> None:
        """Write a storage's bytes to a place."""
        ...

    def read(self, storage: torch.UntypedStorage, place: int) -> None:
        """Fill a storage with the bytes of a place."""
        ...

    def require(self, needed_bytes: int) -> None:
        """Make sure that this many bytes can be stored.

        Raises:
            RequestError: there is too little room; the message says how many bytes are needed.
        """
        ...


class SpillFile:
    """A file of blocks.

    Args:
        folder: of the file.

    Raises:
        RequestError: no file can be created there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (open as long as this object)
        except OSError as error:
            raise RequestError(
                f"plan.spill is {folder}, where no file can be created: {error.strerror}; use another folder"
            ) from error

    def require(self, needed_bytes: int) -> None:
        """Reserve room on the disk, so that a running step cannot run out of it; see ``SpillStore``."""
        have = os.fstat(self._file.fileno()).st_blocks * 512
        if needed_bytes <= have:
            return
        free = shutil.disk_usage(self._folder).free
        try:
            if needed_bytes - have > free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self._file.fileno(), 0, needed_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise RequestError(
                f"a step spills up to {needed_bytes:,} bytes to {self._folder} (plan.spill), which has "
                f"{free + have:,} bytes free; use a folder with more free space, a larger plan.memory_bytes, or "
                f"smaller images"
            ) from error

    def write(self, storage: torch.UntypedStorage, place: int) -> None:
        """Write a storage's bytes; see ``SpillStore``.

        Raises:
            RequestError: the disk is full.
        """
        view, done = _bytes_of(storage), 0
        try:
            while done < len(view):
                done += os.pwrite(self._file.fileno(), view[done:], place + done)
        except OSError as error:
            raise RequestError(
                f"cannot write to {self._folder} (plan.spill): {error.strerror}; free some space there and resume "
                f"from the last checkpoint, or use another folder"
            ) from error

    def read(self, storage: torch.UntypedStorage, place: int) -> None:
        """Read a storage's bytes; see ``SpillStore``."""
        view, done = _bytes_of(storage), 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], place + done)
            if count <= 0:
                raise OSError("the file of plan.spill is shorter than what was written to it")
            done += count


class SpillMemory:
    """Blocks of host memory; for maps of a GPU, pinned."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.Tensor] = {}

    def require(self, needed_bytes: int) -> None:
        """Do nothing: the system allocates memory on first use; see ``SpillStore``."""

    def write(self, storage: torch.UntypedStorage, place: int) -> None:
        """Copy a storage's bytes; see ``SpillStore``."""
        block = self._blocks.get(place)
        if block is None or block.numel() != storage.nbytes():
            block = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            self._blocks[place] = block
        block.copy_(_tensor_of(storage))

    def read(self, storage: torch.UntypedStorage, place: int) -> None:
        """Copy them back; see ``SpillStore``."""
        _tensor_of(storage).copy_(self._blocks[place])


class FreeBlocks:
    """Allocator of blocks."""

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self.used_bytes = 0

    @property
    def end_bytes(self) -> int:
        """Length of the file."""
        return self._end

    def take(self, size: int) -> int:
        """Return a place for this many bytes."""
        rounded = blocks_bytes(size)
        self.used_bytes += rounded
        if self._free.get(rounded):
            return self._free[rounded].pop()
        place, self._end = self._end, self._end + rounded
        return place

    def give_back(self, place: int, size: int) -> None:
        """Free a place."""
        rounded = blocks_bytes(size)
        self.used_bytes -= rounded
        self._free.setdefault(rounded, []).append(place)


def blocks_bytes(size: int) -> int:
    """Return the size rounded up to whole blocks."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _tensor_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Return a view of a host storage's bytes; not through numpy, which would prevent resizing it."""
    size = storage.nbytes()
    return memoryview((ctypes.c_char * size).from_address(storage.data_ptr())).cast("B")
