"""Memory that a rank fills and its child reads: files without a name, of which only these two know."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch


class SharedBuffer:
    """One such file, mapped as bytes.

    Attributes:
        descriptor: by which a child that inherited it finds the file.
        flat: its bytes, uint8; written and read in place.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        # Never an empty file: nothing can be mapped of one.
        self._map = mmap.mmap(descriptor, max(1, size_bytes))
        self.flat = torch.frombuffer(self._map, dtype=torch.uint8)[:size_bytes]


class SharedBuffers:
    """A fixed number of shared buffers. Memory: the largest request times the number in use at once.

    Args:
        count: how many; children that are started later share all of them.
    """

    def __init__(self, count: int) -> None:
        self.descriptors = tuple(_private_file() for _ in range(count))
        self._free = list(self.descriptors)

    def take(self, size_bytes: int) -> SharedBuffer:
        """Return a free one of that size; its content is anything.

        Raises:
            IndexError: all are taken.
        """
        descriptor = self._free.pop()
        os.ftruncate(descriptor, max(1, size_bytes))
        return SharedBuffer(descriptor, size_bytes)

    def give(self, buffer: SharedBuffer) -> None:
        """Release a buffer that is no longer read."""
        self._free.append(buffer.descriptor)

    def close(self) -> None:
        """Free the memory; existing mappings stay valid."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def _private_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hyfi-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
