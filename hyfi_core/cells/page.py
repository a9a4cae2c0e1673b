"""Pages: the memory of maps, as a pager knows it."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hyfi_core.cells.recipe import Recipe

NEVER = 1 << 40
"""When a page is used next of which the tape knows no use."""
PLACES = 20
"""Bits of a use that tell apart what comes between the same two waits."""

When = tuple[int, int]
"""(how many waits of the tape come before a use, whose it is): the order in which pages are used."""


@dataclass(eq=False, slots=True)
class Page:
    """The memory of one map.

    Attributes:
        memory: whose end is not put off by this.
        size: bytes.
        cell: whose.
        uses: when it is used, latest first; what is over is taken off the end. A use is a count of waits and, in its
            last ``PLACES`` bits, the place of the step.
        here: whether it is in memory, or being read.
        place: in the store, where its bytes are or go; −1: none.
        written: whether the bytes there are, or will be once ``work`` is done, those in memory.
        tensor: one that tells by its version whether a step has changed the memory.
        version: of that tensor when the bytes were written.
        ready: whether it counts among those that may be dropped at once.
        reading: whether ``work`` reads.
        work: reading or writing under way.
        recipe: computes it again.
    """

    memory: StorageWeakRef
    size: int
    cell: int
    tensor: weakref.ref[torch.Tensor]
    uses: list[int] = field(default_factory=list)
    here: bool = True
    place: int = -1
    written: bool = False
    version: int = -1
    ready: bool = False
    reading: bool = False
    work: Future[None] | None = None
    recipe: Recipe | None = None

    @property
    def next(self) -> When:
        """When it is used next."""
        return (self.uses[-1] if self.uses else NEVER) >> PLACES, self.cell

    @property
    def can_leave(self) -> bool:
        """Whether it may be dropped without being written first."""
        return self.recipe is not None or self.written

    def check(self) -> None:
        """After a step that may have changed it: are the bytes in the store still those in memory?"""
        tensor = self.tensor()
        self.written = self.written and tensor is not None and tensor._version == self.version

    def add_use(self, when: int) -> None:
        """Take note of one more use."""
        if when not in self.uses:
            self.uses.append(when)
            self.uses.sort(reverse=True)

    def storage(self) -> torch.UntypedStorage | None:
        """Return the memory, None where nobody holds it any more."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        return found


@dataclass
class PagerCounts:
    """What has happened since the last reset.

    Attributes:
        peak_bytes: most of pages in memory at a time.
        written_bytes: to the store.
        read_bytes: from the store.
        recomputed_bytes: computed again.
        store_bytes: most of the store in use at a time.
        wait_s: time in which a cell waited for the store.
    """

    peak_bytes: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    recomputed_bytes: int = 0
    store_bytes: int = 0
    wait_s: float = 0.0
