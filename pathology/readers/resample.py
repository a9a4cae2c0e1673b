"""Area resampling: each target pixel is the mean of the source area that it covers.

```
source pixels   |  0  |  1  |  2  |  3  |  4  |        target pixel i covers [i·r, (i+1)·r) of the source,
target pixels   |    0     |    1     |    2  …        a source pixel is weighted by the fraction that is covered
```

Positions are computed from the pixel's index, not from a running sum, so rounding does not accumulate over a slide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pathology.arrays import Planes

_ROUNDING = 0.5 + 1e-4
"""Added before truncation: rounds half up; the excess makes up for float sums slightly below an exact half."""

_STRIP_PX = 16
"""Target rows computed at a time, so that their source rows stay in the processor's cache."""
_HALVED_STRIP_PX = 32
"""Source rows halved at a time, so that they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Taps:
    """Weights of a one-dimensional resampling: ``target[i] = Σ_k weight[k, i] · source[first + index[k, i]]``.

    Attributes:
        first: First source pixel that is read.
        end: End of the source pixels that are read.
        index: ``(k, n)``: source pixels of each target pixel, relative to ``first``.
        weight: ``(k, n)``: their weights, which sum to 1 for each target pixel.
        whole: If every target pixel is the mean of the same number of whole source pixels, this number; otherwise 0.
    """

    first: int
    end: int
    index: npt.NDArray[np.intp]
    weight: npt.NDArray[np.float32]
    whole: int


def make_taps(start: int, stop: int, ratio: float, source_px: int) -> Taps:
    """Return the taps of target pixels ``[start, stop)``: which source pixels each one is the mean of, with weights.

    Args:
        start: First target pixel.
        stop: End of the target pixels.
        ratio: Source pixels for each target pixel.
        source_px: Number of source pixels. A target pixel that extends over their end is the mean of those that exist;
            one that lies beyond it equals the last source pixel.
    """
    edges = np.minimum(np.arange(start, stop + 1, dtype=np.float64) * ratio, source_px)
    # index · ratio may differ from a whole number by rounding: 49 · (1 / 49) must be exactly 1, the edge of a pixel.
    nearest = np.rint(edges)
    edges = np.where(np.abs(edges - nearest) < 1e-6, nearest, edges)
    # Target pixel i covers [starts[i], ends[i]) of the source; the first source pixel in that is low[i].
    starts, ends = edges[:-1], edges[1:]
    low = np.minimum(np.floor(starts), source_px - 1).astype(np.intp)
    # All target pixels have as many taps as the widest needs; some taps of the others cover nothing.
    count = max(1, int(np.max(np.ceil(ends) - low)))
    pixels = low + np.arange(count)[:, None]
    index = np.minimum(pixels, source_px - 1)
    covered = np.clip(np.minimum(ends, pixels + 1) - np.maximum(starts, pixels), 0, None)
    # A target pixel beyond the source covers nothing, and repeats the last pixel.
    covered[0, covered.sum(0) == 0] = 1
    first, end = int(index.min()), int(index.max()) + 1
    # The second condition is false if the last target pixel is beyond the source and repeats its last pixel.
    whole_pixels = count if bool(np.all(covered == 1)) and end - first == count * (stop - start) else 0
    return Taps(first, end, index - first, (covered / covered.sum(0)).astype(np.float32), whole_pixels)


def resample(source: Planes, rows: Taps, columns: Taps) -> Planes:
    """Resample an image along both axes.

    Args:
        source: ``(c, y, x)`` uint8: source pixels ``[first, end)`` of both taps.
        rows: Taps of the target rows.
        columns: Taps of the target columns.

    Returns:
        ``(c, h, w)`` uint8, new unless nothing is resampled.
    """
    if rows.whole == columns.whole == 1:
        return np.ascontiguousarray(source)
    if rows.whole == columns.whole == 2:
        return mean_of_2x2(source)
    if rows.whole and columns.whole:
        return _mean_of_whole(source, rows.whole, columns.whole)
    out: Planes = np.empty((source.shape[0], rows.index.shape[1], columns.index.shape[1]), np.uint8)
    for start in range(0, out.shape[1], _STRIP_PX):
        strip = slice(start, start + _STRIP_PX)
        out[:, strip] = _strip(source, rows.index[:, strip], rows.weight[:, strip], columns)
    return out


def _strip(
    source: Planes, index: npt.NDArray[np.intp], weight: npt.NDArray[np.float32], columns: Taps
) -> npt.NDArray[np.float32]:
    """Return target rows as floats; truncating these rounds halves up.

    Args:
        source: ``(c, y, x)`` source pixels.
        index: Source rows of the target rows, as ``Taps.index``.
        weight: Weights of the source rows, as ``Taps.weight``.
        columns: Taps of the target columns.
    """
    # Rows first, because they are contiguous, and leave less work for the columns.
    tall: npt.NDArray[np.float32] = source[:, index[0]] * weight[0][:, None]
    for k in range(1, len(index)):
        tall += source[:, index[k]] * weight[k][:, None]
    wide: npt.NDArray[np.float32] = np.take(tall, columns.index[0], axis=2) * columns.weight[0]
    for k in range(1, len(columns.index)):
        wide += np.take(tall, columns.index[k], axis=2) * columns.weight[k]
    wide += np.float32(_ROUNDING)
    return wide


def halve(block: Planes) -> Planes:
    """Return ``(c, ceil(h / 2), ceil(w / 2))``: means of 2 × 2 pixels; a last odd row or column is repeated."""
    _, height, width = block.shape
    if height % 2 or width % 2:
        block = np.pad(block, ((0, 0), (0, height % 2), (0, width % 2)), mode="edge")
    return mean_of_2x2(block)


def mean_of_2x2(block: Planes) -> Planes:
    """Return ``(c, h / 2, w / 2)`` uint8: means of 2 × 2 pixels, half rounded up.

    ```
    a row      a b c d e f …        read as 16-bit numbers: ab cd ef …
    low byte   a   c   e            ab & 255 = a        (byte order does not matter: both bytes are added)
    high byte    b   d   f          ab >> 8  = b
    sum       a+b c+d e+f           plus the same sums of the row below, + 2, >> 2
    ```

    All operations run over contiguous memory, so that the processor can use vector instructions.

    Args:
        block: ``(c, h, w)`` uint8 of any strides, h and w even.
    """
    channels, height, width = block.shape
    out: Planes = np.empty((channels, height // 2, width // 2), np.uint8)
    for plane, target in zip(block, out, strict=True):
        for y in range(0, height, _HALVED_STRIP_PX):
            # Contiguous, for the view of two bytes as one number.
            pairs = np.ascontiguousarray(plane[y : y + _HALVED_STRIP_PX]).view(np.uint16)
            across = pairs & np.uint16(0xFF)
            across += pairs >> np.uint16(8)
            total = across[0::2] + across[1::2]
            # Add half of four: shifting then rounds halves up.
            total += np.uint16(2)
            total >>= np.uint16(2)
            target[y // 2 : (y + _HALVED_STRIP_PX) // 2] = total
    return out


def _mean_of_whole(source: Planes, rows: int, columns: int) -> Planes:
    """Return means of ``rows × columns`` pixels, half rounded up; a fast path of `resample` with the same result."""
    # 256 pixels of 255 fill 16 bits, with room for half of the area.
    dtype: type[np.uint16 | np.uint32] = np.uint16 if rows * columns <= 256 else np.uint32
    tall: npt.NDArray[Any] = source[:, 0::rows].astype(dtype)
    for k in range(1, rows):
        tall += source[:, k::rows]
    total = tall[:, :, 0::columns].copy()
    for k in range(1, columns):
        total += tall[:, :, k::columns]
    area = rows * columns
    total += dtype(area // 2)
    # If it is a power of two, shift instead of dividing.
    if area & (area - 1) == 0:
        total >>= dtype(area.bit_length() - 1)
    else:
        total //= dtype(area)
    return total.astype(np.uint8)


def target_size(source_px: int, ratio: float) -> int:
    """Return the number of target pixels for ``source_px`` source pixels, rounded; at least one."""
    return max(1, math.floor(source_px / ratio + 0.5))
