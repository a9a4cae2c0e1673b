"""More decoding workers for a loader whose trainers wait.

::

    trainer   waits for turn 4 ── request of turn 7, "waited" ──►  loader: a late turn
                                                                   samples queue, and no worker is starting
                                                                   3 late turns of a trainer: one more worker

Which worker prepares a sample changes nothing of it, nor of the order in which samples are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hyfi_core import job_limits

LATE_TURNS = 3
"""Of one trainer, for one more worker: a single late turn may come from a cold disk or from workers that start."""

_WORKER_BYTES = 150_000_000
"""Of a worker before its first sample: Python, NumPy and the codecs."""
_SPARE = 4
"""So many times the memory of a further worker must be free, as trainers may need more later."""


def _free_bytes() -> int:
    return job_limits.available_memory(process=False).free_bytes


class WorkerGrowth:
    """Decides when a loader starts one more worker.

    Args:
        most: Workers that the loader's cores allow.
        raised: Called with the new number whenever it rises.
        free_bytes: Returns the memory that is free on this host.
    """

    def __init__(
        self,
        most: int,
        raised: Callable[[int], None] = lambda workers: None,
        free_bytes: Callable[[], int] = _free_bytes,
    ) -> None:
        self.most = most
        self._raised, self._free_bytes = raised, free_bytes
        self._late: Counter[int] = Counter()

    def late(self, trainer: int) -> None:
        """Count a turn for which this trainer has waited while its samples queued."""
        self._late[trainer] += 1

    def is_due(self, workers: int, image_bytes: int) -> bool:
        """Return whether to start one more worker.

        Args:
            workers: The current number.
            image_bytes: Of the largest image that a worker reads; it has that and the augmented one in memory.
        """
        if workers >= self.most or max(self._late.values(), default=0) < LATE_TURNS:
            return False
        return self._free_bytes() >= _SPARE * (_WORKER_BYTES + 2 * image_bytes)

    def grown(self, workers: int) -> None:
        """Begin to count anew, as there are so many workers now."""
        self._late.clear()
        self._raised(workers)
