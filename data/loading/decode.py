"""Preparation of one sample: read, cache, augment, cut into parts. Runs in the trainer or in a child process."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from data.arrays import Pixels
from hyfi_core.plan.box import Box, hull

BANDS = 3


class Samples(Protocol):
    """Images that are read and augmented in two steps; :class:`data.samples.dataset.SlideDataset` implements it.

    ``vary(i, epoch, read_plain(i, source(i, box, epoch)))`` returns the pixels of ``box`` of augmented image ``i``. It
    must be picklable, for child processes.
    """

    def source(self, index: int, box: Box, epoch: int | None) -> Box:
        """Return the box of the original image that augmentation turns into ``box``."""
        ...

    def read_plain(self, index: int, box: Box) -> Pixels:
        """Return ``(3, h, w)`` uint8 of the image without augmentation."""
        ...

    def vary(self, index: int, epoch: int | None, pixels: Pixels) -> Pixels:
        """Return the augmented pixels; ``pixels`` are not changed."""
        ...


@runtime_checkable
class SamplesInto(Samples, Protocol):
    """Images that can be decoded directly into an array, without a copy."""

    def read_plain_into(self, index: int, box: Box, out: Pixels) -> None:
        """Fill ``out``, ``(3, h, w)`` uint8, with what `read_plain` returns."""
        ...


@dataclass(frozen=True)
class Lease:
    """One sample, or a box of it, to prepare, and where its pixels go.

    Attributes:
        name: Identifies the lease in the pool.
        epoch: Key of the augmentation.
        index: Index in the dataset.
        boxes: Parts of the augmented image, written one after the other.
        slot_offset: First byte of its slot.
        source: Box of the original image from which all parts are made.
        cache_offset: First byte of its entry in the cache; None: it is not cached.
        cached: Whether the cache already has its pixels.
        counted: Whether it counts as a sample; if a sample is prepared box by box, one of its leases counts.
    """

    name: Hashable
    epoch: int
    index: int
    boxes: tuple[Box, ...]
    slot_offset: int
    source: Box
    cache_offset: int | None = None
    cached: bool = False
    counted: bool = True


def decode(samples: Samples, lease: Lease, slots: Pixels, cache: Pixels) -> int:
    """Write a sample's parts into its slot, and the original image into its cache entry if it has one.

    One read covers all parts; a single part is decoded directly into its slot. Memory: the original and the augmented
    image, in addition to the slot.

    Args:
        samples: Reads and augments images.
        lease: The sample and where its pixels go.
        slots: Memory of all slots; ``lease.slot_offset`` is an index into it.
        cache: Memory of the cache; ``lease.cache_offset`` is an index into it.

    Returns:
        Bytes of pixels read from ``samples``: 0 if the cache had them.
    """
    original, read_bytes = _original(samples, lease, slots, cache)
    augmented = samples.vary(lease.index, lease.epoch, original)
    # `augmented` is the hull of all parts, because `source` was computed for that box.
    extent = hull(lease.boxes)
    start = lease.slot_offset
    for box in lease.boxes:
        part = _part(slots, start, box)
        rows, columns = box.relative_to(extent).slices()
        # `_original` may have decoded a single part right here; skip copying it onto itself.
        if not _is_same(augmented, part):
            part[...] = augmented[:, rows, columns]
        start += part.size
    return read_bytes


def part_bytes(box: Box) -> int:
    """Return the size in bytes of one part of an image."""
    return BANDS * box.area


def _part(slots: Pixels, start: int, box: Box) -> Pixels:
    """Return ``(3, h, w)``: the memory of a part that begins at byte ``start`` of the slots."""
    return slots[start : start + part_bytes(box)].reshape(BANDS, *box.shape)


def _is_same(pixels: Pixels, part: Pixels) -> bool:
    """Whether two arrays are views of the same memory, with the same shape and strides."""
    # Not `is`: two views are different objects. Compare strides, too: a transposed view starts at the same address.
    place, target = pixels.__array_interface__["data"], part.__array_interface__["data"]
    return place == target and pixels.shape == part.shape and pixels.strides == part.strides


def _original(samples: Samples, lease: Lease, slots: Pixels, cache: Pixels) -> tuple[Pixels, int]:
    """Return (box ``lease.source`` of the original image, bytes read: 0 if the cache had it)."""
    if lease.cache_offset is None:
        # One part whose shape augmentation keeps: read directly into the slot.
        if isinstance(samples, SamplesInto) and [box.shape for box in lease.boxes] == [lease.source.shape]:
            part = _part(slots, lease.slot_offset, lease.boxes[0])
            samples.read_plain_into(lease.index, lease.source, part)
            return part, part.size
        original = samples.read_plain(lease.index, lease.source)
        return original, original.size
    size = part_bytes(lease.source)
    # Read into the cache, not into the slot: later epochs augment the same original differently.
    entry = cache[lease.cache_offset : lease.cache_offset + size].reshape(BANDS, *lease.source.shape)
    if lease.cached:
        return entry, 0
    if isinstance(samples, SamplesInto):
        samples.read_plain_into(lease.index, lease.source, entry)
    else:
        entry[...] = samples.read_plain(lease.index, lease.source)
    return entry, size
