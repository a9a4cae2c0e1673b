"""Resident memory of a process that spills: how many bytes of pages fit beside everything else.

Besides pages, the process holds libraries, weights, gradients, small maps, messages, buffers of files, and what
allocators and libraries of matrix products keep for each thread, and so for each cell.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyfi_core.process_memory import resident_bytes, return_freed_now

_GROWN_BYTES = 16 << 20
"""Freed memory is returned to the system, which takes milliseconds, once the rest of the process has grown by this."""


@dataclass
class ResidentLimit:
    """Largest number of bytes of pages, as long as the process must not exceed a limit.

    Attributes:
        most_bytes: of the process between two steps.
        least_bytes: of pages: with fewer, no step could run.
        held_bytes: besides pages, when freed memory was last returned to the system.
    """

    most_bytes: int
    least_bytes: int
    held_bytes: int = 0

    def pages(self, limit_bytes: int, paged_bytes: int) -> int:
        """Return how many bytes of pages may be in memory.

        Freed memory that the process has kept is returned to the system if there is too little room.

        Args:
            limit_bytes: at most.
            paged_bytes: of pages that are in memory now.
        """
        other_bytes = resident_bytes() - paged_bytes
        if self.most_bytes - other_bytes < limit_bytes and other_bytes > self.held_bytes + _GROWN_BYTES:
            return_freed_now()
            self.held_bytes = other_bytes = resident_bytes() - paged_bytes
        return max(min(limit_bytes, self.least_bytes), min(limit_bytes, self.most_bytes - other_bytes))
