"""A pool of decoding workers that write samples into slots of shared memory; workers that die are replaced."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait

from data.arrays import Pixels
from data.loading.decode import BANDS, Lease, Samples, part_bytes
from data.loading.decode_worker import (
    Answer,
    ChildWorker,
    LeaseDone,
    LeaseFailed,
    Memory,
    StartWorker,
    Worker,
)
from data.loading.sample_cache import SampleCache
from data.samples.dataset import MOST_AT_A_TIME
from hyfi_core.plan.box import Box, hull

MAX_DEATHS_OF_A_SAMPLE = 5
"""After this many workers died at the same sample, the service ends with an error."""
MAX_DEATHS_IN_A_ROW = 50
"""After this many workers were killed with no sample finished in between, the service ends with an error.

A worker that exits with an error by itself counts as several: another one would fail, too.
"""


class Leases:
    """The queue of samples to prepare, issued in the order in which they were added.

    ::

        add ──► waiting ──issue──► held by a worker ──finish──► done
                   ▲                      │
                   └────── requeue ───────┘        the worker died: first in the queue again
    """

    def __init__(self) -> None:
        self._waiting: deque[Lease] = deque()
        self._held: dict[int, dict[Hashable, Lease]] = {}
        self._deaths: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        """Return the number of waiting leases."""
        return len(self._waiting)

    def add(self, lease: Lease) -> None:
        """Append a lease to the queue."""
        self._waiting.append(lease)

    def issue(self, worker: int) -> Lease | None:
        """Give the first waiting lease to a worker; return None if there is none."""
        if not self._waiting:
            return None
        # A dict keeps the order of issue, in which `requeue` puts the leases back.
        lease = self._waiting.popleft()
        self._held.setdefault(worker, {})[lease.name] = lease
        return lease

    def finish(self, worker: int, name: Hashable) -> Lease:
        """Remove and return the lease of this name, which a worker has finished."""
        lease = self._held[worker].pop(name)
        self._deaths.pop(lease.name, None)
        return lease

    def requeue(self, worker: int) -> None:
        """Put the leases of a dead worker at the front of the queue, in their order.

        Raises:
            RuntimeError: ``MAX_DEATHS_OF_A_SAMPLE`` workers died at one of these samples.
        """
        # From the last to the first, because each is put in front.
        for lease in reversed(self._held.pop(worker, {}).values()):
            self._deaths[lease.name] += 1
            if self._deaths[lease.name] >= MAX_DEATHS_OF_A_SAMPLE:
                raise RuntimeError(
                    f"{MAX_DEATHS_OF_A_SAMPLE} decoding processes died in a row at sample {lease.index} (epoch "
                    f"{lease.epoch}); if memory ran out, reduce data.workers, data.prefetch or data.cache_bytes"
                )
            self._waiting.appendleft(lease)


@dataclass
class Counts:
    """Statistics of a pool.

    Attributes:
        samples: Samples prepared.
        cached: Of these, samples that were in the cache.
        read_bytes: Bytes of pixels read.
        store_bytes: Bytes of chunks read from the store and decoded for the node's cache; 0 without one.
        shared_bytes: Bytes of decoded chunks that came from the node's cache; one may be used for several images.
        replaced: Workers that died and were replaced.
        workers: Workers at work.
    """

    samples: int = 0
    cached: int = 0
    read_bytes: int = 0
    store_bytes: int = 0
    shared_bytes: int = 0
    replaced: int = 0
    workers: int = 0


class DecodePool:
    """Prepares samples in several workers, in slots of shared memory.

    Memory: ``slots × slot_bytes + cache_bytes``, taken from the system when first written; in addition, each worker has
    one original and one augmented image for each sample that it prepares at a time.

    Args:
        samples: Reads and augments images.
        workers: Number of workers.
        slots: Largest number of samples that are being prepared, or ready and not yet released.
        slot_bytes: Most bytes of the parts of one sample.
        entry_bytes: Most bytes of one original image in the cache.
        cache_bytes: Size of the cache of original images for later epochs; 0: no cache.
        start: Starts a worker.
        at_a_time: Samples that a worker prepares at a time; more than one where reading is mostly waiting.

    Attributes:
        counts: Statistics so far.
        image_bytes: Most bytes of the images that a worker prepares at a time.
        most_busy: Largest number of workers that can be busy at a time: more would have no slots.
    """

    def __init__(
        self,
        samples: Samples,
        workers: int,
        slots: int,
        slot_bytes: int,
        entry_bytes: int = 0,
        cache_bytes: int = 0,
        start: StartWorker = ChildWorker,
        at_a_time: int = 1,
    ) -> None:
        self.counts = Counts()
        self._samples, self._start = samples, start
        self._memory = Memory(samples, slots * slot_bytes, cache_bytes)
        self._cache = SampleCache(cache_bytes, entry_bytes)
        self._leases = Leases()
        # Reversed, so that `pop` returns the first slots first: memory of slots that are never used is not allocated.
        self._free_slots = [slot * slot_bytes for slot in reversed(range(slots))]  # offsets in the memory of slots
        self._in_slots: dict[Hashable, Lease] = {}  # by name: being prepared, or ready and not released
        self._ready: set[Hashable] = set()  # names of samples that are prepared and not released
        self._at_a_time = min(at_a_time, MOST_AT_A_TIME)
        self.image_bytes = self._at_a_time * max(slot_bytes, entry_bytes)
        # Workers that have a sample to prepare when every slot is in use, rounded up.
        self.most_busy = -(-slots // self._at_a_time)
        self._room: Counter[int] = Counter()  # by index of a worker: leases that it may be given now
        self._deaths_in_a_row = 0  # of workers, since any of them has prepared a sample
        self._workers: list[Worker] = []
        self._starting: set[int] = set()  # indices of workers that are not ready yet
        for _ in range(workers):
            self.add_worker()

    @property
    def has_free_slot(self) -> bool:
        """Whether another sample may be submitted."""
        return bool(self._free_slots)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The current workers; some may have died since the last `collect`."""
        return tuple(self._workers)

    @property
    def is_behind(self) -> bool:
        """Whether samples wait although all workers have started: one more worker could prepare them."""
        return bool(self._leases) and not self._starting

    def add_worker(self) -> None:
        """Start one more worker.

        Raises:
            OSError: It cannot be started; the others go on.
        """
        self._workers.append(self._start(self._memory))
        self._starting.add(len(self._workers) - 1)
        self.counts.workers += 1

    def submit(self, name: Hashable, epoch: int, index: int, boxes: tuple[Box, ...], counted: bool = True) -> None:
        """Queue a sample; there must be a free slot.

        Args:
            name: Identifies it in `parts` and `release`.
            epoch: Key of its augmentation.
            index: Index in the dataset.
            boxes: Parts of the augmented image; not empty.
            counted: Whether it counts as a sample.
        """
        source = self._samples.source(index, hull(boxes), epoch)
        entry = self._cache.acquire(index, source)
        cached = entry is not None and entry.valid
        cache_offset = entry.offset if entry is not None else None
        lease = Lease(name, epoch, index, boxes, self._free_slots.pop(), source, cache_offset, cached, counted)
        self._in_slots[name] = lease
        self._leases.add(lease)

    def parts(self, name: Hashable) -> tuple[Pixels, ...] | None:
        """Return the parts of a sample, each ``(3, h, w)`` contiguous in shared memory; None while it is not ready.

        They are valid until the sample is released.
        """
        if name not in self._ready:
            return None
        lease = self._in_slots[name]
        parts, start = [], lease.slot_offset
        for box in lease.boxes:
            end = start + part_bytes(box)
            parts.append(self._memory.slots.array[start:end].reshape(BANDS, *box.shape))
            start = end
        return tuple(parts)

    def release(self, name: Hashable) -> None:
        """Free the slot of a sample that was ready."""
        self._ready.remove(name)
        self._free_slots.append(self._in_slots.pop(name).slot_offset)

    def collect(self) -> bool:
        """Handle answers, replace dead workers and give leases to idle workers; never blocks.

        Returns:
            Whether anything happened.

        Raises:
            Exception: What preparing a sample raised, with the worker's traceback as a note.
            RuntimeError: Workers die again and again.
        """
        happened = False
        for worker_id, worker in enumerate(self._workers):
            answer: Answer | None = None
            try:
                # `poll` first: `recv` would block, and a loader that blocks neither sends nor receives.
                answer = worker.connection.recv() if worker.connection.poll() else None
            # The worker's end of the socket is closed: its process has ended.
            except (EOFError, OSError):
                self._replace(worker_id)
                happened = True
            if answer is not None:
                self._handle(worker_id, answer)
            # One lease for each worker in a round: the first worker must not take all while others are idle.
            happened |= self._issue(worker_id) or answer is not None
        return happened

    def wait(self, seconds: float) -> None:
        """Sleep until a worker answers or dies, at most ``seconds``."""
        wait([worker.connection for worker in self._workers], seconds)

    def close(self) -> None:
        """End all workers and close the shared memory; arrays that `parts` returned stay usable."""
        for worker in self._workers:
            worker.stop()
        self._memory.close()

    def _handle(self, worker_id: int, answer: Answer) -> None:
        """Handle a worker's answer: a lease is done, a lease has failed, or the worker has started."""
        if isinstance(answer, LeaseFailed):
            answer.error.add_note(f"In a decoding worker:\n{answer.text}")
            raise answer.error
        if isinstance(answer, LeaseDone):
            self._room[worker_id] += 1
            self._finish(worker_id, answer)
        else:
            self._starting.discard(worker_id)
            # Only now it gets leases: while it starts (about a second), other workers may be idle.
            self._room[worker_id] = self._at_a_time

    def _finish(self, worker_id: int, answer: LeaseDone) -> None:
        """Note that a worker has finished a lease."""
        lease = self._leases.finish(worker_id, answer.name)
        if lease.cache_offset is not None:
            self._cache.release(lease.index, lease.source)
        self._ready.add(lease.name)
        # Any finished sample shows that workers can work; deaths at one sample are counted by `Leases`.
        self._deaths_in_a_row = 0
        # A sample that is prepared box by box has several leases; one of them counts.
        self.counts.samples += lease.counted
        self.counts.cached += lease.cached and lease.counted
        self.counts.read_bytes += answer.read_bytes
        self.counts.store_bytes += answer.store_bytes
        self.counts.shared_bytes += answer.shared_bytes

    def _issue(self, worker_id: int) -> bool:
        """Give a worker the next lease if it has room; return whether it got one."""
        # Check the room first: `issue` takes the lease from the queue.
        lease = self._leases.issue(worker_id) if self._room[worker_id] else None
        if lease is not None:
            self._room[worker_id] -= 1
            with suppress(OSError):  # it has just died: the next collect replaces it and requeues the lease
                self._workers[worker_id].connection.send(lease)
        return lease is not None

    def _replace(self, worker_id: int) -> None:
        """Replace a worker that has ended, or whose connection has, by a new one; put its leases back into the queue.

        Raises:
            RuntimeError: Workers keep dying.
        """
        # The connection of a worker that exits ends before its process has an exit code.
        ended_with_error = self._workers[worker_id].stop(patience_s=1.0)
        self.counts.replaced += 1
        # A worker that was killed counts once. After an error of its own, others would probably fail, too: after
        # MAX_DEATHS_OF_A_SAMPLE of these, the limit is reached.
        self._deaths_in_a_row += MAX_DEATHS_IN_A_ROW // MAX_DEATHS_OF_A_SAMPLE if ended_with_error else 1
        if self._deaths_in_a_row > MAX_DEATHS_IN_A_ROW:
            raise RuntimeError(
                "decoding processes keep dying before they finish a sample; see their output above for the cause"
            )
        # Before the new worker gets this id, by which the leases of the dead worker are stored.
        self._leases.requeue(worker_id)
        self._room[worker_id] = 0
        self._starting.add(worker_id)
        self._workers[worker_id] = self._start(self._memory)
