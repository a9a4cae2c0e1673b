"""Shared memory between a rank and its child process: anonymous files that the child inherits."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch


class SharedBuffer:
    """An anonymous file, mapped into memory.

    Attributes:
        descriptor: File descriptor, the same in a child that inherited it.
        flat: The memory as uint8 ``(size_bytes,)``.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        # An empty file cannot be mapped.
        self._map = mmap.mmap(descriptor, max(1, size_bytes))
        # The tensor keeps the mapping alive, as long as any view of it lives.
        self.flat = torch.frombuffer(self._map, dtype=torch.uint8)[:size_bytes]


class SharedBuffers:
    """A pool of shared buffers; each keeps the memory of its last use.

    Args:
        count: Number of buffers; children inherit all of them when they are started.
    """

    def __init__(self, count: int) -> None:
        self.descriptors = tuple(_private_file() for _ in range(count))
        self._free = list(self.descriptors)

    def acquire(self, size_bytes: int) -> SharedBuffer:
        """Return a free buffer of this size, with undefined content.

        Raises:
            IndexError: All buffers are in use.
        """
        descriptor = self._free.pop()
        # Grows or shrinks the file under its descriptor, which the child has had since it started.
        os.ftruncate(descriptor, max(1, size_bytes))
        return SharedBuffer(descriptor, size_bytes)

    def release(self, buffer: SharedBuffer) -> None:
        """Return a buffer that is no longer read to the pool."""
        self._free.append(buffer.descriptor)

    def close(self) -> None:
        """Free the memory; existing mappings stay valid."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def _private_file() -> int:
    """Return the descriptor of an empty file that only this process and its children can reach."""
    if hasattr(os, "memfd_create"):
        # A name for /proc only: the file is in no folder, and vanishes with its last descriptor.
        return os.memfd_create("hyfi-weights")
    with tempfile.TemporaryFile() as file:
        # The file has no name any more, but lives as long as the copy of its descriptor.
        return os.dup(file.fileno())
