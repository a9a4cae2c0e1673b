"""Memory that several processes see: anonymous, behind a descriptor, gone when its last user is gone.

A name in ``/dev/shm`` would outlive processes that are killed, and is bounded by that file system's size; this has
neither trouble. Linux only.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt


class SharedBytes:
    """One stretch of memory, all zero at first; pages are taken from the system when they are first written.

    Attributes:
        descriptor: to hand to a child process; closed by ``close``, which leaves this process's view usable.
        array: this process's view, uint8 ``(size_bytes,)``.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Map what ``descriptor`` stands for, which another process made with ``create``."""
        self.descriptor = descriptor
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, max(1, size_bytes)), np.uint8)

    @classmethod
    def create(cls, size_bytes: int) -> SharedBytes:
        """Make new memory."""
        descriptor = os.memfd_create("hyfi", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(1, size_bytes))
        return cls(descriptor, size_bytes)

    @classmethod
    def holding(cls, content: bytes) -> SharedBytes:
        """Make memory that begins with ``content``."""
        shared = cls.create(len(content))
        shared.array[: len(content)] = np.frombuffer(content, np.uint8)
        return shared

    def close(self) -> None:
        """Give the descriptor back; the memory lasts as long as anybody maps it."""
        os.close(self.descriptor)
