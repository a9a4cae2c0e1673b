"""A sample that is decoded into its slot has the bytes of one that is copied there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from data.arrays import Pixels
from data.loading.decode import Lease, SamplesInto, decode, part_bytes
from hyfi_core.plan.box import Box

SIDE = 16
_IMAGE = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE), np.uint8)


class Copied:
    """One image; each read is an array of its own."""

    def __init__(self, change: Callable[[Pixels], Pixels]) -> None:
        self._change = change

    def source(self, index: int, box: Box, epoch: int | None) -> Box:
        return box

    def read_plain(self, index: int, box: Box) -> Pixels:
        return _IMAGE[(slice(None), *box.slices())].copy()

    def vary(self, index: int, epoch: int | None, pixels: Pixels) -> Pixels:
        return self._change(pixels)


class InPlace(Copied):
    """The same image, read to where it is needed."""

    reads = 0

    def read_plain_into(self, index: int, box: Box, out: Pixels) -> None:
        out[...] = _IMAGE[(slice(None), *box.slices())]
        self.reads += 1


CHANGES: dict[str, Callable[[Pixels], Pixels]] = {
    "as it is": lambda pixels: pixels,
    "flipped view": lambda pixels: pixels[:, ::-1, ::-1],
    "turned view": lambda pixels: np.rot90(pixels, axes=(1, 2)),
    "new array": lambda pixels: 255 - pixels,
}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("boxes", [(Box.of_size(SIDE, SIDE),), (Box(0, 9, 0, SIDE), Box(7, SIDE, 0, SIDE))])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_both_ways_give_the_same_bytes(
    change: Callable[[Pixels], Pixels], boxes: tuple[Box, ...], cached: bool
) -> None:
    whole = Box.of_size(SIDE, SIDE)
    results = []
    for samples in (Copied(change), InPlace(change)):
        slots, cache = np.zeros(3 + 2 * part_bytes(whole), np.uint8), np.zeros(part_bytes(whole) + 1, np.uint8)
        lease = Lease("a", 0, 0, boxes, 3, whole, 1 if cached else None)
        assert decode(samples, lease, slots, cache) == part_bytes(whole)
        results.append((slots.tobytes(), cache.tobytes()))
    assert results[0] == results[1]
    assert isinstance(samples, SamplesInto) and not isinstance(Copied(change), SamplesInto)
    assert samples.reads == (1 if cached or len(boxes) == 1 else 0)
