"""The feed of a trainer that has loaders: its parts of the images arrive while it works.

::

    trainer                                       loader
      hello {parts, replica, …}       ─────────►    knows which part of each image to send
      request {numbers}               ─────────►    has them decoded ahead, by child processes
      (buffer posted beforehand)      ◄─────────    uint8 (3, h, w), in the order of the requests
      goodbye {stopped}               ─────────►    answers open requests with blanks, removes the trainer
                                      ◄─────────    report {samples, bytes, …}

A request is a credit: it is sent only when its buffers are posted, so nothing ever waits in a queue without a bound.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from data.loading.backoff import Backoff
from data.loading.batches import Part
from data.loading.decode import BANDS
from data.loading.feed import BatchPixels, FeedSpec, Report
from hyfi_core.comm.base import Communicator, Message, Pending
from hyfi_core.plan.box import Box

CONTROL_TAG, PIXELS_TAG, REPORT_TAG = 101, 102, 103


class RemoteFeed:
    """Receives this trainer's parts of each image from loader ranks, ``prefetch`` turns ahead.

    The replica's sample ``i`` comes from loader ``i % len(loaders)``. Memory: its parts of ``prefetch + 1``
    turns, allocated once (pinned where the device is a GPU), and on a GPU one turn more there.

    Args:
        comm: the world.
        loaders: ranks of the loaders that serve this trainer.
        spec: the parts that this trainer needs.
        prefetch: turns on their way while one is worked on.
        device: where images go.
        watch: called while waiting, for signals; may raise.
    """

    def __init__(
        self,
        comm: Communicator,
        loaders: Sequence[int],
        spec: FeedSpec,
        prefetch: int,
        device: torch.device | str = "cpu",
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.wait_s = 0.0
        self.reports: dict[int, Report] = {}
        self._comm, self._loaders, self._spec, self._watch = comm, tuple(loaders), spec, watch
        self._slots = [_TurnBuffers(spec.parts, torch.device(device)) for _ in range(prefetch + 1)]
        self._open: deque[tuple[int, Pending]] = deque()
        self._told: list[Pending] = []
        self._asked = self._turn = spec.turns[0]
        hello = {
            "kind": "hello",
            "parts": [part.to_json() for part in spec.parts],
            "replica": spec.replica,
            "ahead": len(self._slots),
        }
        of = len(self._loaders)
        self._tell({loader: {**hello, "every": [place, of]} for place, loader in enumerate(self._loaders)})
        self._ask_ahead()

    def batch(self, turn: int) -> BatchPixels:
        """Wait for the images of a turn; those of the turn before are overwritten from now on."""
        if turn != self._turn:
            raise ValueError(f"turns must follow one another: {turn} asked for, {self._turn} is next")
        start_s = time.perf_counter()
        self._slots[(turn - 1) % len(self._slots)].reuse()
        self._ask_ahead()
        self._receive(lambda: bool(self._open) and self._open[0][0] <= turn)
        self._turn = turn + 1
        slot = self._slots[turn % len(self._slots)]
        slot.upload()
        self.wait_s += time.perf_counter() - start_s
        return slot

    def close(self, stopped: bool) -> None:
        """Close the connection to loaders: receive pending messages, and finally their reports."""
        self._tell({loader: {"kind": "goodbye", "stopped": stopped} for loader in self._loaders})
        self._receive(lambda: bool(self._open))
        for pending in self._told:
            pending.wait()
        backoff = Backoff()
        while len(self.reports) < len(self._loaders):
            found = self._comm.poll_object(REPORT_TAG)
            if found is not None:
                self.reports[found[0]] = found[1]
            else:
                self._watch()
                backoff.pause()

    def _ask_ahead(self) -> None:
        """Post buffers and requests for every turn that has a free slot (the slot of the last turn is free)."""
        if not self._spec.parts:
            return
        while self._asked < min(self._turn + len(self._slots), self._spec.turns[1]):
            slot = self._slots[self._asked % len(self._slots)]
            wanted: dict[int, list[int]] = {}
            receives = []
            for place, number in enumerate(self._spec.layout.numbers(self._asked, self._spec.replica)):
                loader = self._loaders[self._spec.layout.ordinal(number) % len(self._loaders)]
                boxes = slot.places(place)
                receives += [Message(loader, box, PIXELS_TAG) for box in boxes]
                if boxes:
                    wanted.setdefault(loader, []).append(number)
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

    def _tell(self, words: dict[int, dict[str, Any]]) -> None:
        self._told = [pending for pending in self._told if not pending.test()]
        self._told += [self._comm.send_object(value, loader, CONTROL_TAG) for loader, value in words.items()]


class _TurnBuffers:
    """One turn's images: a host buffer for each part, and, on a GPU, their copies there."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._parts, self._device, self._cuda = tuple(parts), device, device.type == "cuda"
        shapes = [(part.stop - part.first, BANDS, *part.box.shape) for part in parts]
        self.buffers = [torch.empty(shape, dtype=torch.uint8, pin_memory=self._cuda) for shape in shapes]
        self._images = self.buffers
        self._copied: torch.cuda.Event | None = None

    def places(self, place: int) -> list[torch.Tensor]:
        """Return where the parts of one sample go."""
        pairs = zip(self._parts, self.buffers, strict=True)
        return [buffer[place - part.first] for part, buffer in pairs if part.holds(place)]

    def upload(self) -> None:
        """Start the copies to the device; the GPU's own order sees to it that kernels wait for them."""
        if self._cuda:
            self._images = [buffer.to(self._device, non_blocking=True) for buffer in self.buffers]
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))
        elif self._device.type != "cpu":
            self._images = [buffer.to(self._device) for buffer in self.buffers]

    def reuse(self) -> None:
        """Wait for copies, after which the buffers may be overwritten."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        self._images = self.buffers

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        for part, images in zip(self._parts, self._images, strict=True):
            if part.covers(box, first, stop):
                rows, columns = box.relative_to(part.box).slices()
                return images[first - part.first : stop - part.first, :, rows, columns]
        held = ", ".join(f"{part.box} of samples {part.first} to {part.stop}" for part in self._parts)
        raise ValueError(f"{box} of samples {first} to {stop} was requested, but the loaders send {held or 'nothing'}")
