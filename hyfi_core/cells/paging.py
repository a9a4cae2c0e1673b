"""Paging: a process's pager and its limit, chosen before the first step of a shape, in training and evaluation.

memory     process before the step │ gradients, optimizer state │ pages, up to the limit │ workspace of operators
store      peak of what all cells keep, less what is only in memory
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import torch

from hyfi_core.cells.budget import PagedForecast, page_limit, spilled_bytes
from hyfi_core.cells.pager import Pager
from hyfi_core.cells.spill_store import SpillFile, SpillMemory
from hyfi_core.process_memory import resident_bytes, return_what_is_freed


class Paging:
    """The pager of all cells of a process.

    Args:
        spill: ``plan.spill``.
        memory_bytes: ``plan.memory_bytes``.
        device: where maps are.
        cell: returns whose turn it is.

    Attributes:
        pager: the pager.

    Raises:
        RequestError: no file can be made there.
    """

    def __init__(self, spill: str, memory_bytes: int | None, device: torch.device, cell: Callable[[], int]) -> None:
        return_what_is_freed()
        store = SpillMemory() if spill == "memory" else SpillFile(Path(spill))
        self.pager = Pager(store, 0, cell)
        self._spill, self._memory_bytes, self._device = spill, memory_bytes, device
        self._limits: dict[Hashable, int] = {}
        self._held_bytes: int | None = None

    def begin(self, key: Hashable, forecasts: Callable[[], Sequence[PagedForecast]], new_bytes: int) -> None:
        """Let the pager begin a call.

        Args:
            key: of calls that are alike.
            forecasts: returns those of all stages in all cells, with all micro-batches that are there at a time.
            new_bytes: gradients and moments that do not exist yet.

        Raises:
            RequestError: memory or store are too small; the message says what would do.
        """
        self.pager.reset()
        if key not in self._limits:
            found = forecasts()
            if self._held_bytes is None:
                self._held_bytes = resident_bytes()
            largest = max(one.working_bytes for one in found)
            limit = page_limit(self._memory_bytes, self._held_bytes + new_bytes, largest, self._device)
            self.pager.store.require(spilled_bytes(sum(one.kept_bytes for one in found), limit))
            self._limits[key] = limit
        self.pager.limit_bytes = self._limits[key]

    def describe(self, key: Hashable, forecasts: Sequence[PagedForecast]) -> str:
        """Return what is kept, and what of it leaves memory, as text for people."""
        kept, largest = sum(one.kept_bytes for one in forecasts), max(one.working_bytes for one in forecasts)
        text = f"kept for backward: up to {kept:,} bytes; the largest step of a cell needs {largest:,}"
        if key not in self._limits:
            return text
        return f"{text}; {spilled_bytes(kept, self._limits[key]):,} are spilled to {self._spill}"
