"""Binomial filter: smoothing like a Gaussian, by repeated sums of neighbouring lines.

```
passes   weights
1        1 2 1                each pass adds neighbours twice along each axis, which adds ½ px² of variance:
2        1 4 6 4 1            n passes are close to a Gaussian with σ² = n / 2
3        1 6 15 20 15 6 1
```

Two passes over bytes fit into 16 bits: they are exact, and take a fifteenth of the time of a Gaussian in floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pathology.arrays import Float

Sums = npt.NDArray[np.uint16] | Float

_EXACT_PASSES = 2
"""Sums of bytes grow by 16 with each pass; up to this many passes they fit into 16 bits."""


def binomial_filter(plane: npt.NDArray[Any], rows: slice, sigma_px: float) -> tuple[Sums, int]:
    """Smooth some rows of a plane. Beyond the border its pixels are repeated.

    Args:
        plane: ``(h, w)`` of numbers.
        rows: Rows to compute; rows around them are read as needed.
        sigma_px: Standard deviation; its square is rounded to a multiple of ½. 0 for none.

    Returns:
        A new array ``(rows, w)``, and the number by which it has to be divided.
    """
    passes = passes_for(sigma_px)
    exact = plane.dtype == np.uint8 and passes <= _EXACT_PASSES
    if passes == 0:
        return plane[rows].astype(np.float32), 1
    first, end = rows.start - passes, rows.stop + passes
    # A view, without a copy, if no row lies beyond the border.
    if first >= 0 and end <= len(plane):
        lines = plane[first:end]
    else:
        lines = plane[np.clip(np.arange(first, end), 0, len(plane) - 1)]
    down = _filter_lines(lines.astype(np.uint16 if exact else np.float32), passes)
    # Transposed, so that both axes are filtered by sums of whole lines.
    across = _filter_lines(pad_edges(down, passes, 1).T, passes).T
    # In each pass the weights (1, 2, 1 along each axis) add up to 4 × 4; floats are divided by that at once.
    return across, 16**passes if exact else 1


def passes_for(sigma_px: float) -> int:
    """Return the number of passes that is closest to a Gaussian of this standard deviation."""
    return round(2 * sigma_px**2)


def pad_edges(values: npt.NDArray[Any], width: int, axis: int) -> npt.NDArray[Any]:
    """Return ``(h, w)`` values padded along one axis with ``width`` copies of the first and of the last line."""
    first, last = values.take([0] * width, axis), values.take([-1] * width, axis)
    return np.concatenate((first, values, last), axis)


def _filter_lines(lines: Any, passes: int) -> Any:
    """Return weighted means of neighbouring lines for floats; for integers, means times 4 for each pass."""
    for _ in range(passes):
        once = lines[1:] + lines[:-1]
        lines = once[1:] + once[:-1]
        if lines.dtype != np.uint16:
            # Floats are divided in each pass. This is exact, because 4 is a power of two.
            lines *= np.float32(0.25)
    return lines
