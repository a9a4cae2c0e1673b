"""Allocation of the cache of decoded images; the memory itself belongs to the caller."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from hyfi_core.plan.box import Box

CacheKey = tuple[int, Box]


@dataclass
class CacheEntry:
    """Memory of one image in the cache.

    Attributes:
        offset: Index of its first byte.
        valid: Whether its pixels have been written.
        users: Number of current readers or writers.
    """

    offset: int
    valid: bool = False
    users: int = 0


class SampleCache:
    """Entries for original (not augmented) images by (index, box); least recently used entries are evicted first.

    Args:
        size_bytes: Size of the memory; 0: nothing is cached.
        entry_bytes: Size of the largest image.
    """

    def __init__(self, size_bytes: int, entry_bytes: int) -> None:
        # Entries of one size: there are no gaps into which an image does not fit.
        count = size_bytes // entry_bytes if entry_bytes else 0
        self._free = [i * entry_bytes for i in reversed(range(count))]
        self._entries: OrderedDict[CacheKey, CacheEntry] = OrderedDict()

    def acquire(self, index: int, box: Box) -> CacheEntry | None:
        """Return the entry of an image: read it if it is ``valid``, else write it; call ``release`` afterwards.

        None if there is no room, or while another worker writes the image.
        """
        key = index, box
        entry = self._entries.get(key)
        if entry is None:
            offset = self._free_offset()
            if offset is None:
                return None
            entry = self._entries[key] = CacheEntry(offset)
        elif not entry.valid:
            return None
        self._entries.move_to_end(key)
        entry.users += 1
        return entry

    def release(self, index: int, box: Box) -> None:
        """End the use of an acquired image, whose pixels are now valid."""
        entry = self._entries[index, box]
        entry.users -= 1
        entry.valid = True

    def _free_offset(self) -> int | None:
        """Return the first byte of a free entry, or of one that is evicted now; None if all are in use."""
        if self._free:
            return self._free.pop()
        # The least recently used entry that no worker reads or writes now.
        unused = next((key for key, entry in self._entries.items() if not entry.users), None)
        return self._entries.pop(unused).offset if unused is not None else None
