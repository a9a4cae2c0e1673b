"""The feed of a trainer that computes its images in cells: receives one box after the other, as the cells read them.

::

    loader     c0 c1 c2 c3 c4 …            decoded and sent when requested
    trainer       c0 c1 c2 ╎ c3 c4         at most ``ahead_bytes`` requested and not read yet
                  read     ╎ on their way
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from data.loading.decode import BANDS, part_bytes
from data.loading.feed import BatchPixels, FeedSpec, Report
from data.loading.loader_link import PIXELS_TAG, LoaderLink
from data.loading.part_buffers import PartBuffers, not_sent
from hyfi_core.comm.base import Communicator, Message
from hyfi_core.plan.box import Box
from hyfi_core.plan.input_part import InputPart

_LEAST_AHEAD = 2
"""Least number of boxes requested ahead: one is decoded while another is read."""


class CellFeed:
    """Receives the boxes of each image from loader ranks in the order in which the trainer's cells read them.

    A box that is read out of order, or again, is requested when it is read. The replica's sample ``i`` comes from
    loader ``i % len(loaders)``.

    Args:
        comm: Communicator of all ranks.
        loaders: Ranks of the loaders that serve this trainer.
        spec: What the trainer needs; ``parts`` are the boxes that its cells read, in the order of reading.
        prefetch: Largest number of turns requested ahead.
        ahead_bytes: Most bytes requested and not read yet, at least two boxes; None: only ``prefetch`` limits them.
        device: Device of the images.
        check_signals: Called while waiting, for signals; may raise.
    """

    def __init__(
        self,
        comm: Communicator,
        loaders: Sequence[int],
        spec: FeedSpec,
        prefetch: int,
        ahead_bytes: int | None = None,
        device: torch.device | str = "cpu",
        check_signals: Callable[[], None] = lambda: None,
    ) -> None:
        self.wait_s = 0.0
        self._spec, self._device = spec, torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._parts = tuple(part for part in spec.parts if not part.box.empty)
        self._ahead = self._parts_ahead(prefetch, ahead_bytes)
        # Boxes that are requested and not read yet: (turn, part) -> (number of the request, memory of the pixels).
        self._open: dict[tuple[int, InputPart], tuple[int, PartBuffers]] = {}
        self._read: set[InputPart] = set()  # parts of the current turn that were read
        # The turn before the first: `batch` expects the next one, and requests of the first turn are sent right now.
        self._turn, self._next = spec.turns[0] - 1, (spec.turns[0], 0)  # (turn, index of the part) to request next
        samples = max((part.stop - part.first for part in self._parts), default=0)
        hello = {
            "parts": [],  # each request names its box
            "replica": spec.replica,
            # One more, for a box that is read out of order.
            "ahead": (self._ahead + 1) * samples,
            "box_bytes": max((part_bytes(part.box) for part in self._parts), default=0),
        }
        self._link = LoaderLink(comm, loaders, hello, check_signals)
        self._request_ahead()

    @property
    def reports(self) -> dict[int, Report]:
        """Report of each loader, by rank; complete after ``close``."""
        return self._link.reports

    def batch(self, turn: int) -> BatchPixels:
        """Return this feed, whose ``read`` waits for the boxes of the turn."""
        if turn != self._turn + 1:
            raise ValueError(f"turn {turn} was requested, but turn {self._turn + 1} is next: turns are read in order")
        self._turn = turn
        self._read.clear()
        # Drop boxes that earlier turns requested and did not read; the link keeps their memory until they arrive.
        self._open = {key: opened for key, opened in self._open.items() if key[0] >= turn}
        self._request_ahead()
        return self

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return ``(stop − first, 3, h, w)`` uint8: a box of this turn's samples ``[first, stop)``.

        Raises:
            ValueError: The box of these samples is not one of the trainer's parts.
        """
        start_s, part = time.perf_counter(), InputPart(box, first, stop)
        if part not in self._spec.parts:
            raise ValueError(not_sent(part, self._spec.parts))
        if box.empty:
            return torch.empty((stop - first, BANDS, *box.shape), dtype=torch.uint8, device=self._device)
        # Not requested ahead: it is read again, or out of order.
        if (self._turn, part) not in self._open:
            self._request(self._turn, part)
        # Request the next boxes before waiting: loaders prepare them while this one is on its way.
        number, buffers = self._open.pop((self._turn, part))
        self._read.add(part)
        self._request_ahead()
        self._link.wait(number)
        buffers.upload()
        buffers.use()
        self.wait_s += time.perf_counter() - start_s
        return buffers.read(box, first, stop)

    def close(self, stopped: bool) -> None:
        """End the link: receive all requested boxes, then the loaders' reports; ``stopped``: as for ``Feed.close``."""
        self._link.close(stopped)

    def _parts_ahead(self, prefetch: int, ahead_bytes: int | None) -> int:
        """Return how many boxes may be requested and not read yet."""
        most = prefetch * len(self._parts)
        largest_bytes = max(((part.stop - part.first) * part_bytes(part.box) for part in self._parts), default=0)
        if ahead_bytes is None or not largest_bytes:
            return most
        # As if all boxes were as large as the largest.
        return min(most, max(_LEAST_AHEAD, ahead_bytes // largest_bytes))

    def _request_ahead(self) -> None:
        """Request the boxes of this turn and of later ones, in order, until ``_ahead`` of them are not read yet."""
        while self._parts and len(self._open) < self._ahead and self._next[0] < self._spec.turns[1]:
            turn, index = self._next
            part = self._parts[index]
            self._next = (turn, index + 1) if index + 1 < len(self._parts) else (turn + 1, 0)
            # `read` requests a box itself if it is read before its place in this order: do not request it again.
            is_read = turn == self._turn and part in self._read
            if turn >= self._turn and not is_read and (turn, part) not in self._open:
                self._request(turn, part)

    def _request(self, turn: int, part: InputPart) -> None:
        """Request a box of some samples of a turn, each sample from the loader that serves it."""
        buffers, batches = PartBuffers((part,), self._device, self._stream), self._spec.batches
        numbers_of: dict[int, list[int]] = {}  # loader -> numbers of the samples to request from it
        receives = []
        # `position` is a sample's index in the batch, `number` that in the stream of all replicas' samples.
        numbers = batches.numbers(turn, self._spec.replica)[part.first : part.stop]
        for position, number in enumerate(numbers, part.first):
            loader = self._link.loader_of(batches.index_in_replica(number))
            receives += [Message(loader, buffer, PIXELS_TAG) for buffer in buffers.of_sample(position)]
            numbers_of.setdefault(loader, []).append(number)
        box = part.box.y0, part.box.y1, part.box.x0, part.box.x1
        requests = {loader: {"numbers": numbers, "box": box} for loader, numbers in numbers_of.items()}
        self._open[turn, part] = self._link.request(receives, requests), buffers
