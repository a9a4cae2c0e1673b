"""The service of a loader rank: prepares requested samples ahead of time, and sends each trainer only its parts.

The rank itself only talks: workers in child processes read, vary and cut (see :mod:`data.loading.decode_pool`),
and MPI sends from the memory that they wrote.

One sample is read once, over the hull of the boxes that this loader's trainers want of it. It is begun when all of
them have asked for it and have nothing older waiting: so the oldest sample in a slot can always be sent, and slots
come free however far trainers drift apart. Memory is bounded by the number of requests of trainers: their credits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate

import torch

from data.loading.backoff import Backoff
from data.loading.batches import BatchLayout, Part
from data.loading.decode import BANDS, Samples, part_bytes
from data.loading.decode_pool import Counts, DecodePool
from data.loading.decode_worker import ChildWorker, StartWorker
from data.loading.order import SampleStream
from data.loading.remote_feed import CONTROL_TAG, PIXELS_TAG, REPORT_TAG
from hyfi_core.comm.base import Communicator, Message, Pending
from hyfi_core.plan.box import Box, hull


@dataclass
class _Client:
    """One trainer as the loader knows it.

    Attributes:
        parts: what it wants of its replica's batches.
        replica: its own.
        every: (k, n): it asks this loader for its replica's samples k, k + n, k + 2n, …
        ahead: turns that it asks for at a time.
        wanted: numbers asked for and not sent yet; ``begun`` of them are being made ready.
    """

    parts: tuple[Part, ...]
    replica: int
    every: tuple[int, int]
    ahead: int
    wanted: deque[int] = field(default_factory=deque)
    begun: int = 0
    gone: bool = False
    sent_bytes: int = 0

    def boxes(self, layout: BatchLayout, number: int) -> list[Box]:
        """Return the boxes that it wants of a sample from this loader."""
        place, of = self.every
        mine = layout.replica_of(number) == self.replica and layout.ordinal(number) % of == place
        return [part.box for part in self.parts if part.holds(layout.place_of(number))] if mine else []

    @property
    def next_number(self) -> int | None:
        """The oldest number that is not begun."""
        return self.wanted[self.begun] if self.begun < len(self.wanted) else None


class LoaderService:
    """Serves trainers until all of them have ended.

    Args:
        comm: the world.
        trainers: ranks that will say hello.
        samples: the training split.
        stream: order of all samples, the same as the trainers'.
        layout: how it is cut into batches, the same as the trainers'.
        workers: how many decode at a time.
        cache_bytes: of decoded images kept in memory for later epochs.
        start: makes a worker.
        watch: called between messages, for signals; may raise.
    """

    def __init__(
        self,
        comm: Communicator,
        trainers: Sequence[int],
        samples: Samples,
        stream: SampleStream,
        layout: BatchLayout,
        workers: int,
        cache_bytes: int = 0,
        start: StartWorker = ChildWorker,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._comm, self._ranks, self._stream, self._layout, self._watch = comm, tuple(trainers), stream, layout, watch
        self._samples, self._workers, self._cache_bytes, self._start_worker = samples, workers, cache_bytes, start
        self._trainers: dict[int, _Client] = {}
        self._open: dict[int, dict[int, slice]] = {}  # samples in slots: whose which parts are, until they arrived
        self._sending: list[tuple[Pending, int, int]] = []
        self._pool: DecodePool | None = None
        self._stopped = False

    @property
    def counts(self) -> Counts:
        """Statistics so far."""
        return self._pool.counts if self._pool is not None else Counts()

    def serve(self) -> bool:
        """Serve; return whether the run was stopped before its time.

        Raises:
            Exception: whatever reading a sample raised (a damaged store, say).
        """
        try:
            self._greet()
            if self._ranks:
                self._pool = self._make_pool()
                self._work(self._pool)
                self._report(self._pool)
        finally:
            if self._pool is not None:
                self._pool.close()
        return self._stopped

    def _greet(self) -> None:
        """Wait for the request of every trainer, which determine what is read."""
        backoff = Backoff()
        while len(self._trainers) < len(self._ranks):
            self._watch()
            if self._listen():
                backoff.reset()
            else:
                backoff.pause()

    def _make_pool(self) -> DecodePool:
        """Return a pool with a slot for each sample that may be asked for at a time."""
        trainers = [t for t in self._trainers.values() if t.parts]
        wanted = [
            [part.box for t in trainers if t.replica == replica for part in t.parts if part.holds(place)]
            for replica in {t.replica for t in trainers}
            for place in range(self._layout.batch_of(replica))
        ]
        credits = {t.replica: -(-t.ahead * self._layout.batch_of(t.replica) // t.every[1]) for t in trainers}
        return DecodePool(
            self._samples,
            workers=self._workers,
            slots=max(self._workers, sum(credits.values())),
            slot_bytes=max((sum(part_bytes(box) for box in boxes) for boxes in wanted), default=0),
            place_bytes=max((part_bytes(hull(boxes)) for boxes in wanted), default=0),
            cache_bytes=self._cache_bytes,
            start=self._start_worker,
        )

    def _work(self, pool: DecodePool) -> None:
        backoff = Backoff()
        while not all(trainer.gone for trainer in self._trainers.values()):
            self._watch()
            happened = [self._listen(), self._begin(pool), pool.collect(), self._send(pool), self._arrive(pool)]
            if any(happened):
                backoff.reset()
            else:
                backoff.pause(pool.wait)
        self._send_blanks()

    def _listen(self) -> bool:
        found = self._comm.poll_object(CONTROL_TAG)
        if found is None:
            return False
        peer, word = found
        if word["kind"] == "hello":
            parts = tuple(Part.from_json(part) for part in word["parts"])
            self._trainers[peer] = _Client(parts, word["replica"], tuple(word["every"]), word["ahead"])
        elif word["kind"] == "request":
            self._trainers[peer].wanted.extend(word["numbers"])
        else:
            self._trainers[peer].gone = True
            self._stopped |= bool(word["stopped"])
        return True

    def _begin(self, pool: DecodePool) -> bool:
        """Have the oldest sample begun that all its readers wait for next; whether there was one."""
        if not pool.has_room:
            return False
        for number in sorted({n for t in self._trainers.values() if (n := t.next_number) is not None}):
            wanted = {rank: boxes for rank, t in self._trainers.items() if (boxes := t.boxes(self._layout, number))}
            if all(self._trainers[rank].next_number == number for rank in wanted):
                epoch, index = self._stream.at(number)
                pool.ask(number, epoch, index, tuple(box for boxes in wanted.values() for box in boxes))
                ends = list(accumulate(len(boxes) for boxes in wanted.values()))
                self._open[number] = {r: slice(e - len(wanted[r]), e) for r, e in zip(wanted, ends, strict=True)}
                for rank in wanted:
                    self._trainers[rank].begun += 1
                return True
        return False

    def _send(self, pool: DecodePool) -> bool:
        """Send prepared samples, in each trainer's order of requests; return whether there were any."""
        happened = False
        for rank, trainer in self._trainers.items():
            while trainer.begun and (ready := pool.parts(trainer.wanted[0])) is not None:
                number = trainer.wanted.popleft()
                trainer.begun -= 1
                mine = ready[self._open[number][rank]]
                messages = [Message(rank, torch.from_numpy(part), PIXELS_TAG) for part in mine]
                self._sending.append((self._comm.exchange(messages, []), rank, number))
                trainer.sent_bytes += sum(part.size for part in mine)
                happened = True
        return happened

    def _arrive(self, pool: DecodePool) -> bool:
        """Set slots free whose parts have all arrived; whether anything arrived."""
        still = []
        for pending, rank, number in self._sending:
            if not pending.test():
                still.append((pending, rank, number))
                continue
            del self._open[number][rank]
            if not self._open[number]:
                del self._open[number]
                pool.release(number)
        arrived = len(still) < len(self._sending)
        self._sending = still
        return arrived

    def _send_blanks(self) -> None:
        """Answer cancelled requests with blanks, because their receives are already posted."""
        sending = [pending for pending, _, _ in self._sending]
        for rank, trainer in self._trainers.items():
            boxes = [box for number in trainer.wanted for box in trainer.boxes(self._layout, number)]
            blanks = [torch.empty((BANDS, *box.shape), dtype=torch.uint8) for box in boxes]
            sending.append(self._comm.exchange([Message(rank, blank, PIXELS_TAG) for blank in blanks], []))
        for pending in sending:
            pending.wait()

    def _report(self, pool: DecodePool) -> None:
        """Send the report to each trainer."""
        sent = {rank: trainer.sent_bytes for rank, trainer in self._trainers.items()}
        report = {**asdict(pool.counts), "sent_bytes": sum(sent.values())}
        for rank in self._ranks:
            self._comm.send_object({**report, "to_you_bytes": sent[rank]}, rank, REPORT_TAG).wait()
