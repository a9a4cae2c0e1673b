"""The order of pages by their next use, for a pager that drops the latest and reads the earliest.

An entry is not removed when its page changes: a new one is added, and an outdated one is skipped when it is popped.
"""

from __future__ import annotations

import heapq

from hyfi_core.cells.page import Page, When

Entry = tuple[int, int, int, Page]
"""(waits before the next use, cell, unique number, page); the first two are negative in heaps with the latest first."""


class PageOrder:
    """Three heaps of pages, each with the page first that the pager looks for.

    Attributes:
        farthest: pages in memory, the latest next use first: what to drop.
        dirty: pages of ``farthest`` that must be written before they can be dropped: what to write early.
        nearest: pages not in memory, the earliest next use first: what to read ahead.
    """

    def __init__(self) -> None:
        self.farthest: list[Entry] = []
        self.dirty: list[Entry] = []
        self.nearest: list[Entry] = []
        self._entry_count = 0

    @property
    def latest_use(self) -> When | None:
        """The latest next use of the pages in memory, perhaps of an outdated entry; None if there are no pages."""
        if not self.farthest:
            return None
        when, cell, _, _ = self.farthest[0]
        return -when, -cell

    def add(self, page: Page) -> None:
        """Add entries for a page, by its next use."""
        # A unique number for each entry, because heaps would otherwise compare pages, which have no order.
        self._entry_count += 1
        when, cell = page.next
        if not page.in_memory:
            heapq.heappush(self.nearest, (when, cell, self._entry_count, page))
            return
        heapq.heappush(self.farthest, (-when, -cell, self._entry_count, page))
        if not page.can_be_dropped:
            heapq.heappush(self.dirty, (-when, -cell, self._entry_count, page))


def pop_latest(heap: list[Entry]) -> Page | None:
    """Pop the first page of ``farthest`` or ``dirty``; None if its entry is outdated."""
    when, cell, _, page = heapq.heappop(heap)
    is_current = (-when, -cell) == page.next and page.in_memory
    return page if is_current and not page.memory.expired() else None
