"""Positional reads of a slide's file: without a shared file offset, threads and forked processes cannot interfere."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pathology.errors import SlideError

LARGEST_READ_BYTES = 8 * 2**20
_GAP_BYTES = 64 * 2**10
"""Up to this gap between two parts, reading and discarding it is cheaper than a second read."""


class SlideFile:
    """Positional reads of one file; each process opens it again.

    Args:
        path: The file.

    Raises:
        SlideError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._locks: dict[int, threading.Lock] = {}
        self._pid = 0
        self._handle = -1
        self._stamp: tuple[int, int] | None = None
        self._open()

    def _open(self) -> None:
        """Open the file for this process.

        Raises:
            SlideError: It cannot be opened, or has changed since it was opened first.
        """
        try:
            # O_CLOEXEC: programs that are started meanwhile must not hold the file open.
            handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SlideError(f"the file cannot be read: {error.strerror}") from error
        status = os.fstat(handle)
        stamp = (status.st_size, status.st_mtime_ns)
        # A forked process opens it anew: offsets that were parsed before must still be those of the same file.
        if self._stamp not in (None, stamp):
            os.close(handle)
            raise SlideError("the file changed while it was read; open it again")
        # In this order: a thread that sees this process's id, without the lock, must find its handle.
        self._handle, self._pid, self._stamp = handle, os.getpid(), stamp

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset``; fewer at the end of the file.

        Raises:
            OSError: The disk fails.
            SlideError: The slide is closed, or the file has changed since it was first opened.
        """
        if self._pid != os.getpid():
            # One lock for each process: a lock that is held during a fork stays locked in the child.
            with self._locks.setdefault(os.getpid(), threading.Lock()):
                if self._pid != os.getpid():
                    self._open()
        if self._handle < 0:
            raise SlideError("the slide is closed")
        data = os.pread(self._handle, length, offset)
        while len(data) < length:  # NFS returns less than asked for at times, and so do reads over 2 GiB
            more = os.pread(self._handle, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def close(self) -> None:
        """Close the file; a handle inherited from a parent process stays open."""
        if self._handle >= 0 and self._pid == os.getpid():
            os.close(self._handle)
        self._handle, self._pid = -1, os.getpid()


@dataclass(frozen=True, slots=True)
class Span:
    """One read of bytes ``[offset, offset + length)``, and the indices of the parts that lie in it."""

    offset: int
    length: int
    members: tuple[int, ...]


def coalesced(
    offsets: Sequence[int], lengths: Sequence[int], largest: int = LARGEST_READ_BYTES, gap: int = _GAP_BYTES
) -> list[Span]:
    """Combine parts of a file that are close together into reads of at most ``largest`` bytes (or one larger part).

    ```
    tiles  ▕0▏▕1▏▕2▏            ▕3▏▕4▏        spans  ▕ 0 1 2 ▏            ▕ 3 4 ▏
    ```

    Args:
        offsets: First byte of each part, in any order.
        lengths: Bytes of each part.
        largest: Maximum bytes of one read.
        gap: Maximum unused bytes between two parts of one read.

    Returns:
        Reads in the order of the file; ``members`` are indices into ``offsets``.
    """
    spans: list[Span] = []
    members: list[int] = []
    start = end = 0
    for index in sorted(range(len(offsets)), key=offsets.__getitem__):
        first, last = offsets[index], offsets[index] + lengths[index]
        # A part may lie within the one before; its read ends where that does. Comparisons are faster than max(): a
        # slide may have a million tiles.
        if last < end:
            last = end
        if members and (first > end + gap or last - start > largest):
            spans.append(Span(start, end - start, tuple(members)))
            members = []
            # The new read starts with this part alone.
            last = offsets[index] + lengths[index]
        if not members:
            start = first
        members.append(index)
        end = last
    if members:
        spans.append(Span(start, end - start, tuple(members)))
    return spans
