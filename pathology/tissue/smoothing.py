"""Smoothing of some rows of a picture by a binomial bell: sums of neighbouring lines, again and again.

```
pairs 1     1 2 1              each pair is two sums of neighbours, of lines first and of columns then; its variance
pairs 2     1 4 6 4 1          is half a pixel squared, and variances add: the bell is as wide as a Gaussian of the
pairs 3     1 6 15 20 15 6 1   nearest variance, and nearly of its shape
```

A picture of bytes summed twice over fits 16 bits: nothing is rounded, and a pixel takes a fifteenth of the time of a
Gaussian in floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float32]
Sums = npt.NDArray[np.uint16] | Float

_EXACT_PAIRS = 2
"""Up to here the sums of bytes, sixteen-fold for each pair, fit 16 bits."""


def smoothed(plane: npt.NDArray[Any], rows: slice, sigma_px: float) -> tuple[Sums, int]:
    """Return rows of a smoothed plane, ``(rows, w)``, new, and what they are to be divided by.

    Beyond the border lies the border's pixel again and again.

    Args:
        plane: ``(h, w)`` of numbers.
        rows: Which rows; of the others as many are looked at as the smoothing sees.
        sigma_px: Standard deviation; its square is rounded to halves. 0 for none.
    """
    pairs = pairs_of(sigma_px)
    exact = plane.dtype == np.uint8 and pairs <= _EXACT_PAIRS
    if pairs == 0:
        return plane[rows].astype(np.float32), 1
    first, end = rows.start - pairs, rows.stop + pairs
    if first >= 0 and end <= len(plane):
        lines = plane[first:end]
    else:
        lines = plane[np.clip(np.arange(first, end), 0, len(plane) - 1)]
    down = _summed(lines.astype(np.uint16 if exact else np.float32), pairs)
    across = _summed(edged(down, pairs, 1).T, pairs).T
    return across, 16**pairs if exact else 1


def pairs_of(sigma_px: float) -> int:
    """Return the pairs of sums whose bell is about as wide as a Gaussian of this standard deviation."""
    return round(2 * sigma_px**2)


def edged(values: npt.NDArray[Any], reach: int, axis: int) -> npt.NDArray[Any]:
    """Return ``(h, w)`` values with the first and the last line of an axis repeated ``reach`` times."""
    first, last = values.take([0] * reach, axis), values.take([-1] * reach, axis)
    return np.concatenate((first, values, last), axis)


def _summed(lines: Any, pairs: int) -> Any:
    """Return sums of neighbouring lines; of floats means, which do not grow."""
    for _ in range(pairs):
        once = lines[1:] + lines[:-1]
        lines = once[1:] + once[:-1]
        if lines.dtype != np.uint16:
            lines *= np.float32(0.25)
    return lines
