"""What every reader of slides returns: RGB pixels, and the levels of a pyramid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RGB = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SourceLevel:
    """One level of a source: its size and how many finest pixels one of its pixels spans, (y, x)."""

    height_px: int
    width_px: int
    downsample: tuple[float, float]


def snapped_levels(sizes: list[tuple[int, int]]) -> tuple[SourceLevel, ...]:
    """Return levels of these (height, width) with their downsample.

    Scanners halve and drop or keep the odd pixel: where both sizes fit a whole factor (rounded down or up) that is
    the factor. Anything else would let registration drift: 13812 / 3453 px is 4, and so is 29382 / 7346.
    """
    levels = []
    for height, width in sizes:
        ratios = (sizes[0][0] / height, sizes[0][1] / width)
        factor = max(1, round(sum(ratios) / 2))
        whole = all(abs(full / factor - part) < 1 for full, part in zip(sizes[0], (height, width), strict=True))
        levels.append(SourceLevel(height, width, (float(factor), float(factor)) if whole else ratios))
    return tuple(levels)
