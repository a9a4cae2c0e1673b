"""Exact reduction of pixels by a rational factor: each new pixel is the mean of the area that it covers.

::

    step 5/2     |  0  |  1  |  2  |  3  |  4  |      pixels, in units of 1/2
    new          |     0      |     1      |          0 covers 2, 2 and 1 units of pixels 0, 1 and 2

Weights are whole numbers, and their sums stay below 2⁵³, so that float64 computes them without rounding: a new pixel
does not depend on the box that it is computed in.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray


def covered(start: int, stop: int, step: Fraction) -> tuple[int, int]:
    """Return the half-open interval of pixels that new pixels ``[start, stop)`` cover, wholly or in part."""
    p, q = step.numerator, step.denominator
    return start * p // q, -(-stop * p // q)


def reduced(
    pixels: NDArray[np.uint8], corner: tuple[int, int], size_px: tuple[int, int], step: tuple[Fraction, Fraction]
) -> NDArray[np.uint8]:
    """Return new pixels ``(c, *size_px)``, each the mean of its area, halves rounded up.

    Args:
        pixels: ``(c, h, w)``: those that the new ones cover, as `covered` gives them.
        corner: (y, x) of the first new pixel, in new pixels of the whole plane.
        size_px: Height and width of the result.
        step: Pixels (y, x) for each new pixel.
    """
    rows = _sums(pixels.astype(np.float64), corner[0], size_px[0], step[0], axis=1)
    total = _sums(rows, corner[1], size_px[1], step[1], axis=2)
    area = float(step[0].numerator * step[1].numerator)
    # (2 · total + area) // (2 · area) is exact in float64: both are whole numbers below 2⁵³.
    return np.floor_divide(2.0 * total + area, 2.0 * area).astype(np.uint8)


def _sums(values: NDArray[np.float64], start: int, length: int, step: Fraction, axis: int) -> NDArray[np.float64]:
    """Return for each new pixel along an axis the sum of what it covers, times the units covered."""
    p, q = step.numerator, step.denominator
    begin = np.arange(start, start + length, dtype=np.int64) * p
    origin, _ = covered(start, start + length, step)
    first, last = begin // q, -(-(begin + p) // q) - 1
    shape = [1, 1, 1]
    shape[axis] = length
    total = np.zeros([length if k == axis else size for k, size in enumerate(values.shape)])
    for tap in range(int((last - first).max()) + 1):
        pixel = first + tap
        units = np.clip(np.minimum((pixel + 1) * q, begin + p) - np.maximum(pixel * q, begin), 0, q)
        index = np.minimum(pixel - origin, values.shape[axis] - 1)  # beyond the last one: weight 0
        total += np.take(values, index, axis) * units.reshape(shape)
    return total
