"""Feeds: the source of a trainer's images; and the feed that reads them in the trainer itself.

:class:`data.loading.remote_feed.RemoteFeed` and :class:`data.loading.cell_feed.CellFeed` receive the same pixels from
loader ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from data.loading.batches import BatchLayout
from data.loading.decode import BANDS, Lease, Samples, decode, part_bytes
from data.loading.order import SampleStream
from data.loading.sample_cache import SampleCache
from hyfi_core.plan.box import Box
from hyfi_core.plan.input_part import InputPart

Report = dict[str, int]
"""Report of a loader to a trainer: the fields of `Counts`, ``sent_bytes`` to all, and of these ``to_you_bytes``."""


class Readable(Protocol):
    """Training images, augmented or not; ``SlideDataset`` implements it."""

    def read(self, index: int, box: Box, epoch: int | None = None) -> npt.NDArray[np.uint8]:
        """Return ``(3, h, w)`` uint8 of a box; ``epoch`` is the key of the augmentation (None: none)."""
        ...


class BatchPixels(Protocol):
    """The images of one batch."""

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return ``(stop − first, 3, h, w)`` uint8: a box of the samples ``[first, stop)``.

        The tensor is on the trainer's device, and valid until the feed's next ``batch``.
        """
        ...


class Feed(Protocol):
    """Batches for one trainer, turn after turn.

    Attributes:
        wait_s: Seconds that the trainer has waited for images so far.
    """

    wait_s: float

    @property
    def reports(self) -> dict[int, Report]:
        """Report of each loader, by rank; complete after ``close``, empty without loaders."""
        ...

    def batch(self, turn: int) -> BatchPixels:
        """Return the images of a turn; turns must be consecutive."""
        ...

    def close(self, stopped: bool) -> None:
        """End the feed and release the loaders; ``stopped``: the run was stopped before its end."""
        ...


@dataclass(frozen=True)
class FeedSpec:
    """What one trainer needs of the stream of samples.

    Attributes:
        stream: Order of all samples.
        batches: How the stream is divided into batches.
        replica: The trainer's replica.
        parts: The boxes that the trainer needs of the batch's samples; empty: it needs no pixels.
        turns: The turns ``[first, stop)``.
    """

    stream: SampleStream
    batches: BatchLayout
    replica: int
    parts: tuple[InputPart, ...]
    turns: tuple[int, int]


class InlineFeed:
    """Reads samples in the trainer, when they are needed.

    Args:
        samples: Images of the training split.
        spec: The parts that this trainer needs.
        cache_bytes: Size of the cache that keeps parts as they were before augmentation, for later epochs.
        device: Device of the images.
    """

    def __init__(
        self, samples: Samples, spec: FeedSpec, cache_bytes: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.wait_s = 0.0
        self.reports: dict[int, Report] = {}  # no loaders
        self._turn_numbers: Sequence[int] = ()  # of the samples in this turn's batch
        self._samples, self._spec, self._device = samples, spec, torch.device(device)
        # An entry is what a part is made of: augmentation turns and flips boxes, their area stays.
        largest_part_bytes = max((part_bytes(part.box) for part in spec.parts), default=0)
        self._cache = SampleCache(cache_bytes, largest_part_bytes)
        # Virtual until it is written: the system gives pages at the first write.
        self._cache_memory = np.empty(cache_bytes, np.uint8)

    def batch(self, turn: int) -> BatchPixels:
        """Return this feed, whose ``read`` reads samples of the turn."""
        self._turn_numbers = self._spec.batches.numbers(turn, self._spec.replica)
        return self

    def close(self, stopped: bool) -> None:
        """Nothing to release."""

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return ``(stop − first, 3, h, w)`` uint8: a box of this turn's samples ``[first, stop)``, a new tensor."""
        start_s = time.perf_counter()
        numbers = self._turn_numbers[first:stop]
        images = np.empty((len(numbers), BANDS, *box.shape), np.uint8)
        for image, number in zip(images, numbers, strict=True):
            self._decode(number, box, image.reshape(-1))
        result = torch.from_numpy(images).to(self._device)
        self.wait_s += time.perf_counter() - start_s
        return result

    def _decode(self, number: int, box: Box, target: npt.NDArray[np.uint8]) -> None:
        """Decode a box of a sample into its place in the batch, through the cache of this process."""
        epoch, index = self._spec.stream.at(number)
        source = self._samples.source(index, box, epoch)
        entry = self._cache.acquire(index, source)
        # Offset 0: each image has its own slot, its place in the batch.
        lease = Lease(number, epoch, index, (box,), 0, source)
        if entry is not None:
            lease = replace(lease, cache_offset=entry.offset, cached=entry.valid)
        decode(self._samples, lease, target, self._cache_memory)
        if entry is not None:
            self._cache.release(index, source)
