"""More decoding workers for a loader whose trainers wait.

::

    trainer   waits for turn 4 ── request of turn 7, "waited" ──►  loader: a late turn
                                                                   samples queue, and no worker is starting
                                                                   3 late turns among a trainer's last 12:
                                                                   one more worker

The number of workers changes neither the samples nor the order in which they are sent.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from hyfi_core import job_limits

LATE_TURNS = 3
"""Late turns of one trainer that start one more worker; fewer may be due to a cold disk or to starting workers."""
RECENT_TURNS = 12
"""Number of last turns of each trainer that count: in a long run, even a fast enough loader is late at times."""

_WORKER_BYTES = 150_000_000
"""Memory of a worker before its first sample: Python, NumPy and the codecs."""
_SPARE = 4
"""Memory that must be free for one more worker, in multiples of its memory: trainers may need more later."""
_PAUSE_S = 1.0
"""Seconds until free memory is checked again, after it was too little."""


def _free_bytes() -> int:
    return job_limits.available_memory(process=False).free_bytes


class WorkerGrowth:
    """Decides when a loader starts one more worker.

    Args:
        most: Largest number of workers, by the loader's cores.
        on_rise: Called with (new number of workers, ``most``) whenever the number rises.
        on_failure: Called with (current number of workers, error) when another worker could not be started.
        worker_kept_bytes: Most bytes that a worker keeps between samples.
        free_bytes: Returns the memory that is free on this host.
        clock: Returns seconds.

    Attributes:
        most: Largest number of workers.
    """

    def __init__(
        self,
        most: int,
        on_rise: Callable[[int, int], None] = lambda workers, most: None,
        on_failure: Callable[[int, OSError], None] = lambda workers, error: None,
        worker_kept_bytes: int = 0,
        free_bytes: Callable[[], int] = _free_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most = most  # workers
        self._on_rise, self._on_failure = on_rise, on_failure
        self._worker_kept_bytes, self._free_bytes, self._clock = worker_kept_bytes, free_bytes, clock
        self._late: dict[int, deque[bool]] = {}  # by trainer: whether each of its last turns was late
        self._next_look_s = float("-inf")  # time from which free memory may be checked again

    def limit(self, workers: int) -> None:
        """Allow at most this many workers: more would have nothing to prepare."""
        self.most = min(self.most, workers)

    def turn(self, trainer: int, late: bool) -> None:
        """Count a turn; it is late if the trainer has waited for it while its samples queued."""
        self._late.setdefault(trainer, deque(maxlen=RECENT_TURNS)).append(late)

    def is_due(self, workers: int, image_bytes: int) -> bool:
        """Return whether to start one more worker.

        Args:
            workers: The current number.
            image_bytes: Most bytes of the images that a worker reads at a time; it needs twice as much, because it also
                holds the augmented images.
        """
        if workers >= self.most or max(map(sum, self._late.values()), default=0) < LATE_TURNS:
            return False
        if self._clock() < self._next_look_s:
            return False
        is_due = self._free_bytes() >= _SPARE * (_WORKER_BYTES + self._worker_kept_bytes + 2 * image_bytes)
        if not is_due:
            # Reading the limits of cgroups and /proc takes longer than a round of the loader's loop.
            self._next_look_s = self._clock() + _PAUSE_S
        return is_due

    def grown(self, workers: int) -> None:
        """Count late turns anew after the number of workers has risen to ``workers``."""
        # Earlier turns say nothing about the larger number of workers; also, the new worker needs time to start.
        self._late.clear()
        self._on_rise(workers, self.most)

    def refused(self, workers: int, error: OSError) -> None:
        """Start no further workers after one could not be started."""
        self.most = workers
        self._on_failure(workers, error)
