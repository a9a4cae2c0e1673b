"""The feed of a trainer that has loaders: receives its parts of the images while it computes.

::

    trainer                                       loader
      hello {parts, replica, …}       ─────────►    learns which parts of each image to send
      request {numbers}               ─────────►    has the samples decoded by child processes
      (receive posted before)         ◄─────────    uint8 (3, h, w), in the order of the requests
      goodbye {stopped}               ─────────►    answers open requests with blanks, removes the trainer
                                      ◄─────────    report {samples, bytes, …}

A trainer sends a request only after it has posted the receives, so the number of messages in flight is bounded.
Images for a GPU are received in pinned memory, and copied on a stream of their own while earlier turns are computed.
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
_UPLOADS_AHEAD = 2
"""Turns whose images are copied to a GPU before they are needed."""


class RemoteFeed:
    """Receives this trainer's parts of each image from loader ranks, ``prefetch`` turns ahead.

    The replica's sample ``i`` comes from loader ``i % len(loaders)``. Memory: the parts of ``prefetch + 1`` turns,
    allocated once (pinned if the device is a GPU), and those of up to three turns on the GPU.

    Args:
        comm: Communicator of all ranks.
        loaders: Ranks of the loaders that serve this trainer.
        spec: The parts that this trainer needs.
        prefetch: Number of turns requested ahead of the current one.
        device: Device of the images.
        watch: Called while waiting, for signals; may raise.
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
        device = torch.device(device)
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots = [_TurnBuffers(spec.parts, device, stream) for _ in range(prefetch + 1)]
        self._receives: deque[tuple[int, Pending]] = deque()
        self._sends: list[Pending] = []
        self._next_request = self._next_turn = spec.turns[0]
        hello = {
            "kind": "hello",
            "parts": [part.to_json() for part in spec.parts],
            "replica": spec.replica,
            "ahead": len(self._slots),
        }
        stride = len(self._loaders)
        self._send({loader: {**hello, "every": [k, stride]} for k, loader in enumerate(self._loaders)})
        self._request_ahead()

    def batch(self, turn: int) -> BatchPixels:
        """Wait for the images of a turn; those of the previous turn are no longer valid."""
        if turn != self._next_turn:
            raise ValueError(f"turns must follow one another: {turn} asked for, {self._next_turn} is next")
        start_s = time.perf_counter()
        self._slots[(turn - 1) % len(self._slots)].reuse()
        self._request_ahead()
        self._receive(lambda: bool(self._receives) and self._receives[0][0] <= turn)
        self._next_turn = turn + 1
        while self._receives and self._receives[0][1].test():
            self._receives.popleft()
        received = self._receives[0][0] if self._receives else self._next_request
        for ready in range(turn, max(turn + 1, min(received, turn + 1 + _UPLOADS_AHEAD))):
            self._slots[ready % len(self._slots)].upload()
        slot = self._slots[turn % len(self._slots)]
        slot.use()
        self.wait_s += time.perf_counter() - start_s
        return slot

    def close(self, stopped: bool) -> None:
        """Say goodbye to the loaders, receive what was requested, and then their reports."""
        self._send({loader: {"kind": "goodbye", "stopped": stopped} for loader in self._loaders})
        self._receive(lambda: bool(self._receives))
        for pending in self._sends:
            pending.wait()
        backoff = Backoff()
        while len(self.reports) < len(self._loaders):
            found = self._comm.poll_object(REPORT_TAG)
            if found is not None:
                self.reports[found[0]] = found[1]
            else:
                self._watch()
                backoff.pause()

    def _request_ahead(self) -> None:
        """Post receives and send requests for each turn that has a free buffer (that of the previous turn is free)."""
        if not self._spec.parts:
            return
        while self._next_request < min(self._next_turn + len(self._slots), self._spec.turns[1]):
            slot = self._slots[self._next_request % len(self._slots)]
            numbers_of: dict[int, list[int]] = {}
            receives = []
            for position, number in enumerate(self._spec.layout.numbers(self._next_request, self._spec.replica)):
                loader = self._loaders[self._spec.layout.ordinal(number) % len(self._loaders)]
                buffers = slot.of_sample(position)
                receives += [Message(loader, buffer, PIXELS_TAG) for buffer in buffers]
                if buffers:
                    numbers_of.setdefault(loader, []).append(number)
            self._receives.append((self._next_request, self._comm.exchange([], receives)))
            self._send({loader: {"kind": "request", "numbers": numbers} for loader, numbers in numbers_of.items()})
            self._next_request += 1

    def _receive(self, unfinished: Callable[[], bool]) -> None:
        """Wait for turns to arrive, in order, while ``unfinished``."""
        backoff = Backoff(first_s=1e-4, max_s=2e-3)
        while unfinished():
            if self._receives[0][1].test():
                self._receives.popleft()
                backoff.reset()
            else:
                self._watch()
                backoff.pause()

    def _send(self, messages: dict[int, dict[str, Any]]) -> None:
        """Send a control message to each loader (the key)."""
        self._sends = [pending for pending in self._sends if not pending.test()]
        self._sends += [self._comm.send_object(value, loader, CONTROL_TAG) for loader, value in messages.items()]


class _TurnBuffers:
    """The images of one turn: a host buffer for each part and, if the device is a GPU, copies there.

    Args:
        parts: Of each image.
        device: Of the images.
        stream: For copies, if the device is a GPU.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._parts, self._device, self._stream = tuple(parts), device, stream
        shapes = [(part.stop - part.first, BANDS, *part.box.shape) for part in parts]
        self.buffers = [torch.empty(shape, dtype=torch.uint8, pin_memory=stream is not None) for shape in shapes]
        self._images = self.buffers
        self._copied: torch.cuda.Event | None = None

    def of_sample(self, position: int) -> list[torch.Tensor]:
        """Return the buffers for the parts of one sample of the batch."""
        pairs = zip(self._parts, self.buffers, strict=True)
        return [buffer[position - part.first] for part, buffer in pairs if part.has_sample(position)]

    def upload(self) -> None:
        """Start the copies to the device, unless they were started."""
        if self._stream is not None and self._copied is None:
            with torch.cuda.stream(self._stream):
                self._images = [buffer.to(self._device, non_blocking=True) for buffer in self.buffers]
                self._copied = torch.cuda.Event()
                self._copied.record(self._stream)
        elif self._stream is None and self._device.type != "cpu":
            self._images = [buffer.to(self._device) for buffer in self.buffers]

    def use(self) -> None:
        """Let the current stream wait for the copies, and their memory outlive its work."""
        if self._copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._copied)
            for images in self._images:
                images.record_stream(current)

    def reuse(self) -> None:
        """Wait until the copies are done, so that the buffers may be overwritten."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        self._images = self.buffers

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        for part, images in zip(self._parts, self._images, strict=True):
            if part.covers(box, first, stop):
                rows, columns = box.relative_to(part.box).slices()
                return images[first - part.first : stop - part.first, :, rows, columns]
        available = ", ".join(f"{part.box} of samples {part.first} to {part.stop}" for part in self._parts)
        raise ValueError(
            f"{box} of samples {first} to {stop} was requested, but the loaders send {available or 'nothing'}"
        )
