"""How fast an archive is ingested, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pathology.errors import SlideError
from pathology.ingest.discover import SlideJob
from pathology.ingest.identity import SourceStamp


@dataclass(slots=True)
class Pace:
    """Weighs slides by their bytes, which predict the time that they take better than their number does.

    Attributes:
        jobs: All that is to be done.
    """

    jobs: Sequence[SlideJob]
    _bytes: list[int] = field(init=False)
    _started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._bytes = [_size(job) for job in self.jobs]
        self._started_s = time.monotonic()

    def done(self, shares: Sequence[float]) -> float:
        """Return how much of the whole is done, 0 to 1, from the share of each job."""
        total = sum(self._bytes)
        return sum(size * share for size, share in zip(self._bytes, shares, strict=False)) / total if total else 1.0

    def text(self, done: float) -> str:
        """Return the rate so far and the time that is left, for people."""
        elapsed_s = time.monotonic() - self._started_s
        if done <= 0 or elapsed_s <= 0:
            return ""
        rate = sum(self._bytes) * done / elapsed_s / 1e6
        return f"{rate:.3g} MB/s, {duration(elapsed_s * (1 - done) / done)} left"


def duration(seconds: float) -> str:
    """Return a time for people: ``40 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _size(job: SlideJob) -> int:
    try:
        return max(1, SourceStamp.of(job.source).size_bytes)
    except SlideError:
        return 1
