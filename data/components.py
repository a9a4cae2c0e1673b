"""Connected components of masks, found by their rows' runs: a hundredth of the pixels to look at.

```
row 0   . 0 0 0 . . 1 1 .        a run is a stretch of set pixels in one row
row 1   . . 2 2 2 . . . .        0 and 2 lie over each other: one component
row 2   . . . . . 3 3 . .        2 and 3 touch by their corners: one component where corners count
```

Places are counted in rows one pixel longer than the mask's, so that no run continues in the next row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from hyfi_core.plan.box import Box

Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]

_BAND_PX = 2**18
_PAINTED_PX = 2**18


def label(mask: Mask, corners: bool = False) -> npt.NDArray[np.int32]:
    """Return ``(h, w)``: 0 outside the mask, else the number of the component, from 1, in the order of first pixels.

    Args:
        mask: ``(h, w)``.
        corners: Whether pixels that touch by a corner belong together.
    """
    runs = Runs.of(mask)
    labels = np.zeros(mask.shape, np.int32)
    runs.paint(labels, runs.components(corners) + 1)
    return labels


def without_small(mask: Mask, largest_px: int, corners: bool = False) -> Mask:
    """Return the mask without its components of at most ``largest_px`` pixels.

    Args:
        mask: ``(h, w)``.
        largest_px: Size up to which components go.
        corners: Whether pixels that touch by a corner belong together.
    """
    runs = Runs.of(mask)
    small = runs.sizes(runs.components(corners)) <= largest_px
    result = mask.copy()
    runs.only(small).paint(result, False)
    return result


def fill_small_holes(mask: Mask, largest_px: int) -> None:
    """Set the holes of at most ``largest_px`` pixels; what reaches the border, by corners too, is no hole.

    Args:
        mask: ``(h, w)``, changed in place.
        largest_px: Size up to which holes are filled; their pixels belong together by edges.
    """
    runs = Runs.of(~mask)
    holes = runs.only(runs.sizes(runs.components(corners=False)) <= largest_px)
    components = holes.components(corners=True)
    open_to_border = np.zeros(len(components), bool)
    open_to_border[components[holes.at_border]] = True
    holes.only(~open_to_border[components]).paint(mask, True)


def joined_to(seeds: Mask, mask: Mask) -> Mask:
    """Return the 8-connected components of ``mask`` that contain a pixel of ``seeds``."""
    runs = Runs.of(mask)
    components = runs.components(corners=True)
    held = np.zeros(len(components), bool)
    held[components[runs.holding(Runs.of(seeds))]] = True
    result: Mask = np.zeros_like(mask)
    runs.only(held[components]).paint(result, True)
    return result


@dataclass(frozen=True, slots=True)
class Runs:
    """The set pixels of a mask.

    Attributes:
        shape: (height, width) of the mask.
        starts: ``(n,)`` first place of each run, rising.
        ends: ``(n,)`` the place behind its last.
    """

    shape: tuple[int, int]
    starts: Places
    ends: Places

    @classmethod
    def of(cls, mask: Mask) -> Runs:
        """Find the runs of ``mask`` ``(h, w)``."""
        height, width = mask.shape
        found = [np.empty(0, np.int64)]
        step = max(1, _BAND_PX // max(1, width))
        for top in range(0, height, step):
            band = mask[top : top + step]
            changes = np.empty((len(band), width + 1), bool)
            changes[:, 0], changes[:, -1] = band[:, 0], band[:, -1]
            np.not_equal(band[:, 1:], band[:, :-1], out=changes[:, 1:-1])
            found.append(np.flatnonzero(changes) + top * (width + 1))
        places = np.concatenate(found)
        return cls((height, width), places[0::2], places[1::2])

    @property
    def at_border(self) -> Mask:
        """``(n,)``: runs that touch the mask's border."""
        height, width = self.shape
        row, column = np.divmod(self.starts, width + 1)
        at_end = column + (self.ends - self.starts) == width
        result: Mask = (row == 0) | (row == height - 1) | (column == 0) | at_end
        return result

    def only(self, which: Mask) -> Runs:
        """Return the runs that are chosen by ``which`` ``(n,)``."""
        return Runs(self.shape, self.starts[which], self.ends[which])

    def components(self, corners: bool) -> npt.NDArray[np.int32]:
        """Return ``(n,)`` the component of each run, numbered in the order of first pixels."""
        row = self.shape[1] + 1
        # The runs of the next row over which a run lies follow each other.
        first = np.searchsorted(self.ends, self.starts + row, "left" if corners else "right")
        end = np.searchsorted(self.starts, self.ends + row, "right" if corners else "left")
        count = end - first
        behind = np.concatenate(([0], np.cumsum(count)))
        neighbours = np.arange(behind[-1]) + np.repeat(first - behind[:-1], count)
        touching = csr_array((np.ones(len(neighbours)), neighbours, behind), shape=(len(count), len(count)))
        components: npt.NDArray[np.int32] = connected_components(touching, directed=False)[1]
        return components

    def sizes(self, components: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Return ``(n,)`` the pixels of each run's component."""
        totals: npt.NDArray[np.float64] = np.bincount(components, weights=self.ends - self.starts).astype(np.float64)
        return totals[components]

    def hulls(self, components: npt.NDArray[np.int32]) -> list[Box]:
        """Return the smallest box around each component, in the order of their numbers."""
        count = int(components.max(initial=-1)) + 1
        ends = np.zeros((count, 4), np.int64)
        ends[:, 0], ends[:, 2] = self.shape
        row, column = np.divmod(self.starts, self.shape[1] + 1)
        np.minimum.at(ends[:, 0], components, row)
        np.maximum.at(ends[:, 1], components, row + 1)
        np.minimum.at(ends[:, 2], components, column)
        np.maximum.at(ends[:, 3], components, column + self.ends - self.starts)
        return [Box(*map(int, box)) for box in ends]

    def holding(self, inner: Runs) -> Places:
        """Return the numbers of the runs in which those of ``inner`` lie."""
        return np.searchsorted(self.starts, inner.starts, "right") - 1

    def paint(self, image: npt.NDArray[Any], value: Any) -> None:
        """Set the runs' pixels of ``image``, contiguous and of the runs' shape, to one value or to ``(n,)`` values."""
        flat, values = image.reshape(-1), np.broadcast_to(value, self.starts.shape)
        for run in self._portions():
            starts, lengths = self.starts[run], self.ends[run] - self.starts[run]
            behind = np.cumsum(lengths)
            shift = starts - starts // (self.shape[1] + 1) - (behind - lengths)
            flat[np.arange(behind[-1]) + np.repeat(shift, lengths)] = np.repeat(values[run], lengths)

    def _portions(self) -> Iterator[slice]:
        """Yield runs of some thousand pixels at a time."""
        behind = np.cumsum(self.ends - self.starts)
        start = 0
        while start < len(behind):
            done = behind[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(behind, done + _PAINTED_PX, "right")))
            yield slice(start, stop)
            start = stop
