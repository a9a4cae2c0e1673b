"""A pool of decoding workers, which are replaced when they die, their slots, and statistics."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait

from data.loading.decode import BANDS, Lease, Pixels, Samples, part_bytes
from data.loading.decode_worker import Answer, ChildWorker, LeaseDone, LeaseFailed, Memory, StartWorker, Worker
from data.loading.sample_cache import SampleCache
from hyfi_core.plan.box import Box, hull

MAX_DEATHS_OF_A_SAMPLE = 5
"""A sample at which so many workers died is not given to another one."""
MAX_DEATHS_IN_A_ROW = 50
"""So many workers, killed with no sample finished in between, end the service; far fewer that end by themselves do."""


class Leases:
    """The leases that are not finished, issued in the order in which they were added.

    ::

        add ──► waiting ──issue──► held by a worker ──finish──► done
                   ▲                      │
                   └──────── lose ────────┘        the worker died: first in the row again
    """

    def __init__(self) -> None:
        self._waiting: deque[Lease] = deque()
        self._held: dict[int, Lease] = {}
        self._deaths: Counter[int] = Counter()

    def add(self, lease: Lease) -> None:
        """Put a lease last in the row."""
        self._waiting.append(lease)

    def issue(self, worker: int) -> Lease | None:
        """Lease the first waiting sample to an idle worker; None if none waits."""
        if not self._waiting:
            return None
        self._held[worker] = self._waiting.popleft()
        return self._held[worker]

    def finish(self, worker: int) -> Lease:
        """Return the finished lease of a worker."""
        lease = self._held.pop(worker)
        self._deaths.pop(lease.number, None)
        return lease

    def lose(self, worker: int) -> None:
        """Queue the lease of a dead worker again, if it had one.

        Raises:
            RuntimeError: it is not the first worker that this sample has cost.
        """
        lease = self._held.pop(worker, None)
        if lease is None:
            return
        self._deaths[lease.number] += 1
        if self._deaths[lease.number] >= MAX_DEATHS_OF_A_SAMPLE:
            raise RuntimeError(
                f"{MAX_DEATHS_OF_A_SAMPLE} decoding processes died in a row at sample {lease.index} (epoch "
                f"{lease.epoch}); if memory ran out, reduce data.workers, data.prefetch or data.cache_bytes"
            )
        self._waiting.appendleft(lease)


@dataclass
class Counts:
    """Statistics of a pool.

    Attributes:
        samples: made ready.
        cached: those of them that the cache had.
        read_bytes: bytes of pixels taken from the store.
        replaced: workers that died and were replaced.
    """

    samples: int = 0
    cached: int = 0
    read_bytes: int = 0
    replaced: int = 0


class DecodePool:
    """Prepares samples in several workers, into slots of shared memory.

    Memory: ``slots × slot_bytes + cache_bytes``, allocated on first use; in addition each worker has one source image
        and one augmented image.

    Args:
        samples: where pixels come from.
        workers: how many decode at a time.
        slots: number of samples being prepared or not yet released.
        slot_bytes: the most that the parts of one sample need.
        place_bytes: the most that one image needs in the cache.
        cache_bytes: of decoded images kept for later epochs; 0: none.
        start: makes a worker.
    """

    def __init__(
        self,
        samples: Samples,
        workers: int,
        slots: int,
        slot_bytes: int,
        place_bytes: int = 0,
        cache_bytes: int = 0,
        start: StartWorker = ChildWorker,
    ) -> None:
        self.counts = Counts()
        self._samples, self._start = samples, start
        self._memory = Memory(samples, slots * slot_bytes, cache_bytes)
        self._cache = SampleCache(0, cache_bytes, place_bytes)
        self._leases = Leases()
        self._free = [slot * slot_bytes for slot in reversed(range(slots))]
        self._slots: dict[int, Lease] = {}
        self._ready: set[int] = set()
        self._idle: set[int] = set()
        self._deaths_in_a_row = 0
        self._workers: list[Worker] = [start(self._memory) for _ in range(workers)]

    @property
    def has_room(self) -> bool:
        """Whether one more sample may be asked for."""
        return bool(self._free)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Those alive, as far as is known."""
        return tuple(self._workers)

    def ask(self, number: int, epoch: int, index: int, boxes: tuple[Box, ...]) -> None:
        """Queue a sample; there must be a free slot.

        Args:
            number: by which it is asked for again.
            epoch: key of its variation.
            index: in the dataset.
            boxes: parts of the varied image; not empty.
        """
        source = self._samples.source(index, hull(boxes), epoch)
        place = self._cache.borrow(index, source)
        kept = place is not None and place.kept
        at = place.at if place is not None else None
        lease = Lease(number, epoch, index, boxes, self._free.pop(), source, at, kept)
        self._slots[number] = lease
        self._leases.add(lease)

    def parts(self, number: int) -> tuple[Pixels, ...] | None:
        """Return the parts of a sample, each ``(3, h, w)`` contiguous in shared memory; None while it is not ready.

        They are valid until it is released.
        """
        if number not in self._ready:
            return None
        lease = self._slots[number]
        parts, at = [], lease.at
        for box in lease.boxes:
            end = at + part_bytes(box)
            parts.append(self._memory.slots.array[at:end].reshape(BANDS, *box.shape))
            at = end
        return tuple(parts)

    def release(self, number: int) -> None:
        """Forget a sample that was ready: its slot is free."""
        self._ready.remove(number)
        self._free.append(self._slots.pop(number).at)

    def collect(self) -> bool:
        """Take answers, replace the dead, lend what waits to the idle; never blocks. Whether anything happened.

        Raises:
            Exception: what making a sample ready raised, with the worker's traceback as a note.
            RuntimeError: workers die again and again.
        """
        happened = False
        for place, worker in enumerate(self._workers):
            answer: Answer | None = None
            try:
                answer = worker.connection.recv() if worker.connection.poll() else None
            except (EOFError, OSError):
                self._replace(place)
                happened = True
            if answer is not None:
                self._take(place, answer)
            happened |= self._lend(place) or answer is not None
        return happened

    def wait(self, seconds: float) -> None:
        """Sleep until a worker answers or dies, at most so long."""
        wait([worker.connection for worker in self._workers], seconds)

    def close(self) -> None:
        """End all workers and give the memory back."""
        for worker in self._workers:
            worker.stop()
        self._memory.close()

    def _take(self, place: int, answer: Answer) -> None:
        if isinstance(answer, LeaseFailed):
            answer.error.add_note(f"In a decoding worker:\n{answer.text}")
            raise answer.error
        self._idle.add(place)
        if isinstance(answer, LeaseDone):
            self._finish(place, answer)

    def _finish(self, place: int, answer: LeaseDone) -> None:
        lease = self._leases.finish(place)
        if lease.kept_at is not None:
            self._cache.give_back(lease.index, lease.source)
        self._ready.add(lease.number)
        self._deaths_in_a_row = 0
        self.counts.samples += 1
        self.counts.cached += lease.kept
        self.counts.read_bytes += answer.read_bytes

    def _lend(self, place: int) -> bool:
        """Give an idle worker the next lease; whether there was one."""
        lease = self._leases.issue(place) if place in self._idle else None
        if lease is not None:
            self._idle.remove(place)
            with suppress(OSError):  # it has just died: the next look at it finds out, and takes the lease back
                self._workers[place].connection.send(lease)
        return lease is not None

    def _replace(self, place: int) -> None:
        by_itself = self._workers[place].stop(patience_s=1.0)
        self.counts.replaced += 1
        self._deaths_in_a_row += MAX_DEATHS_IN_A_ROW // MAX_DEATHS_OF_A_SAMPLE if by_itself else 1
        if self._deaths_in_a_row > MAX_DEATHS_IN_A_ROW:
            raise RuntimeError(
                "decoding processes keep dying before they finish a sample; see their output above for the cause"
            )
        self._leases.lose(place)
        self._idle.discard(place)
        self._workers[place] = self._start(self._memory)
