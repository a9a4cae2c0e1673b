"""The service of a loader rank: prepares requested samples ahead of time, and sends each trainer only its parts.

The rank itself only communicates. Workers in child processes read, augment and cut (:mod:`data.loading.decode_pool`),
and MPI sends from the shared memory that they write.

A sample is read once, over the smallest box around all parts that this loader's trainers need of it. Its preparation
starts when each of these trainers has requested it and has no older request that is not started. So the oldest sample
in a slot can always be sent, and slots become free however far trainers drift apart. Memory is bounded: a trainer has
at most ``ahead`` turns of open requests.

A trainer that computes in cells requests one box of a sample after the other instead; each is prepared by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch

from data.loading.backoff import Backoff
from data.loading.batches import BatchLayout
from data.loading.decode import BANDS, Samples, part_bytes
from data.loading.decode_pool import Counts, DecodePool
from data.loading.decode_worker import ChildWorker, StartWorker
from data.loading.loader_link import CONTROL_TAG, PIXELS_TAG, REPORT_TAG
from data.loading.order import SampleStream
from data.loading.worker_growth import WorkerGrowth
from hyfi_core.comm.activity import ACTIVITY
from hyfi_core.comm.base import Communicator, Message, Pending
from hyfi_core.plan.box import Box, hull
from hyfi_core.plan.input_part import InputPart


@dataclass(frozen=True)
class _SampleRequest:
    """A trainer's request for one sample, or for a box of it.

    Attributes:
        number: The sample's number.
        name: Name of the prepared pixels: the sample's number, which trainers share, or (trainer, index) of a box.
        box: The box; None: the trainer's parts.
    """

    number: int
    name: Hashable
    box: Box | None = None


@dataclass
class _Client:
    """One trainer, as seen by the loader.

    Attributes:
        parts: What it needs of its replica's batches; empty if it requests boxes.
        replica: Its replica.
        every: (k, n): it requests its replica's samples k, k + n, k + 2n, … from this loader.
        ahead: Most turns, or boxes, of open requests.
        box_bytes: Most bytes of a box that it requests.
        requested: What was requested and is not sent yet, in order.
        started: How many of these, from the first, are being prepared or are ready.
        gone: Whether it has said goodbye.
        sent_bytes: Bytes of pixels sent to it.
    """

    parts: tuple[InputPart, ...]
    replica: int
    every: tuple[int, int]
    ahead: int
    box_bytes: int = 0
    requested: deque[_SampleRequest] = field(default_factory=deque)
    started: int = 0
    gone: bool = False
    sent_bytes: int = 0

    def boxes(self, batches: BatchLayout, number: int) -> list[Box]:
        """Return the boxes of a sample that this loader sends to the trainer; empty if it does not need the sample."""
        offset, stride = self.every
        if batches.replica_of(number) != self.replica or batches.index_in_replica(number) % stride != offset:
            return []
        return [part.box for part in self.parts if part.has_sample(batches.position_of(number))]

    @property
    def next(self) -> _SampleRequest | None:
        """The oldest request whose preparation has not started."""
        return self.requested[self.started] if self.started < len(self.requested) else None


class LoaderService:
    """Serves trainers until all of them have ended.

    Args:
        comm: Communicator of all ranks.
        trainers: Ranks of the trainers to serve.
        samples: Images of the training split.
        stream: Order of all samples, the same as the trainers'.
        batches: How the stream is divided into batches, the same as the trainers'.
        workers: Number of decoding processes to begin with.
        cache_bytes: Size of the cache of original images for later epochs.
        start: Starts a worker.
        check_signals: Called between messages, for signals; may raise.
        at_a_time: Samples that a decoding process prepares at a time.
        growth: Starts more decoding processes while trainers wait, no more than slots can occupy; None: there are as
            many as at the beginning.
    """

    def __init__(
        self,
        comm: Communicator,
        trainers: Sequence[int],
        samples: Samples,
        stream: SampleStream,
        batches: BatchLayout,
        workers: int,
        cache_bytes: int = 0,
        start: StartWorker = ChildWorker,
        check_signals: Callable[[], None] = lambda: None,
        at_a_time: int = 1,
        growth: WorkerGrowth | None = None,
    ) -> None:
        self._at_a_time, self._growth = at_a_time, growth
        self._comm, self._ranks, self._stream, self._batches = comm, tuple(trainers), stream, batches
        self._check_signals = check_signals
        self._samples, self._workers, self._cache_bytes, self._start_worker = samples, workers, cache_bytes, start
        self._trainers: dict[int, _Client] = {}
        # For each sample or box in a slot: its parts by trainer rank, until they have arrived there.
        self._recipients: dict[Hashable, dict[int, slice]] = {}
        self._sending: list[tuple[Pending, int, Hashable]] = []  # message, rank, what is in the slot
        self._boxes = 0  # requested so far
        self._samples_in_boxes: set[int] = set()  # samples with a prepared box, for the count of samples
        self._pool: DecodePool | None = None
        self._stopped = False

    @property
    def counts(self) -> Counts:
        """Statistics of the decoding so far."""
        return self._pool.counts if self._pool is not None else Counts()

    def serve(self) -> bool:
        """Serve; return whether the run was stopped before its end.

        Raises:
            Exception: What reading a sample raised, for example because the store is damaged.
        """
        ACTIVITY.action = "loading images"
        try:
            self._await_hellos()
            if self._ranks:
                self._pool = self._make_pool()
                if self._growth is not None:
                    self._growth.limit(self._pool.most_busy)
                self._serve_requests(self._pool)
                self._report(self._pool)
        finally:
            if self._pool is not None:
                self._pool.close()
        return self._stopped

    def _await_hellos(self) -> None:
        """Wait until every trainer has said hello, and with it which boxes of its samples it needs."""
        backoff = Backoff()
        # `_receive_message` adds a trainer to `_trainers` when its hello arrives.
        while len(self._trainers) < len(self._ranks):
            self._check_signals()
            if self._receive_message():
                backoff.reset()
            else:
                backoff.pause()

    def _make_pool(self) -> DecodePool:
        """Return a pool with a slot for each sample that may be requested at a time."""
        trainers = [t for t in self._trainers.values() if t.parts]
        # Slots have one size, that of the sample of which this loader sends most.
        boxes_of_samples = [
            [part.box for t in trainers if t.replica == replica for part in t.parts if part.has_sample(position)]
            for replica in {t.replica for t in trainers}
            for position in range(self._batches.batch_of(replica))
        ]
        # Rounded up, as a loader has every n-th sample of the replica, and the first may be among them.
        open_requests = {t.replica: -(-t.ahead * self._batches.batch_of(t.replica) // t.every[1]) for t in trainers}
        in_boxes = [t for t in self._trainers.values() if t.box_bytes]
        largest_box = max((t.box_bytes for t in in_boxes), default=0)
        return DecodePool(
            self._samples,
            workers=self._workers,
            # Trainers of one replica request the same samples, which share a slot; boxes are prepared one by one.
            slots=max(self._workers, sum(open_requests.values()) + sum(t.ahead for t in in_boxes)),
            slot_bytes=max((sum(map(part_bytes, boxes)) for boxes in boxes_of_samples), default=largest_box),
            entry_bytes=max((part_bytes(hull(boxes)) for boxes in boxes_of_samples), default=largest_box),
            cache_bytes=self._cache_bytes,
            start=self._start_worker,
            at_a_time=self._at_a_time,
        )

    def _serve_requests(self, pool: DecodePool) -> None:
        """Receive requests, prepare samples and send them until all trainers have said goodbye."""
        backoff = Backoff()
        while not all(trainer.gone for trainer in self._trainers.values()):
            self._check_signals()
            # A list: each step runs in each round. `any` of the calls themselves would end at the first that worked.
            happened = [
                self._receive_message(),
                self._start_next_sample(pool),
                pool.collect(),
                self._add_worker(pool),
                self._send_ready(pool),
                self._free_slots(pool),
            ]
            if any(happened):
                backoff.reset()
            else:
                backoff.pause(pool.wait)
        # Trainers have left, and those that stopped early wait for the receives that they have posted.
        self._send_blanks()

    def _receive_message(self) -> bool:
        """Handle one message of a trainer (hello, request or goodbye); return whether there was one."""
        received = self._comm.poll_object(CONTROL_TAG)
        if received is None:
            return False
        peer, message = received
        if message["kind"] == "hello":
            parts = tuple(InputPart.from_json(part) for part in message["parts"])
            every, box_bytes = tuple(message["every"]), message.get("box_bytes", 0)
            self._trainers[peer] = _Client(parts, message["replica"], every, message["ahead"], box_bytes)
        # Late only if samples queue: a trainer that waits for its network is not helped by one more worker.
        elif message["kind"] == "request":
            if self._growth is not None and self._pool is not None:
                self._growth.turn(peer, late=bool(message["waited"]) and self._pool.is_behind)
            self._trainers[peer].requested.extend(self._requests(peer, message["numbers"], message.get("box")))
        else:
            self._trainers[peer].gone = True
            self._stopped |= bool(message["stopped"])
        return True

    def _requests(self, peer: int, numbers: Sequence[int], box: Sequence[int] | None) -> Iterator[_SampleRequest]:
        """Yield what a trainer requests: its parts of samples, or a box of them."""
        for number in numbers:
            if box is None:
                yield _SampleRequest(number, number)
            else:
                self._boxes += 1
                yield _SampleRequest(number, (peer, self._boxes), Box(*box))

    def _add_worker(self, pool: DecodePool) -> bool:
        """Start one more worker if trainers have waited; return whether it was started."""
        workers = len(pool.workers)
        if self._growth is None or not pool.is_behind or not self._growth.is_due(workers, pool.image_bytes):
            return False
        try:
            pool.add_worker()
        except OSError as error:
            self._growth.refused(workers, error)
            return False
        self._growth.grown(workers + 1)
        return True

    def _start_next_sample(self, pool: DecodePool) -> bool:
        """Start the oldest sample that is next for all trainers that need it; return whether there was one."""
        if not pool.has_free_slot:
            return False
        waiting = {rank: request for rank, t in self._trainers.items() if (request := t.next) is not None}
        # The oldest first, but skip samples that another trainer must request first: it may itself wait for a slot.
        for rank, request in sorted(waiting.items(), key=lambda item: item[1].number):
            boxes_of = self._needed(rank, request)
            # Next for all: it is cut for them at once, and each receives its samples in the order of its requests.
            if all(trainer in waiting and waiting[trainer].name == request.name for trainer in boxes_of):
                self._start(request, boxes_of, pool)
                return True
        return False

    def _needed(self, rank: int, request: _SampleRequest) -> dict[int, list[Box]]:
        """Return trainer rank -> boxes, of all that are prepared together for a request of one of them."""
        if request.box is not None:
            return {rank: [request.box]}
        pairs = ((rank, t.boxes(self._batches, request.number)) for rank, t in self._trainers.items())
        return {rank: boxes for rank, boxes in pairs if boxes}

    def _start(self, request: _SampleRequest, boxes_of: dict[int, list[Box]], pool: DecodePool) -> None:
        """Start preparing what the trainers (rank to boxes) need of a sample."""
        epoch, index = self._stream.at(request.number)
        # The pool counts a sample that is requested in boxes once, with the first of them.
        counted = request.box is None or request.number not in self._samples_in_boxes
        if request.box is not None:
            self._samples_in_boxes.add(request.number)
        # The pool prepares the boxes of all trainers together, in this order: each trainer's are a slice of the result.
        all_boxes = tuple(box for boxes in boxes_of.values() for box in boxes)
        pool.submit(request.name, epoch, index, all_boxes, counted)
        first = 0
        self._recipients[request.name] = {}
        for rank, boxes in boxes_of.items():
            self._recipients[request.name][rank] = slice(first, first + len(boxes))
            # For each trainer that needs the sample, not only for the one whose request was chosen.
            self._trainers[rank].started += 1
            first += len(boxes)

    def _send_ready(self, pool: DecodePool) -> bool:
        """Send prepared samples, in each trainer's order of requests; return whether there were any."""
        happened = False
        for rank, trainer in self._trainers.items():
            while trainer.started and (ready := pool.parts(trainer.requested[0].name)) is not None:
                # In order, even if a later sample is ready first: receives are told apart by their order alone.
                name = trainer.requested.popleft().name
                trainer.started -= 1
                mine = ready[self._recipients[name][rank]]
                messages = [Message(rank, torch.from_numpy(part), PIXELS_TAG) for part in mine]
                # From the slot itself: it must not be released before `test` says that the message has left.
                self._sending.append((self._comm.exchange(messages, []), rank, name))
                trainer.sent_bytes += sum(part.size for part in mine)
                happened = True
        return happened

    def _free_slots(self, pool: DecodePool) -> bool:
        """Free the slots of samples whose parts have all arrived; return whether any part arrived."""
        in_flight = []
        for pending, rank, name in self._sending:
            if not pending.test():
                in_flight.append((pending, rank, name))
                continue
            del self._recipients[name][rank]
            if not self._recipients[name]:
                del self._recipients[name]
                pool.release(name)
        arrived = len(in_flight) < len(self._sending)
        self._sending = in_flight
        return arrived

    def _send_blanks(self) -> None:
        """Send uninitialised pixels for all open requests: their receives are posted, and trainers wait for them."""
        sending = [pending for pending, _, _ in self._sending]
        for rank, trainer in self._trainers.items():
            # Also for samples that workers are preparing now: nobody waits for these workers any more.
            boxes = [box for request in trainer.requested for box in self._needed(rank, request)[rank]]
            # Not filled, because the trainer has said goodbye and looks at no pixel.
            blanks = [torch.empty((BANDS, *box.shape), dtype=torch.uint8) for box in boxes]
            sending.append(self._comm.exchange([Message(rank, blank, PIXELS_TAG) for blank in blanks], []))
        for pending in sending:
            pending.wait()

    def _report(self, pool: DecodePool) -> None:
        """Send each trainer its report."""
        sent = {rank: trainer.sent_bytes for rank, trainer in self._trainers.items()}
        report = {**asdict(pool.counts), "sent_bytes": sum(sent.values())}
        for rank in self._ranks:
            self._comm.send_object({**report, "to_you_bytes": sent[rank]}, rank, REPORT_TAG).wait()
