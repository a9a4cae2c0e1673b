"""Exact reduction of pixels by a rational factor: each new pixel is the mean of the area that it covers.

::

    step 5/2     |  0  |  1  |  2  |  3  |  4  |      pixels, in units of 1/2
    new          |     0      |     1      |          0 covers 2, 2 and 1 units of pixels 0, 1 and 2

Weights are whole numbers, and so are all sums, which float64 (float32 where they are small) adds without rounding: a
new pixel does not depend on the box that it is computed in.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WHITE = 255


def covered(start: int, stop: int, step: Fraction) -> tuple[int, int]:
    """Return the half-open interval of pixels that new pixels ``[start, stop)`` cover, wholly or in part."""
    p, q = step.numerator, step.denominator
    return start * p // q, -(-stop * p // q)


def reduced(
    pixels: NDArray[np.uint8], corner: tuple[int, int], size_px: tuple[int, int], step: tuple[Fraction, Fraction]
) -> NDArray[np.uint8]:
    """Return new pixels ``(c, *size_px)``, each the mean of its area, halves rounded up.

    Args:
        pixels: ``(c, h, w)``: the pixels that the result covers, see `covered`.
        corner: (y, x) of the first new pixel, in new pixels of the whole plane.
        size_px: Height and width of the result.
        step: Pixels (y, x) for each new pixel.
    """
    # In units of 1 / q of a pixel, a new pixel is as long as the numerator p of its step p / q, in each axis.
    height, width = step[0].numerator, step[1].numerator
    area = height * width
    # `_sums` adds along the first axis: y is the first axis of the first call, x that of the second. Its last argument
    # bounds the sums.
    rows = _sums(pixels.transpose(1, 0, 2), corner[0], size_px[0], step[0], _WHITE * height)
    total = _sums(rows.transpose(2, 1, 0), corner[1], size_px[1], step[1], _WHITE * area)
    total += area // 2  # rounds halves up; an odd area has no halves
    result = np.empty((pixels.shape[0], *size_px), np.uint8)
    # In place: a new array would double the memory.
    np.floor_divide(total, area, out=total)
    result[...] = total.transpose(1, 2, 0)
    return result


def _sums(
    values: NDArray[Any], start: int, length: int, step: Fraction, largest: int
) -> NDArray[np.float32] | NDArray[np.float64]:
    """Return weighted sums along the first axis: for each new pixel, of pixels times their covered units of 1 / q.

    Args:
        values: Pixels along the first axis.
        start: Index of the first new pixel.
        length: Number of new pixels.
        step: p / q, pixels for each new pixel.
        largest: Bound of the sums. float32 has all whole numbers up to 2²⁴; half of it leaves room for rounding up.
    """
    values = np.ascontiguousarray(values)
    p, q = step.numerator, step.denominator
    begin = np.arange(start, start + length, dtype=np.int64) * p
    origin, _ = covered(start, start + length, step)
    first, last = begin // q, -(-(begin + p) // q) - 1
    dtype = np.float32 if largest < 2**23 else np.float64
    total = np.zeros((length, *values.shape[1:]), dtype)
    part = np.empty_like(total)
    for tap in range(int((last - first).max()) + 1):
        pixel = first + tap
        # The overlap of pixel [pixel · q, (pixel + 1) · q) with the new one [begin, begin + p), in units of 1 / q.
        units = np.clip(np.minimum((pixel + 1) * q, begin + p) - np.maximum(pixel * q, begin), 0, q)
        index = np.minimum(pixel - origin, len(values) - 1)  # beyond the last pixel, units are 0
        np.multiply(values[index], units.astype(dtype)[:, None, None], out=part)
        total += part
    return total
