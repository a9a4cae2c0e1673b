"""The feed of a trainer that has loaders: receives its parts of the images while it computes.

:mod:`data.loading.loader_link` describes the messages to the loaders. Images for a GPU are received in pinned memory,
and copied on a stream of their own while earlier turns are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from data.loading.feed import BatchPixels, FeedSpec, Report
from data.loading.loader_link import PIXELS_TAG, LoaderLink
from data.loading.part_buffers import PartBuffers
from hyfi_core.comm.base import Communicator, Message

_UPLOADS_AHEAD = 2
"""Turns whose images are copied to a GPU before they are needed."""


class RemoteFeed:
    """Receives this trainer's parts of each image from loader ranks, ``prefetch`` turns ahead.

    The replica's sample ``i`` comes from loader ``i % len(loaders)``. Memory: the parts of ``prefetch + 1`` turns,
    allocated once (pinned if the device is a GPU), and the parts of up to three turns on the GPU.

    Args:
        comm: Communicator of all ranks.
        loaders: Ranks of the loaders that serve this trainer.
        spec: The parts that this trainer needs.
        prefetch: Number of turns requested ahead of the current one.
        device: Device of the images.
        check_signals: Called while waiting, for signals; may raise.
    """

    def __init__(
        self,
        comm: Communicator,
        loaders: Sequence[int],
        spec: FeedSpec,
        prefetch: int,
        device: torch.device | str = "cpu",
        check_signals: Callable[[], None] = lambda: None,
    ) -> None:
        self.wait_s = 0.0
        self._spec = spec
        device = torch.device(device)
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # One for each turn requested ahead, and one for the turn that the trainer reads.
        self._slots = [PartBuffers(spec.parts, device, stream) for _ in range(prefetch + 1)]
        self._next_request = self._next_turn = spec.turns[0]
        hello = {"parts": [p.to_json() for p in spec.parts], "replica": spec.replica, "ahead": len(self._slots)}
        self._link = LoaderLink(comm, loaders, hello, check_signals)
        self._request_ahead()

    @property
    def reports(self) -> dict[int, Report]:
        """Report of each loader, by rank; complete after ``close``."""
        return self._link.reports

    def batch(self, turn: int) -> BatchPixels:
        """Wait for the images of a turn; those of the previous turn are no longer valid."""
        if turn != self._next_turn:
            raise ValueError(f"turn {turn} was requested, but turn {self._next_turn} is next: turns are read in order")
        start_s = time.perf_counter()
        # The images of the previous turn were valid until this call; now their memory is free.
        self._slots[(turn - 1) % len(self._slots)].reuse()
        self._request_ahead()
        # The link counts requests from 0, one for each turn.
        self._link.wait(turn - self._spec.turns[0])
        self._next_turn = turn + 1
        received = self._spec.turns[0] + self._link.answered()  # the first turn that has not arrived
        # Copy this turn to the GPU, and later turns that have arrived: these copies run while this turn computes.
        stop = max(turn + 1, min(received, turn + 1 + _UPLOADS_AHEAD))
        for ready in range(turn, stop):
            self._slots[ready % len(self._slots)].upload()
        slot = self._slots[turn % len(self._slots)]
        slot.use()
        self.wait_s += time.perf_counter() - start_s
        return slot

    def close(self, stopped: bool) -> None:
        """End the link: receive all requested parts, then the loaders' reports; ``stopped``: as for ``Feed.close``."""
        self._link.close(stopped)

    def _request_ahead(self) -> None:
        """Request turns ahead, as long as there is a free slot for one."""
        if not self._spec.parts:
            return
        while self._next_request < min(self._next_turn + len(self._slots), self._spec.turns[1]):
            slot, batches = self._slots[self._next_request % len(self._slots)], self._spec.batches
            numbers_of: dict[int, list[int]] = {}  # loader -> numbers of the samples to request from it
            receives = []
            # `position` is a sample's index in the batch, `number` that in the stream of all replicas' samples.
            for position, number in enumerate(batches.numbers(self._next_request, self._spec.replica)):
                loader = self._link.loader_of(batches.index_in_replica(number))
                buffers = slot.of_sample(position)
                receives += [Message(loader, buffer, PIXELS_TAG) for buffer in buffers]
                # Skip samples that this trainer needs no part of: the loader would have nothing to send.
                if buffers:
                    numbers_of.setdefault(loader, []).append(number)
            self._link.request(receives, {loader: {"numbers": numbers} for loader, numbers in numbers_of.items()})
            self._next_request += 1
