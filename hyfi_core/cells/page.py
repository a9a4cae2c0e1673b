"""Pages: the memory of maps, as managed by a pager."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hyfi_core.cells.recomputation import Recomputation
from hyfi_core.cells.spill_store import SpillPlace

NEVER = 1 << 40
"""Next use of a page without a use."""
PLACES = 20
"""A use is an integer: ``waits << PLACES | index``, the number of waits before it and the index of the step."""

When = tuple[int, int]
"""(number of waits before a use, cell): the order in which pages are used."""


@dataclass(eq=False, slots=True)
class Page:
    """The memory of one map.

    Attributes:
        memory: a weak reference to the storage.
        size: bytes.
        cell: the cell that owns the map.
        uses: future uses, latest first; past ones are removed from the end. See ``PLACES``.
        in_memory: whether it is in memory, or being read.
        place: position of its bytes in the store.
        written: whether the bytes in the store equal those in memory, or will once ``work`` is done.
        tensor: a weak reference to a tensor with this memory; its version shows whether a step has changed it.
        version: version of the tensor when the bytes were written.
        ready: whether the pager counts it among the pages that are in memory and can be dropped.
        reading: whether ``work`` is a read.
        copying: whether ``work`` copies it on another stream of its GPU; a step that may overwrite it must wait.
        work: pending read or write.
        recomputation: how it is recomputed; None: it is not.
        stays: whether it must stay in memory until the pager is reset.
    """

    memory: StorageWeakRef
    size: int
    cell: int
    tensor: weakref.ref[torch.Tensor]
    uses: list[int] = field(default_factory=list)
    in_memory: bool = True
    place: SpillPlace | None = None
    written: bool = False
    version: int = -1
    ready: bool = False
    reading: bool = False
    copying: bool = False
    work: Future[None] | None = None
    recomputation: Recomputation | None = None
    stays: bool = False

    @property
    def next(self) -> When:
        """Next use."""
        return (self.uses[-1] if self.uses else NEVER) >> PLACES, self.cell

    @property
    def can_be_dropped(self) -> bool:
        """Whether it can be dropped without being written."""
        return self.recomputation is not None or self.written

    def update_written(self) -> None:
        """Update ``written`` after a step that may have changed the memory."""
        tensor = self.tensor()
        # A storage has no version, but a tensor with its memory has: it counts changes in place.
        self.written = self.written and tensor is not None and tensor._version == self.version

    def add_use(self, when: int) -> None:
        """Add a use."""
        if when not in self.uses:
            self.uses.append(when)
            # The next use is at the end, from where it is removed in constant time.
            self.uses.sort(reverse=True)

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage, None if it has been freed."""
        # There is no public way from a weak pointer to its storage.
        storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        return storage


@dataclass
class PagerCounts:
    """Counts since the last reset.

    Attributes:
        peak_bytes: peak of pages in memory.
        written_bytes: bytes written to the store.
        read_bytes: bytes read from the store.
        recomputed_bytes: bytes computed again instead of being read.
        store_bytes: peak size of the store.
        wait_s: time that cells waited for the store.
    """

    peak_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    recomputed_bytes: int = 0
    store_bytes: int = 0
    wait_s: float = 0.0
