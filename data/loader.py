"""The service of a loader rank: decodes what trainers ask for, ahead of time, and sends each only its part.

One sample is read once, over the hull of the boxes that the trainers of its replica want, and cut for each of them.
It is forgotten when all of them have it. What is in memory is bounded by what trainers have asked for: their credits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from data.backoff import Backoff
from data.batches import BatchLayout
from data.feed import BANDS, CONTROL_TAG, PIXELS_TAG, Readable
from data.order import SampleStream
from hyfi_core.comm.base import Communicator, Message, Pending
from hyfi_core.plan.box import Box, hull


@dataclass
class _Trainer:
    """One trainer as the loader knows it."""

    box: Box
    replica: int
    wanted: deque[int] = field(default_factory=deque)
    gone: bool = False


@dataclass
class _Image:
    """One sample that is being decoded or waits to be fetched."""

    pixels: Future[npt.NDArray[np.uint8]]
    box: Box
    readers: int


class LoaderService:
    """Serves trainers until all of them have said goodbye.

    Args:
        comm: the world.
        trainers: world ranks that will say hello.
        dataset: the training split.
        stream: order of all samples, the same as the trainers'.
        layout: how it is cut into batches, the same as the trainers'.
        workers: threads that decode.
        watch: called between messages, for signals; may raise.

    Attributes:
        read_samples: samples decoded so far.
    """

    def __init__(
        self,
        comm: Communicator,
        trainers: Sequence[int],
        dataset: Readable,
        stream: SampleStream,
        layout: BatchLayout,
        workers: int,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.read_samples = 0
        self._comm, self._ranks, self._dataset = comm, tuple(trainers), dataset
        self._stream, self._layout, self._workers, self._watch = stream, layout, workers, watch
        self._trainers: dict[int, _Trainer] = {}
        self._images: dict[int, _Image] = {}
        self._sending: list[Pending] = []
        self._stopped = False

    def serve(self) -> bool:
        """Serve; return whether the run was stopped before its time.

        Raises:
            Exception: whatever reading a sample raised (a damaged store, say).
        """
        backoff = Backoff()
        with ThreadPoolExecutor(self._workers, thread_name_prefix="decode") as pool:
            try:
                while not self._finished():
                    self._watch()
                    if self._listen() or self._start(pool) or self._send():
                        backoff.reset()
                    else:
                        backoff.pause()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        return self._stopped

    def _finished(self) -> bool:
        self._sending = [pending for pending in self._sending if not pending.test()]
        everybody = len(self._trainers) == len(self._ranks)
        return everybody and not self._sending and all(t.gone and not t.wanted for t in self._trainers.values())

    def _listen(self) -> bool:
        found = self._comm.poll_object(CONTROL_TAG)
        if found is None:
            return False
        peer, word = found
        if word["kind"] == "hello":
            self._trainers[peer] = _Trainer(Box(*word["box"]), word["replica"])
        elif word["kind"] == "request":
            self._trainers[peer].wanted.extend(word["numbers"])
        else:
            self._trainers[peer].gone = True
            self._stopped |= bool(word["stopped"])
        return True

    def _start(self, pool: ThreadPoolExecutor) -> bool:
        """Hand one sample that is wanted and unknown to the workers; whether there was one."""
        if len(self._trainers) < len(self._ranks):
            return False  # what the sample's hull is, is known only when everybody has said what they want
        for trainer in self._trainers.values():
            for number in trainer.wanted:
                if number not in self._images and not trainer.gone:
                    self._images[number] = self._decode(pool, number)
                    return True
        return False

    def _decode(self, pool: ThreadPoolExecutor, number: int) -> _Image:
        epoch, index = self._stream.at(number)
        replica = self._layout.replica_of(number)
        readers = [t for t in self._trainers.values() if t.replica == replica and not t.box.empty]
        box = hull(t.box for t in readers)
        self.read_samples += 1
        return _Image(pool.submit(self._dataset.read, index, box, epoch), box, len(readers))

    def _send(self) -> bool:
        """Send what is ready, in the order in which each trainer asked; whether anything was."""
        sent = False
        for rank, trainer in self._trainers.items():
            while trainer.wanted:
                part = self._part(trainer, trainer.wanted[0])
                if part is None:
                    break
                trainer.wanted.popleft()
                self._sending.append(self._comm.exchange([Message(rank, part, PIXELS_TAG)], []))
                sent = True
        return sent

    def _part(self, trainer: _Trainer, number: int) -> torch.Tensor | None:
        """Return what ``trainer`` gets of a sample, None while it is not decoded; a blank for one that leaves."""
        if trainer.gone:
            return torch.empty((BANDS, *trainer.box.shape), dtype=torch.uint8)
        image = self._images.get(number)
        if image is None or not image.pixels.done():
            return None
        rows, columns = trainer.box.relative_to(image.box).slices()
        part = torch.from_numpy(np.ascontiguousarray(image.pixels.result()[:, rows, columns]))
        image.readers -= 1
        if image.readers == 0:
            del self._images[number]
        return part


def serve(comm: Communicator, trainers: Sequence[int], dataset: Readable, **how: Any) -> bool:
    """Run a :class:`LoaderService` to its end; return whether the run was stopped before its time."""
    return LoaderService(comm, trainers, dataset, **how).serve()
