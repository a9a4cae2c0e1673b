"""Making one sample ready: read, kept, varied, cut. The same lines inline, in a thread and in a child process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hyfi_core.plan.box import Box, hull

BANDS = 3
Pixels = npt.NDArray[np.uint8]


class Samples(Protocol):
    """Images that are read first and augmented afterwards; :class:`data.samples.dataset.SlideDataset` is one.

    ``vary(i, epoch, read_plain(i, source(i, box, epoch)))`` are the pixels of ``box`` of the varied image. Child
    processes get a pickled copy.
    """

    def source(self, index: int, box: Box, epoch: int | None) -> Box:
        """Return the source box that augmentation turns into ``box``."""
        ...

    def read_plain(self, index: int, box: Box) -> Pixels:
        """Return ``(3, h, w)`` of the image without augmentation."""
        ...

    def vary(self, index: int, epoch: int | None, pixels: Pixels) -> Pixels:
        """Return the augmented pixels, a new array; ``pixels`` are not changed."""
        ...


@dataclass(frozen=True)
class Lease:
    """One sample to prepare, and its destination.

    Attributes:
        number: in the stream.
        epoch: key of its variation.
        index: in the dataset.
        boxes: parts of the varied image, written one after the other.
        at: the first byte of its slot.
        source: the source box of all parts.
        kept_at: the first byte of its place in the cache; None: it has none.
        kept: whether the cache has its pixels already.
    """

    number: int
    epoch: int
    index: int
    boxes: tuple[Box, ...]
    at: int
    source: Box
    kept_at: int | None = None
    kept: bool = False


def decode(samples: Samples, lease: Lease, slots: Pixels, cache: Pixels) -> int:
    """Write a lease's parts into its slot, and its image into its place of the cache if it has one.

    One read covers all parts. Memory: the source and the augmented image, in addition to the slot.

    Args:
        samples: where pixels come from.
        lease: the sample and its destination.
        slots: bytes that ``lease.at`` counts in.
        cache: bytes that ``lease.kept_at`` counts in.

    Returns:
        Bytes of pixels taken from ``samples``: 0 where the cache had them.
    """
    plain, read_bytes = _plain(samples, lease, cache)
    varied = samples.vary(lease.index, lease.epoch, plain)
    whole = hull(lease.boxes)
    at = lease.at
    for box in lease.boxes:
        part = slots[at : at + part_bytes(box)].reshape(BANDS, *box.shape)
        rows, columns = box.relative_to(whole).slices()
        part[...] = varied[:, rows, columns]
        at += part.size
    return read_bytes


def part_bytes(box: Box) -> int:
    """Return the bytes of one part."""
    return BANDS * box.area


def _plain(samples: Samples, lease: Lease, cache: Pixels) -> tuple[Pixels, int]:
    """Return the source image, and the number of bytes read."""
    if lease.kept_at is None:
        plain = samples.read_plain(lease.index, lease.source)
        return plain, plain.size
    size = part_bytes(lease.source)
    place = cache[lease.kept_at : lease.kept_at + size].reshape(BANDS, *lease.source.shape)
    if lease.kept:
        return place, 0
    place[...] = samples.read_plain(lease.index, lease.source)
    return place, size
