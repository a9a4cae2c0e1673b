"""Paging: the pager of a process, and its limit for each shape and mode, chosen before the first step.

::

    memory     process before the step │ gradients, optimizer state │ pages, up to the limit │ workspace of operators
    store      maps that all cells keep at the peak, except those that are only in memory
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from hyfi_core.cells.budget import ResidentLimit, held_bytes_on, page_limit, resident_limit, spilled_bytes
from hyfi_core.cells.page_forecast import PagedForecast
from hyfi_core.cells.pager import Pager
from hyfi_core.cells.spill_store import SpillFile, SpillMemory
from hyfi_core.process_memory import return_freed_now, return_what_is_freed


class PagedKey(Hashable, Protocol):
    """The shape and mode of a call: equal ones need the same memory.

    Attributes:
        trains: whether it is a training step.
    """

    @property
    def trains(self) -> bool:
        """See above."""
        ...


@dataclass(frozen=True)
class _Limits:
    """The limits of a call.

    Attributes:
        pages_bytes: limit of maps in memory.
        resident: limit of the process's resident memory; None: it is not measured.
        stored_bytes: bytes that the store will hold.
    """

    pages_bytes: int
    resident: ResidentLimit | None
    stored_bytes: int


class Paging:
    """The pager of all cells of a process.

    Args:
        spill: ``plan.spill``.
        memory_bytes: ``plan.memory_bytes``.
        device: where maps are.
        cell: returns the cell whose turn it is.

    Attributes:
        pager: one for all cells.

    Raises:
        RequestError: no file can be created in ``plan.spill``.
    """

    def __init__(self, spill: str, memory_bytes: int | None, device: torch.device, cell: Callable[[], int]) -> None:
        # Before the first map: by default, glibc keeps freed memory, and the process would not get smaller.
        return_what_is_freed()
        store = SpillMemory() if spill == "memory" else SpillFile(Path(spill))
        self.pager = Pager(store, 0, cell, device)  # ``begin`` sets its limit
        self._spill, self._memory_bytes, self._device = spill, memory_bytes, device
        self._limits: dict[PagedKey, _Limits] = {}  # of each shape and mode, since its first `begin`
        self._held_bytes: int | None = None  # by the process without maps; measured when the first step begins

    def begin(self, key: PagedKey, forecasts: Callable[[], Sequence[PagedForecast]], new_bytes: int) -> int:
        """Prepare the pager for a step or an evaluation.

        Args:
            key: shape and mode of the call; the limit is chosen once for each.
            forecasts: returns the forecasts of all stages in all cells, with all micro-batches in flight.
            new_bytes: gradients and optimizer state that do not exist yet.

        Returns:
            The bytes that the store will have.

        Raises:
            RequestError: memory or store are too small; the message says how much is needed.
        """
        self.pager.reset()
        if key not in self._limits:
            stages = forecasts()
            if self._held_bytes is None:
                return_freed_now()
                # Measured once, after freed memory was returned: the rest is what no step can free.
                self._held_bytes = held_bytes_on(self._device)
            limit = page_limit(self._memory_bytes, self._held_bytes + new_bytes, stages, self._device)
            stored_bytes = _stored_bytes(stages, limit, key.trains)
            # Before limits are stored: after a refusal, the next call tries again, perhaps with more room.
            self.pager.store.require(stored_bytes)
            self._limits[key] = _Limits(limit, resident_limit(self._memory_bytes, stages, self._device), stored_bytes)
        limits = self._limits[key]
        self.pager.limit_bytes, self.pager.resident = limits.pages_bytes, limits.resident
        return limits.stored_bytes

    def pages_bytes(self, key: PagedKey) -> int | None:
        """Return the limit of maps in memory; None before ``begin`` was called with this key."""
        return self._limits[key].pages_bytes if key in self._limits else None

    def describe(self, key: PagedKey, forecasts: Sequence[PagedForecast]) -> str:
        """Return the bytes that a training step keeps and spills, as text."""
        kept_bytes = sum(forecast.kept_bytes for forecast in forecasts)
        working_bytes = max(forecast.working_bytes for forecast in forecasts)
        recomputed_bytes = sum(forecast.recomputed_bytes for forecast in forecasts)
        text = (
            f"kept for backward: up to {kept_bytes:,} bytes; the largest step of a cell needs {working_bytes:,}; maps "
            f"of {recomputed_bytes:,} are computed again"
        )
        if key not in self._limits:
            return text
        return f"{text}; {self._limits[key].stored_bytes:,} are spilled to {self._spill}"


def _stored_bytes(forecasts: Sequence[PagedForecast], limit_bytes: int, trains: bool) -> int:
    """Return how many bytes the store will have."""
    kept_bytes = sum(forecast.kept_bytes for forecast in forecasts)
    working_bytes = max(forecast.working_bytes for forecast in forecasts)
    return spilled_bytes(kept_bytes, limit_bytes, working_bytes, trains)
