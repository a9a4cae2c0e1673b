"""Where a trainer's images come from: read here (inline), or pushed by loader ranks; the same pixels either way.

::

    trainer                                    loader
      hello {box, replica}         ─────────►    knows which part of each image to send
      request {numbers}            ─────────►    decodes ahead, in worker threads
      (buffer posted beforehand)   ◄─────────    uint8 (3, h, w), in the order of the requests
      goodbye {stopped}            ─────────►    answers what is open with blanks, forgets the trainer

A request is a credit: it is sent only when its buffers are posted, so nothing ever waits in a queue without a bound.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from data.backoff import Backoff
from data.batches import BatchLayout
from data.order import SampleStream
from hyfi_core.comm.base import Communicator, Message, Pending
from hyfi_core.plan.box import Box

CONTROL_TAG = 101
PIXELS_TAG = 102
BANDS = 3


class Readable(Protocol):
    """What a feed or a loader reads from; ``SlideDataset`` is one."""

    def read(self, index: int, box: Box, epoch: int | None = None) -> npt.NDArray[np.uint8]:
        """Return ``(3, h, w)`` of the training image; ``epoch`` keys the augmentation, None: none."""
        ...


class Pixels(Protocol):
    """The images of one batch."""

    def __call__(self, box: Box) -> torch.Tensor:
        """Return ``(batch, 3, h, w)`` uint8 of this box; valid until the feed's next ``batch``."""
        ...


class Feed(Protocol):
    """Batches for one trainer, turn after turn."""

    wait_s: float

    def batch(self, turn: int) -> Pixels:
        """Return the images of a turn. Turns must follow one another."""
        ...

    def close(self, stopped: bool) -> None:
        """Let go of whoever delivers. ``stopped``: the run ends before its time."""
        ...


@dataclass(frozen=True)
class Share:
    """Which part of the stream one trainer wants.

    Attributes:
        stream: order of all samples.
        layout: how it is cut into batches.
        replica: this trainer's.
        box: the part of each image that this trainer asks for.
        turns: the first turn, and the one after the last.
    """

    stream: SampleStream
    layout: BatchLayout
    replica: int
    box: Box
    turns: tuple[int, int]


class InlineFeed:
    """Reads the dataset where it trains, when asked: the baseline, and the measure for all others.

    Attributes:
        wait_s: seconds spent reading so far.
    """

    def __init__(self, dataset: Readable, share: Share) -> None:
        self._dataset = dataset
        self._share = share
        self.wait_s = 0.0

    def batch(self, turn: int) -> Pixels:
        """Return a reader of the turn's samples; it reads when it is called."""
        numbers = self._share.layout.numbers(turn, self._share.replica)

        def read(box: Box) -> torch.Tensor:
            start_s = time.perf_counter()
            samples = [self._share.stream.at(number) for number in numbers]
            images = [self._dataset.read(index, box, epoch) for epoch, index in samples]
            self.wait_s += time.perf_counter() - start_s
            return torch.from_numpy(np.stack(images))

        return read

    def close(self, stopped: bool) -> None:
        """Nobody to let go of."""


class RemoteFeed:
    """Receives this trainer's part of each image from loader ranks, ``prefetch`` batches ahead.

    Sample ``i`` comes from loader ``i % len(loaders)``. Memory: ``(prefetch + 1) × batch × part``
    bytes, allocated once.

    Args:
        comm: the world.
        loaders: world ranks of the loaders.
        share: what this trainer wants.
        prefetch: batches on their way while one is worked on.
        watch: called while waiting, for signals; may raise.

    Attributes:
        wait_s: seconds spent waiting so far.
    """

    def __init__(
        self,
        comm: Communicator,
        loaders: Sequence[int],
        share: Share,
        prefetch: int,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.wait_s = 0.0
        self._comm, self._loaders, self._share, self._watch = comm, tuple(loaders), share, watch
        shape = (prefetch + 1, share.layout.batch, BANDS, *share.box.shape)
        self._buffers = torch.empty(shape, dtype=torch.uint8)
        self._open: deque[tuple[int, Pending]] = deque()
        self._told: list[Pending] = []
        self._asked = self._turn = share.turns[0]
        box = share.box
        hello = {"kind": "hello", "box": [box.y0, box.y1, box.x0, box.x1], "replica": share.replica}
        self._tell({loader: hello for loader in self._loaders})
        self._ask_ahead()

    def batch(self, turn: int) -> Pixels:
        """Wait for the images of a turn; those of the turn before are overwritten from now on."""
        if turn != self._turn:
            raise ValueError(f"turns must follow one another: {turn} asked for, {self._turn} is next")
        start_s = time.perf_counter()
        self._ask_ahead()
        self._receive(lambda: bool(self._open) and self._open[0][0] <= turn)
        self._turn = turn + 1
        self.wait_s += time.perf_counter() - start_s
        images, held = self._buffers[turn % len(self._buffers)], self._share.box

        def part(box: Box) -> torch.Tensor:
            if not held.contains(box):
                raise ValueError(f"{box} was asked for, the loaders send {held}")
            rows, columns = box.relative_to(held).slices()
            return images[:, :, rows, columns]

        return part

    def close(self, stopped: bool) -> None:
        """Say goodbye to the loaders and take what is still on its way; their last word is taken too."""
        self._tell({loader: {"kind": "goodbye", "stopped": stopped} for loader in self._loaders})
        self._receive(lambda: bool(self._open))
        for pending in self._told:
            pending.wait()

    def _ask_ahead(self) -> None:
        """Post buffers and requests for every turn that has a free slot (the slot of the last turn is free)."""
        if self._share.box.empty:
            return
        while self._asked < min(self._turn + len(self._buffers), self._share.turns[1]):
            slot = self._buffers[self._asked % len(self._buffers)]
            wanted: dict[int, list[int]] = {}
            receives = []
            for place, number in enumerate(self._share.layout.numbers(self._asked, self._share.replica)):
                loader = self._loaders[number % len(self._loaders)]
                wanted.setdefault(loader, []).append(number)
                receives.append(Message(loader, slot[place], PIXELS_TAG))
            self._open.append((self._asked, self._comm.exchange([], receives)))
            self._tell({loader: {"kind": "request", "numbers": numbers} for loader, numbers in wanted.items()})
            self._asked += 1

    def _receive(self, until_not: Callable[[], bool]) -> None:
        backoff = Backoff(first_s=1e-4, most_s=2e-3)
        while until_not():
            if self._open[0][1].test():
                self._open.popleft()
                backoff.reset()
            else:
                self._watch()
                backoff.pause()

    def _tell(self, words: dict[int, dict[str, object]]) -> None:
        self._told = [pending for pending in self._told if not pending.test()]
        self._told += [self._comm.send_object(value, loader, CONTROL_TAG) for loader, value in words.items()]
