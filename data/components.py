"""Connected components of masks, computed on runs of set pixels: about a hundred times fewer items than pixels.

```
row 0   . 0 0 0 . . 1 1 .        a run is a stretch of set pixels in one row
row 1   . . 2 2 2 . . . .        0 and 2 share an edge: one component
row 2   . . . . . 3 3 . .        2 and 3 touch by a corner: one component if corners connect (8-connectivity)
```

Positions are flat indices into rows that are one pixel longer than the mask's, so that no run continues in the next
row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from data.arrays import Mask
from hyfi_core.plan.box import Box

Places = npt.NDArray[np.int64]

_BAND_PX = 2**18
"""Pixels of a mask that are compared at a time, in whole rows."""
_PAINTED_PX = 2**18
"""Pixels that are painted at a time."""


def label(mask: Mask, corners: bool = False) -> npt.NDArray[np.int32]:
    """Return ``(h, w)``: the number of each pixel's component, from 1 in the order of first pixels; 0 outside the mask.

    Args:
        mask: ``(h, w)``.
        corners: Whether pixels that touch by a corner are connected.
    """
    runs = Runs.from_mask(mask)
    labels = np.zeros(mask.shape, np.int32)
    runs.paint(labels, runs.components(corners) + 1)
    return labels


def without_small(mask: Mask, largest_px: int, corners: bool = False) -> Mask:
    """Return the mask without its components of at most ``largest_px`` pixels.

    Args:
        mask: ``(h, w)``.
        largest_px: Largest component to remove.
        corners: Whether pixels that touch by a corner are connected.
    """
    runs = Runs.from_mask(mask)
    small = runs.sizes(runs.components(corners)) <= largest_px
    # Erase the small ones instead of painting the large ones: they have far fewer pixels.
    result = mask.copy()
    runs.select(small).paint(result, value=False)
    return result


def fill_small_holes(mask: Mask, largest_px: int) -> None:
    """Set holes of at most ``largest_px`` pixels, except those that reach the border of the mask.

    The pixels of a hole are connected by edges. A small hole also reaches the border through small holes that it
    touches by a corner.

    Args:
        mask: ``(h, w)``, changed in place.
        largest_px: Largest hole to fill.
    """
    # Join only small holes by corners: the glass around the tissue would join nearly all of them.
    runs = Runs.from_mask(~mask)
    holes = runs.select(runs.sizes(runs.components(corners=False)) <= largest_px)
    components = holes.components(corners=True)
    open_to_border = np.zeros(len(components), bool)
    # A hole that touches another by a corner reaches the border through it, too.
    open_to_border[components[holes.at_border]] = True
    holes.select(~open_to_border[components]).paint(mask, value=True)


def joined_to(seeds: Mask, mask: Mask) -> Mask:
    """Return the 8-connected components of ``mask`` that contain a pixel of ``seeds``, a subset of ``mask``."""
    runs = Runs.from_mask(mask)
    components = runs.components(corners=True)
    with_seed = np.zeros(len(components), bool)
    with_seed[components[runs.containing(Runs.from_mask(seeds))]] = True
    result: Mask = np.zeros_like(mask)
    runs.select(with_seed[components]).paint(result, value=True)
    return result


@dataclass(frozen=True, slots=True)
class Runs:
    """The set pixels of a mask as runs, in rising order; positions as in the module's docstring.

    Attributes:
        shape: (height, width) of the mask.
        starts: ``(n,)`` position of each run's first pixel.
        ends: ``(n,)`` position after its last pixel.
    """

    shape: tuple[int, int]
    starts: Places
    ends: Places

    @classmethod
    def from_mask(cls, mask: Mask) -> Runs:
        """Find the runs of ``mask`` ``(h, w)``."""
        height, width = mask.shape
        # The empty array is for masks without rows: `concatenate` needs at least one.
        positions = [np.empty(0, np.int64)]
        # In bands, because `changes` is as large as the pixels that it covers.
        step = max(1, _BAND_PX // max(1, width))
        for top in range(0, height, step):
            band = mask[top : top + step]
            # A run starts or ends where a pixel differs from the one to its left; columns -1 and `width` are unset.
            changes = np.empty((len(band), width + 1), bool)
            changes[:, 0], changes[:, -1] = band[:, 0], band[:, -1]
            np.not_equal(band[:, 1:], band[:, :-1], out=changes[:, 1:-1])
            positions.append(np.flatnonzero(changes) + top * (width + 1))
        places = np.concatenate(positions)
        # Column `width` is unset, so each row has an even number of changes: start, end, start, end …
        return cls((height, width), places[0::2], places[1::2])

    @property
    def at_border(self) -> Mask:
        """``(n,)``: whether each run touches the mask's border."""
        height, width = self.shape
        row, column = np.divmod(self.starts, width + 1)
        at_end = column + (self.ends - self.starts) == width
        result: Mask = (row == 0) | (row == height - 1) | (column == 0) | at_end
        return result

    def select(self, chosen: Mask) -> Runs:
        """Return the runs where ``chosen`` ``(n,)`` is set."""
        return Runs(self.shape, self.starts[chosen], self.ends[chosen])

    def components(self, corners: bool) -> npt.NDArray[np.int32]:
        """Return the component of each run ``(n,)``, numbered from 0 in the order of first pixels."""
        from scipy.sparse import csr_array  # here: training reads masks, and needs no components
        from scipy.sparse.csgraph import connected_components

        to_next_row = self.shape[1] + 1  # added to a position, gives that of the pixel below
        # Run i touches consecutive runs of the next row: first[i] … end[i] − 1. Runs that touch by a corner have an end
        # equal to a start, so the sides ("left", "right") of the two searches include or exclude them.
        first = np.searchsorted(self.ends, self.starts + to_next_row, "left" if corners else "right")
        end = np.searchsorted(self.starts, self.ends + to_next_row, "right" if corners else "left")
        count = end - first
        # The graph of touching runs as a sparse matrix: row i has the columns first[i] … end[i] − 1. In CSR form, its
        # columns are at offsets[i] … offsets[i + 1] − 1 of `neighbours`.
        offsets = np.concatenate(([0], np.cumsum(count)))
        neighbours = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], count)
        touching = csr_array((np.ones(len(neighbours)), neighbours, offsets), shape=(len(count), len(count)))
        components: npt.NDArray[np.int32] = connected_components(touching, directed=False)[1]
        return components

    def sizes(self, components: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Return the size in pixels of each run's component ``(n,)``."""
        totals: npt.NDArray[np.float64] = np.bincount(components, weights=self.ends - self.starts).astype(np.float64)
        return totals[components]

    def bounding_boxes(self, components: npt.NDArray[np.int32]) -> list[Box]:
        """Return the smallest box around each component, by component number."""
        count = int(components.max(initial=-1)) + 1
        bounds = np.zeros((count, 4), np.int64)  # y0, y1, x0, x1
        # Initial values of the minima; those of the maxima are 0.
        bounds[:, 0], bounds[:, 2] = self.shape
        # Positions count one more pixel in each row than the mask has, so that no run crosses the end of a row.
        row, column = np.divmod(self.starts, self.shape[1] + 1)
        # `ufunc.at`, because several runs have the same component: an assignment by index would keep only the last.
        np.minimum.at(bounds[:, 0], components, row)
        np.maximum.at(bounds[:, 1], components, row + 1)
        np.minimum.at(bounds[:, 2], components, column)
        np.maximum.at(bounds[:, 3], components, column + self.ends - self.starts)
        return [Box(*map(int, box)) for box in bounds]

    def containing(self, inner: Runs) -> Places:
        """Return, for each run of ``inner``, the index of the run of this mask that contains it; there must be one."""
        # "right": a run that starts where the inner run starts contains it, too.
        return np.searchsorted(self.starts, inner.starts, "right") - 1

    def paint(self, image: npt.NDArray[Any], value: Any) -> None:
        """Set the pixels of the runs in ``image``.

        Args:
            image: A contiguous array of the mask's shape, changed in place.
            value: One value, or ``(n,)``: a value for each run.
        """
        # `reshape` returns a view because the image is contiguous; otherwise this would paint a copy.
        flat, values = image.reshape(-1), np.broadcast_to(value, self.starts.shape)
        for some in self._portions():
            starts, lengths = self.starts[some], self.ends[some] - self.starts[some]
            # Rows of positions are one pixel longer than those of the image: subtract the number of the row.
            first_pixels = starts - starts // (self.shape[1] + 1)
            # Number the pixels of these runs 0, 1, 2 …: a run has the numbers from `ends` − `lengths` to `ends`.
            ends = np.cumsum(lengths)
            shifts = first_pixels - (ends - lengths)
            flat[np.arange(ends[-1]) + np.repeat(shifts, lengths)] = np.repeat(values[some], lengths)

    def _portions(self) -> Iterator[slice]:
        """Yield slices of runs with at most ``_PAINTED_PX`` pixels in total, or one run, to bound `paint`'s memory."""
        pixels_up_to = np.cumsum(self.ends - self.starts)  # of each run and those before it
        start = 0
        while start < len(pixels_up_to):
            painted = pixels_up_to[start - 1] if start else 0
            # At least one run, however long.
            stop = max(start + 1, int(np.searchsorted(pixels_up_to, painted + _PAINTED_PX, "right")))
            yield slice(start, stop)
            start = stop
