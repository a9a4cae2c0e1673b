"""What every reader of slides returns: RGB pixels, the levels of a pyramid, and the tiles that cannot be read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hyfi_core.plan.box import Box

RGB = npt.NDArray[np.uint8]
Affine = tuple[tuple[float, float, float], tuple[float, float, float]]
"""Two rows: the point (y, x, 1), measured from the corner of pixel 0, becomes (y, x) of another frame."""

USUAL_TILE_PX = 256


@dataclass(frozen=True, slots=True)
class SourceLevel:
    """One level of a source.

    Attributes:
        height_px: Rows.
        width_px: Columns.
        downsample: Finest pixels that one of its pixels spans, (y, x).
        tile_px: (height, width) of what is decoded and fails as one, where the format says it.
        missing_tiles: Tiles that the scanner left out (byte count 0): background by intent, not damage.
    """

    height_px: int
    width_px: int
    downsample: tuple[float, float]
    tile_px: tuple[int, int] = (USUAL_TILE_PX, USUAL_TILE_PX)
    missing_tiles: int = 0

    @property
    def tiles(self) -> int:
        """How many tiles the level has."""
        return -(-self.height_px // self.tile_px[0]) * -(-self.width_px // self.tile_px[1])


@dataclass(frozen=True, slots=True)
class BadTile:
    """A tile that cannot be decoded: all of its box (pixels of its level), and why."""

    box: Box
    reason: str


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


def moved_by(origin: tuple[float, float]) -> Affine:
    """Return the map that adds ``origin`` (y, x) to a point."""
    return ((1.0, 0.0, float(origin[0])), (0.0, 1.0, float(origin[1])))
