"""Exact counts of tissue pixels in blocks of an image, from a mask of another resolution.

The tissue mask is usually coarser than the image. A pixel of the image is tissue if the mask's pixel under its *centre*
is. Both grids start at the slide's corner, so pixel y of the image lies on mask row
⌊(y + ½) · image_mpp / mask_mpp⌋, or on the last row if that is beyond the mask::

    image   |0|1|2|3|4|5|6|7|8|9|      mpp 1.0
    mask    |   0   |   1   |   2 …|   mpp 4.0: pixels 0–3 on row 0, 4–7 on row 1
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from data.arrays import Mask
from hyfi_core.plan.box import Box

LARGEST_DENOMINATOR = 100_000
"""Largest denominator of the ratio of two mpp: products of the fraction with numbers of pixels stay within int64."""


def first_pixels(length_px: int, pixel_mpp: float, mask_length: int, mask_mpp: float) -> NDArray[np.int64]:
    """Return the first image pixel that lies on each mask row (or column), and ``length_px`` at the end.

    Exact: the ratio of the two mpp is the nearest fraction with a denominator up to 100 000, compared in integers. A
    mask row on which no pixel's centre lies has the same first pixel as the next row.

    Args:
        length_px: Height (or width) of the image.
        pixel_mpp: Microns per pixel of the image.
        mask_length: Rows (or columns) of the mask.
        mask_mpp: Microns per pixel of the mask.

    Returns:
        ``(mask_length + 1,)`` int64, in ascending order.
    """
    ratio = (Fraction(pixel_mpp) / Fraction(mask_mpp)).limit_denominator(LARGEST_DENOMINATOR)
    rows = np.arange(mask_length + 1, dtype=np.int64)
    p, q = ratio.numerator, ratio.denominator
    first = -((p - 2 * q * rows) // (2 * p))  # ⌈(row · q/p) − ½⌉: the first y with (y + ½) · p/q ≥ row
    first = np.clip(first, 0, length_px)
    # By rounding, the mask may end before the image does: all pixels beyond it lie on its last row.
    first[-1] = length_px
    return first


@dataclass(frozen=True)
class TissueGrid:
    """A tissue mask aligned with an image.

    Attributes:
        mask: (h, w) bool, not owned.
        rows: (h + 1,) first image row on each mask row, then the image's height; see `first_pixels`.
        columns: (w + 1,) first image column on each mask column, then the image's width.
    """

    mask: NDArray[np.bool_]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]

    @classmethod
    def under(
        cls,
        mask: NDArray[np.bool_],
        mask_mpp: tuple[float, float],
        size_px: tuple[int, int],
        mpp: tuple[float, float],
    ) -> TissueGrid:
        """Align ``mask`` with an image of ``size_px`` (height, width) with ``mpp`` (y, x) micrometres per pixel."""
        ends = [first_pixels(size_px[i], mpp[i], mask.shape[i], mask_mpp[i]) for i in (0, 1)]
        return cls(np.asarray(mask, dtype=bool), ends[0], ends[1])

    @property
    def size_px(self) -> tuple[int, int]:
        """(height, width) of the image."""
        return int(self.rows[-1]), int(self.columns[-1])

    def total_px(self) -> int:
        """Return the number of tissue pixels of the image."""
        height, width = self.size_px
        return int(self.counts(np.array([0, height]), np.array([0, width])).sum())

    def counts(self, y_ends: NDArray[np.int64], x_ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of tissue pixels in each block of a grid, int64 (len(y_ends) − 1, len(x_ends) − 1).

        Memory: 64 mask rows, and (rows of blocks, mask columns), as int64.

        Args:
            y_ends: Image rows where blocks start or end, in ascending order: ``[0, 64, 128]`` for two rows of blocks.
            x_ends: Image columns where blocks start or end.
        """
        strips = np.zeros((len(y_ends) - 1, self.mask.shape[1]), np.int64)
        for i, (y0, y1) in enumerate(pairwise(y_ends.tolist())):
            # Mask rows [first, stop) cover image rows [y0, y1); a mask row counts once for each of its image rows.
            first = max(0, int(np.searchsorted(self.rows, y0, "right")) - 1)
            stop = int(np.searchsorted(self.rows, y1))
            ends = np.clip(self.rows[first : stop + 1], y0, y1)
            if len(ends) > 1:
                strips[i] = self._weighted_rows(np.diff(ends), first)
        return np.diff(self._count_left_of(strips, x_ends), axis=1)

    def is_glass(self, box: Box) -> bool:
        """Whether neither ``box`` (image pixels) nor the mask pixels next to it have tissue."""
        rows = _rows_around(self.rows, box.y0, box.y1)
        columns = _rows_around(self.columns, box.x0, box.x1)
        return not bool(self.mask[rows, columns].any())

    def _weighted_rows(self, weights: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        """Return, for each mask column, Σ weights[i] · mask[first + i]."""
        total = np.zeros(self.mask.shape[1], np.int64)
        for i in range(0, len(weights), 64):
            some = weights[i : i + 64]
            total += some @ self.mask[first + i : first + i + len(some)].astype(np.int64)
        return total

    def _count_left_of(self, strips: NDArray[np.int64], x_ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each row of blocks, the number of tissue pixels left of each image column of ``x_ends``.

        Args:
            strips: (rows of blocks, mask columns): the tissue pixels of a row of blocks in one image column; all image
                columns on a mask column, from ``columns[i]`` to ``columns[i + 1]``, have the same.
            x_ends: Image columns.

        Returns:
            (rows of blocks, len(x_ends)).
        """
        before = np.zeros((len(strips), strips.shape[1] + 1), np.int64)
        np.cumsum(strips * np.diff(self.columns), axis=1, out=before[:, 1:])
        # Whole mask columns before that of the end, plus the image columns left of the end in its mask column.
        column = np.clip(np.searchsorted(self.columns, x_ends, "right") - 1, 0, strips.shape[1] - 1)
        return np.asarray(before[:, column] + strips[:, column] * (x_ends - self.columns[column]), dtype=np.int64)


def halve_mask(mask: Mask) -> Mask:
    """Return the mask at half its size (ceil): set where at least two of the 2 × 2 pixels are set."""
    # An odd last row is repeated: the result is set where at least one of its two pixels is.
    padded = np.pad(mask, ((0, mask.shape[0] % 2), (0, mask.shape[1] % 2)), mode="edge").astype(np.uint8)
    total = padded[0::2, 0::2] + padded[1::2, 0::2] + padded[0::2, 1::2] + padded[1::2, 1::2]
    result: Mask = total >= 2
    return result


def _rows_around(firsts: NDArray[np.int64], start: int, stop: int) -> slice:
    """Return the mask's rows (or columns) under pixels ``[start, stop)``, and at least one more on each side."""
    # If the mask is finer than the image, several mask rows have the same first pixel: include all of them.
    first = min(int(np.searchsorted(firsts, start, "right")) - 1, int(np.searchsorted(firsts, start, "left")))
    end = max(int(np.searchsorted(firsts, stop, "left")), int(np.searchsorted(firsts, stop, "right")) - 1)
    return slice(max(0, first - 1), end + 1)
