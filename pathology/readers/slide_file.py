"""A slide's file, read by position: no shared place in the file, so threads and forked processes cannot mix bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pathology.errors import SlideError

LARGEST_READ_BYTES = 8 * 2**20
_GAP_BYTES = 64 * 2**10
"""Bytes between two tiles that are read and thrown away rather than asked for apart: about what a seek costs."""


class SlideFile:
    """Positional reads of one file, opened again in each process.

    Raises:
        SlideError: It cannot be opened, or it is another file than before.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._locks: dict[int, threading.Lock] = {}
        self._pid = 0
        self._handle = -1
        self._stamp: tuple[int, int] | None = None
        self._open()

    def _open(self) -> None:
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SlideError(f"the file cannot be read: {error.strerror}") from error
        found = os.fstat(handle)
        stamp = (found.st_size, found.st_mtime_ns)
        if self._stamp not in (None, stamp):
            os.close(handle)
            raise SlideError("the file changed while it was read; open it again")
        self._handle, self._pid, self._stamp = handle, os.getpid(), stamp

    def read(self, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset``, fewer where the file ends.

        Raises:
            OSError: The disk fails.
            SlideError: The file is closed or is another one than before.
        """
        if self._pid != os.getpid():
            # A lock for each process: one that was held while its process forked would stay held in the child.
            with self._locks.setdefault(os.getpid(), threading.Lock()):
                if self._pid != os.getpid():
                    self._open()
        if self._handle < 0:
            raise SlideError("the slide is closed")
        data = os.pread(self._handle, length, offset)
        while len(data) < length:  # NFS and files over 2 GiB may give less at a time
            more = os.pread(self._handle, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def close(self) -> None:
        """Let go of the file; a forked child leaves its parent's handle alone."""
        if self._handle >= 0 and self._pid == os.getpid():
            os.close(self._handle)
        self._handle, self._pid = -1, os.getpid()


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``[offset, offset + length)`` that one read brings, and which of the wanted parts lie in them."""

    offset: int
    length: int
    members: tuple[int, ...]


def coalesced(
    offsets: Sequence[int], lengths: Sequence[int], largest: int = LARGEST_READ_BYTES, gap: int = _GAP_BYTES
) -> list[Span]:
    """Join parts of a file that lie close together into reads of at most ``largest`` bytes (or one part, if larger).

    ```
    tiles  ▕0▏▕1▏▕2▏            ▕3▏▕4▏        spans  ▕ 0 1 2 ▏            ▕ 3 4 ▏
    ```

    Args:
        offsets: First byte of each part, in any order.
        lengths: Bytes of each.
        largest: Bound of one read.
        gap: Unwanted bytes that are read along.

    Returns:
        Spans in the order of the file; ``members`` are indices into ``offsets``.
    """
    spans: list[Span] = []
    members: list[int] = []
    start = end = 0
    for index in sorted(range(len(offsets)), key=offsets.__getitem__):
        first, last = offsets[index], offsets[index] + lengths[index]
        # Plain comparisons: a slide has a million tiles.
        if last < end:
            last = end
        if members and (first > end + gap or last - start > largest):
            spans.append(Span(start, end - start, tuple(members)))
            members = []
            last = offsets[index] + lengths[index]
        if not members:
            start = first
        members.append(index)
        end = last
    if members:
        spans.append(Span(start, end - start, tuple(members)))
    return spans
