"""Gaussian smoothing of some rows of a picture, a border that repeats or reflects: plain sums of shifted rows.

The same weights as SciPy's, in float32 and symmetric pairs; with rows that stay in the processor's cache it takes a
third of the time.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float32]

_TRUNCATED = 4.0


def smoothed(
    plane: npt.NDArray[Any], rows: slice, sigma_px: float, border: Literal["edge", "symmetric"] = "edge"
) -> Float:
    """Return rows of a smoothed plane, ``(rows, w)`` float32, new.

    Args:
        plane: ``(h, w)`` of numbers.
        rows: Which rows; of the others as many are looked at as the smoothing sees.
        sigma_px: Standard deviation; 0 for none.
        border: What lies beyond the border: its pixels again and again, or the plane mirrored.
    """
    weights = _weights(sigma_px)
    reach = len(weights) - 1
    if reach == 0:
        return plane[rows].astype(np.float32)
    first, end = rows.start - reach, rows.stop + reach
    if first >= 0 and end <= len(plane):
        lines = plane[first:end]
    else:
        lines = plane[np.pad(np.arange(len(plane)), reach, mode=border)[first + reach : end + reach]]
    down = _weighted(lines.astype(np.float32), weights)
    wide = edged(down, reach, 1) if border == "edge" else np.pad(down, ((0, 0), (reach, reach)), mode=border)
    return _weighted(wide.T, weights).T


def edged(values: Float, reach: int, axis: int) -> Float:
    """Return ``(h, w)`` values with the first and the last line of an axis repeated ``reach`` times."""
    first, last = values.take([0] * reach, axis), values.take([-1] * reach, axis)
    return np.concatenate((first, values, last), axis)


def _weighted(lines: Float, weights: Float) -> Float:
    """Return sums of neighbouring lines; as many fewer as the weights reach on both sides."""
    reach = len(weights) - 1
    middle = len(lines) - 2 * reach
    total = lines[reach : reach + middle] * weights[0]
    pair = np.empty_like(total)
    for k in range(1, reach + 1):
        np.add(lines[reach - k : reach - k + middle], lines[reach + k : reach + k + middle], out=pair)
        pair *= weights[k]
        total += pair
    return total


@cache
def _weights(sigma_px: float) -> Float:
    """Return the weights of a line and of its neighbours on either side."""
    if sigma_px <= 0:
        return np.ones(1, np.float32)
    distance = np.arange(int(_TRUNCATED * sigma_px + 0.5) + 1)
    bell = np.exp(-0.5 * (distance / sigma_px) ** 2)
    result: Float = (bell / (2 * bell.sum() - 1)).astype(np.float32)
    return result
