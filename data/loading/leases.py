"""Who decodes which sample: a sample is lent to a worker, and lent again when the worker dies with it.

::

    add ──► waiting ──issue──► held by a worker ──finish──► done
               ▲                      │
               └──────── lose ────────┘        the worker died: first in the row again
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from hyfi_core.plan.box import Box

MOST_DEATHS = 5
"""A sample at which so many workers died is not given to another one."""


@dataclass(frozen=True)
class Lease:
    """One sample to be made ready, and where it goes.

    Attributes:
        number: in the stream.
        epoch: key of its variation.
        index: in the dataset.
        boxes: parts of the varied image, written one after the other.
        at: the first byte of its slot.
        source: the box of the image as it is that the parts are made of.
        kept_at: the first byte of its place in the cache; None: it has none.
        kept: whether the cache has its pixels already.
    """

    number: int
    epoch: int
    index: int
    boxes: tuple[Box, ...]
    at: int
    source: Box
    kept_at: int | None = None
    kept: bool = False


class Leases:
    """The leases that are not finished; the order in which they were added is the order in which they are issued."""

    def __init__(self) -> None:
        self._waiting: deque[Lease] = deque()
        self._held: dict[int, Lease] = {}
        self._deaths: Counter[int] = Counter()

    def add(self, lease: Lease) -> None:
        """Put a lease last in the row."""
        self._waiting.append(lease)

    def issue(self, worker: int) -> Lease | None:
        """Lend the first in the row to an idle worker; None where nobody waits."""
        if not self._waiting:
            return None
        self._held[worker] = self._waiting.popleft()
        return self._held[worker]

    def finish(self, worker: int) -> Lease:
        """Return what the worker held: it is done."""
        lease = self._held.pop(worker)
        self._deaths.pop(lease.number, None)
        return lease

    def lose(self, worker: int) -> None:
        """Take back what a dead worker held, if anything.

        Raises:
            RuntimeError: it is not the first worker that this sample has cost.
        """
        lease = self._held.pop(worker, None)
        if lease is None:
            return
        self._deaths[lease.number] += 1
        if self._deaths[lease.number] >= MOST_DEATHS:
            raise RuntimeError(
                f"{MOST_DEATHS} decoding processes died at sample {lease.index} (epoch {lease.epoch}), one after the "
                "other; where memory ran out, use fewer workers or a smaller data.prefetch or data.cache_bytes"
            )
        self._waiting.appendleft(lease)
