"""The source of a trainer's images, and the feed that reads them in the trainer.

The other one, :class:`data.loading.remote_feed.RemoteFeed`, receives the same pixels from loader ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from data.loading.batches import BatchLayout, Part
from data.loading.decode import BANDS, Lease, Samples, decode, part_bytes
from data.loading.order import SampleStream
from data.loading.sample_cache import SampleCache
from hyfi_core.plan.box import Box

Report = dict[str, int]
"""Report of a loader: ``samples``, ``cached``, ``read_bytes``, ``replaced``, ``sent_bytes``, ``to_you_bytes``."""


class Readable(Protocol):
    """Whole training images, varied or not; ``SlideDataset`` is one."""

    def read(self, index: int, box: Box, epoch: int | None = None) -> npt.NDArray[np.uint8]:
        """Return ``(3, h, w)`` of the training image; ``epoch`` keys the augmentation, None: none."""
        ...


class BatchPixels(Protocol):
    """The images of one batch."""

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return ``(stop − first, 3, h, w)`` uint8 of this box of the samples ``[first, stop)``.

        It is on the trainer's device, and valid until the feed's next ``batch``.
        """
        ...


class Feed(Protocol):
    """Batches for one trainer, turn after turn.

    Attributes:
        wait_s: seconds that the trainer has waited for images so far.
        reports: report of each loader, by rank; complete when the feed is closed, empty without loaders.
    """

    wait_s: float
    reports: dict[int, Report]

    def batch(self, turn: int) -> BatchPixels:
        """Return the images of a turn. Turns must follow one another."""
        ...

    def close(self, stopped: bool) -> None:
        """Release the loaders. ``stopped``: the run ends before its time."""
        ...


@dataclass(frozen=True)
class FeedSpec:
    """Which part of the stream one trainer wants.

    Attributes:
        stream: order of all samples.
        layout: how it is cut into batches.
        replica: this trainer's.
        parts: the boxes that this trainer needs, each of some of the batch's samples; none: no pixels at all.
        turns: the first turn, and the one after the last.
    """

    stream: SampleStream
    layout: BatchLayout
    replica: int
    parts: tuple[Part, ...]
    turns: tuple[int, int]


class InlineFeed:
    """Reads samples in the trainer on demand: the baseline.

    Args:
        samples: the training split.
        spec: the parts that this trainer needs.
        cache_bytes: of decoded images kept in memory for later epochs.
        device: where images go.
    """

    def __init__(
        self, samples: Samples, spec: FeedSpec, cache_bytes: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.wait_s = 0.0
        self.reports: dict[int, Report] = {}
        self._numbers: Sequence[int] = ()
        self._samples, self._spec, self._device = samples, spec, torch.device(device)
        largest = max((part_bytes(part.box) for part in spec.parts), default=0)
        self._cache = SampleCache(0, cache_bytes, largest)
        self._kept = np.empty(cache_bytes, np.uint8)

    def batch(self, turn: int) -> BatchPixels:
        """Return this feed, which reads the turn's samples when it is asked for them."""
        self._numbers = self._spec.layout.numbers(turn, self._spec.replica)
        return self

    def close(self, stopped: bool) -> None:
        """Nothing to release."""

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return ``(stop − first, 3, h, w)`` of this turn's samples, newly allocated."""
        start_s = time.perf_counter()
        numbers = self._numbers[first:stop]
        images = np.empty((len(numbers), BANDS, *box.shape), np.uint8)
        for image, number in zip(images, numbers, strict=True):
            self._decode(number, box, image.reshape(-1))
        result = torch.from_numpy(images).to(self._device)
        self.wait_s += time.perf_counter() - start_s
        return result

    def _decode(self, number: int, box: Box, target: npt.NDArray[np.uint8]) -> None:
        epoch, index = self._spec.stream.at(number)
        source = self._samples.source(index, box, epoch)
        place = self._cache.borrow(index, source)
        if place is None:
            decode(self._samples, Lease(number, epoch, index, (box,), 0, source), target, self._kept)
            return
        decode(self._samples, Lease(number, epoch, index, (box,), 0, source, place.at, place.kept), target, self._kept)
        self._cache.give_back(index, source)
