"""The pager: spills maps that no cell currently needs, and reads them back before the step that needs them.

    memory     ░░░░░░░░░░ at most ``limit_bytes`` of maps
    forward    c0 c1 c2 c3 │ n0 n1 n2 n3 │ …            the page whose next use is latest is spilled first
    file       c0 c1 ◀── written while the next step computes
    backward   … │ n0 n1 │ c0 ──▶ read ahead, in the order of use

A page is the storage of a map, which the tape, live values or a running operator may reference. Only the storage is
freed, so results do not change. A page with a *recomputation* is dropped instead of written, and
computed again from other pages. The next use of each page is known from the tape: see ``cells.paged_steps``.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hyfi_core.cells.budget import EARLY, ResidentLimit
from hyfi_core.cells.page import NEVER, PLACES, Page, PagerCounts, When
from hyfi_core.cells.page_forecast import SMALLEST_BYTES
from hyfi_core.cells.page_order import PageOrder, pop_latest
from hyfi_core.cells.recomputation import Recomputation, image_of, same_memory, tensors_in
from hyfi_core.cells.spill_store import SpillStore, queued
from hyfi_core.current_device import make_current
from hyfi_core.ops.constants import is_constant

_THREADS = 2
_AHEAD = 0.25  # fraction of the limit that is read ahead at most
_LOW = 0.95  # fraction of the limit down to which pages are dropped when memory is full


class Pager:
    """Manages the pages of all cells of one process; called by the cell whose turn it is.

    Args:
        store: where spilled pages go.
        limit_bytes: limit of pages in memory; exceeded only by a single step that needs more.
        cell: returns the cell whose turn it is.
        device: device of the pages, a ``torch.device`` or its name.

    Attributes:
        resident: lowers ``limit_bytes`` if the rest of the process grows; None: it is not measured.
    """

    def __init__(
        self, store: SpillStore, limit_bytes: int, cell: Callable[[], int], device: torch.device | str = "cpu"
    ) -> None:
        self.limit_bytes = limit_bytes
        self.resident: ResidentLimit | None = None
        self.store = store
        self.counts = PagerCounts()
        self.allocated: dict[Any, int] = {}  # step -> bytes that it allocated in the previous cell
        self._cell = cell
        self._fixed: set[int] = set()  # addresses of storages that stay in memory
        self._pages: dict[int, Page] = {}  # address of a storage -> its page
        # Cell -> the inputs of its current step: it needs them again when its turn comes back.
        self._pinned: dict[int, list[Page]] = {}
        self._order = PageOrder()
        self._memory_bytes = 0  # of pages in memory
        self._ready_bytes = 0  # of those that can be dropped at once
        self._ahead: dict[int, Page] = {}  # id of a page that was read ahead and not used yet -> the page
        self._threads = ThreadPoolExecutor(_THREADS, "spill", make_current, (torch.device(device),))

    # -- around each step of a cell

    def fix(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep tensors (weights, buffers, outputs) in memory until ``reset``."""
        fixed = list(tensors)
        # By the storage's address, which is the same for all views; the Python objects of a storage differ.
        self._fixed.update(tensor.untyped_storage()._cdata for tensor in fixed)
        pages = self._pages_of(fixed)
        self._load(pages)
        for page in pages:
            page.stays = True

    def begin(self, tensors: Any, room_bytes: int = 0) -> None:
        """Load the inputs of a step, keep them in memory during this cell's turn, and make room for the results.

        Args:
            tensors: the inputs, in any structure.
            room_bytes: bytes that the step will allocate.
        """
        pages = self._pages_of(tensors)
        self._pinned.setdefault(self._cell(), []).extend(pages)
        self.make_room(room_bytes + self._missing(pages))
        self._load(pages)
        self._read_ahead(room_bytes)

    def end(self, when: int) -> None:
        """Release the inputs of the step that has ended.

        Args:
            when: time of the step, as for the pages' uses; uses up to it are past and are removed.
        """
        for page in self._pinned.pop(self._cell(), []):
            while page.uses and page.uses[-1] <= when:
                page.uses.pop()
            page.update_written()  # the step may have changed the memory
            self._enqueue(page)  # by its next use, which is another one now
        self._write_early()

    def resume(self, cell: int) -> None:
        """Load the inputs of a cell's current step when its turn begins again."""
        pages = self._pinned.get(cell, [])
        self.make_room(self._missing(pages))
        self._load(pages)

    def track(self, tensor: torch.Tensor, uses: Iterable[int] = ()) -> Page | None:
        """Add uses to the page of a tensor's storage and return the page, a new one if the storage has none.

        None if the storage always stays in memory: it is small, fixed, a constant, or has another owner.
        """
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), storage._cdata
        page = self._pages.get(key)
        if page is not None and page.memory.expired():
            self._forget(key)
            page = None
        if page is None:
            # Memory that NumPy or another library owns cannot be resized, and so not be freed here.
            if size < SMALLEST_BYTES or key in self._fixed or is_constant(storage) or not storage.resizable():
                return None
            page = Page(StorageWeakRef(storage), size, self._cell(), weakref.ref(tensor))
            self._pages[key] = page
            self._memory_bytes += size
        elif page.tensor() is None:
            # The tensor that counted changes is gone: the written bytes no longer count as the contents.
            page.tensor, page.version = weakref.ref(tensor), -1
        for when in uses:
            page.add_use(when)
        self._enqueue(page)
        return page

    def image(self, pixels: torch.Tensor, prepare: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the image that ``prepare`` computes from pixels; it is never spilled, but computed again."""
        self.track(pixels)
        image = prepare(pixels)
        page = self.track(image)
        if page is not None and not same_memory(pixels, image):
            self.note_recomputation(page, image_of(pixels, image, prepare))
        return image

    def note_recomputation(self, page: Page, recomputation: Recomputation | None) -> None:
        """Set how a page is recomputed; None: it is written to the store instead."""
        page.recomputation = recomputation
        self._enqueue(page)

    def note_new(self, page: Page) -> None:
        """Note that the contents of a page have changed: written bytes and a recomputation no longer hold."""
        page.recomputation, page.written = None, False
        self._enqueue(page)

    def page_of(self, tensor: torch.Tensor) -> Page | None:
        """Return the page of a tensor's storage, None if it has none."""
        page = self._pages.get(tensor.untyped_storage()._cdata)
        return None if page is None or page.memory.expired() else page

    def make_room(self, room_bytes: int) -> None:
        """Spill pages until this many bytes are free, those first whose next use is latest."""
        self.counts.peak_bytes = max(self.counts.peak_bytes, self._memory_bytes)
        if self._memory_bytes + room_bytes <= self._limit_now():
            return
        self._forget_freed()
        limit_bytes = self._limit_now()
        # Drop a little more than needed: exactly at the limit, every further step would search the heaps again.
        goal = max(0, int(_LOW * limit_bytes) - room_bytes)
        pinned = {id(page) for page in self._pinned.get(self._cell(), [])}
        later: list[Page] = []
        while self._memory_bytes > goal and self._order.farthest:
            page = pop_latest(self._order.farthest)
            if page is None:
                continue
            if id(page) in pinned or page.reading or page.stays:
                later.append(page)
                continue
            if not page.can_be_dropped:
                self._write(page)
            if page.work is not None and self._memory_bytes <= limit_bytes and not page.work.done():
                later.append(page)  # it can be dropped next time
                continue
            self._finish(page)
            self._drop(page)
        for page in later:
            self._enqueue(page)

    def reset(self) -> None:
        """Forget all pages and counts, before a step or an evaluation."""
        for key in list(self._pages):
            self._forget(key)
        self._pinned.clear()
        self._fixed.clear()
        self._order = PageOrder()
        self._ahead.clear()
        self._memory_bytes = self._ready_bytes = 0
        self.counts = PagerCounts()

    # -- pages

    def _limit_now(self) -> int:
        """Return the limit of pages in memory: less than ``limit_bytes`` if the rest of the process has grown."""
        return self.limit_bytes if self.resident is None else self.resident.pages(self.limit_bytes, self._memory_bytes)

    def _pages_of(self, tensors: Any) -> list[Page]:
        candidates = (self._pages.get(tensor.untyped_storage()._cdata) for tensor in tensors_in(tensors))
        return [page for page in candidates if page is not None and not page.memory.expired()]

    def _forget_freed(self) -> None:
        """Remove pages whose storage has been freed, until there are none: a recomputation keeps its sources alive."""
        while True:
            ended = [key for key, page in self._pages.items() if page.memory.expired()]
            if not ended:
                return
            for key in ended:
                self._forget(key)

    def _forget(self, key: int) -> None:
        """Remove a page whose storage is gone."""
        page = self._pages.pop(key)
        if page.work is not None:
            # A thread may still copy from this memory, or into it.
            page.work.result()
        if page.in_memory:
            self._memory_bytes -= page.size
        page.in_memory, page.recomputation = False, None
        self._update_ready(page)
        self._release(page)
        self._ahead.pop(id(page), None)

    def _missing(self, pages: Iterable[Page]) -> int:
        """Return the bytes needed to load pages."""
        # Recomputing a page needs its sources, and perhaps theirs; a page that several need counts once.
        absent: dict[int, Page] = {}
        to_visit = list(pages)
        while to_visit:
            page = to_visit.pop()
            if not page.in_memory and id(page) not in absent:
                absent[id(page)] = page
                if page.recomputation is not None:
                    to_visit += self._pages_of(page.recomputation.sources)
        return sum(page.size for page in absent.values())

    def _update_ready(self, page: Page) -> None:
        """Update whether a page can be dropped at once, and the bytes of all pages that can."""
        ready = page.in_memory and page.can_be_dropped
        self._ready_bytes += (ready - page.ready) * page.size
        page.ready = ready

    def _load(self, pages: Iterable[Page]) -> None:
        """Read or recompute pages that are not in memory; start all reads before the first wait."""
        needed = list(pages)
        for page in needed:
            self._ahead.pop(id(page), None)
            if not page.in_memory and page.recomputation is None:
                self._read(page)
        for page in needed:
            if not page.in_memory:
                self._compute(page)
            elif page.reading or page.copying:
                self._finish(page)

    def _compute(self, page: Page) -> None:
        """Load the sources of a page and recompute it; if memory is full then, drop sources recomputed only for it."""
        storage, recomputation = page.storage(), page.recomputation
        if storage is None or recomputation is None:
            return
        sources = self._pages_of(recomputation.sources)
        # Listed before they are loaded, after which they look like any other page in memory.
        made_for_it = [source for source in sources if not source.in_memory and source.recomputation is not None]
        self._load(sources)
        storage.resize_(page.size)
        page.in_memory = True
        self._memory_bytes += page.size
        self.counts.recomputed_bytes += page.size
        recomputation.fill(storage)
        self._enqueue(page)
        if made_for_it and self._memory_bytes > self._limit_now():
            pinned = {id(used) for used in self._pinned.get(self._cell(), [])}
            for source in made_for_it:
                if id(source) not in pinned and not source.stays:
                    self._drop(source)

    def _drop(self, page: Page) -> None:
        """Free the memory of a page, if it can be read or computed again."""
        storage = page.storage()
        if storage is None or not page.in_memory or not page.can_be_dropped:
            return
        # Size 0 frees the memory; tensors that refer to the storage keep their shapes.
        storage.resize_(0)
        page.in_memory = False
        self._memory_bytes -= page.size
        self._ahead.pop(id(page), None)
        self._enqueue(page)

    def _enqueue(self, page: Page) -> None:
        """Add the page to the heaps again, after a change of its next use or its state."""
        self._update_ready(page)
        self._order.add(page)

    # -- reading and writing

    def _read_ahead(self, room_bytes: int) -> None:
        """Start reading the pages that are needed next, in place of pages that are needed later."""
        budget = _AHEAD * self.limit_bytes - sum(page.size for page in self._ahead.values())
        while self._order.nearest and budget > 0:
            when, cell, _, page = self._order.nearest[0]
            if (when, cell) != page.next or page.in_memory or page.memory.expired():  # the entry is outdated
                heappop(self._order.nearest)
                continue
            upcoming = [page] if page.recomputation is None else self._pages_of(page.recomputation.sources)
            upcoming = [
                candidate for candidate in upcoming if not candidate.in_memory and candidate.recomputation is None
            ]
            size = sum(candidate.size for candidate in upcoming)
            # ``when``: the high bits of a use. Pages without a use are last: no page behind this one is needed, either.
            if when >= NEVER >> PLACES or not self._drop_later_pages(room_bytes + size, (when, cell)):
                return
            heappop(self._order.nearest)
            for candidate in upcoming:
                self._read(candidate)
                self._ahead[id(candidate)] = candidate
                budget -= candidate.size

    def _drop_later_pages(self, room_bytes: int, before: When) -> bool:
        """Drop pages whose next use is later than ``before`` until there is room; return whether there is."""
        pinned = {id(page) for page in self._pinned.get(self._cell(), [])}
        limit_bytes = self._limit_now()
        while self._memory_bytes + room_bytes > limit_bytes:
            latest_use = self._order.latest_use
            if latest_use is None or latest_use <= before:
                return False
            page = pop_latest(self._order.farthest)
            if page is None:  # the entry was outdated
                continue
            # If this page cannot be dropped at once, do not wait for it: less is read ahead.
            writing = page.work is not None and not page.work.done()
            if id(page) in pinned or page.reading or page.stays or writing or not page.can_be_dropped:
                self._enqueue(page)
                return False
            self._finish(page)
            self._drop(page)
        return True

    def _write_early(self) -> None:
        """Start writing the pages with the latest use, so that they can be dropped at once when memory is full."""
        lacking_bytes = self._memory_bytes - EARLY * self.limit_bytes - self._ready_bytes
        while lacking_bytes > 0 and self._order.dirty:
            page = pop_latest(self._order.dirty)
            if page is not None and not page.can_be_dropped and page.work is None:
                self._write(page)
                lacking_bytes -= page.size

    def _write(self, page: Page) -> None:
        """Start writing a page, after waiting for an earlier read or write of it."""
        self._finish(page)
        storage, tensor = page.storage(), page.tensor()
        if storage is None:
            return
        if page.place is None:
            page.place = self.store.take(storage)
        # The version is read before the thread starts: a change during the write makes the copy outdated.
        page.version, page.written = -1 if tensor is None else tensor._version, True
        self._update_ready(page)
        page.copying = storage.device.type == "cuda"
        page.work = queued(self._threads, self.store.write, storage, page.place)
        self.counts.written_bytes += page.size
        self.counts.store_bytes = max(self.counts.store_bytes, self.store.held_bytes)

    def _read(self, page: Page) -> None:
        """Give a spilled page its memory again, and start to read it."""
        storage = page.storage()
        if storage is None or page.place is None:  # the map is gone, or was never written
            return
        storage.resize_(page.size)
        page.in_memory = page.reading = True
        self._memory_bytes += page.size
        self.counts.read_bytes += page.size
        page.work = queued(self._threads, self.store.read, storage, page.place)
        self._enqueue(page)

    def _finish(self, page: Page) -> None:
        """Wait for a page's pending read or write."""
        if page.work is None:
            return
        begin_s = time.perf_counter()
        # Cleared before waiting: a thread's error is then raised once, not again at each later use of the page.
        work, page.work, page.reading, page.copying = page.work, None, False, False
        work.result()
        self.counts.wait_s += time.perf_counter() - begin_s

    def _release(self, page: Page) -> None:
        if page.place is not None:
            self.store.give_back(page.place)
            page.place, page.written = None, False
