"""The facts about a slide and its tiles that files of features state."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import numpy as np
from numpy.typing import NDArray

from data.store.slide_store import SlideStore
from data.tiles.tissue_tiles import TissueTiles

_MAGNIFICATION_MPP = 10.0
"""Magnification × microns per pixel of scanners, approximately."""
_WHOLE_SHARE = 0.02
"""A magnification within this fraction of a whole number, such as 19.96, counts as that number."""


@dataclass(frozen=True, eq=False)
class TiledSlide:
    """A slide and its tiles, as files of features state them; y before x.

    Attributes:
        slide_id: The slide.
        encoder: Name of the encoder.
        size_px: Height and width of a tile, as the encoder sees it.
        stride_px: Distance between neighbouring tiles.
        mpp_um: Microns per pixel of tiles.
        source_size_px: Height and width of level 0 of the slide that was ingested.
        source_mpp_um: Microns per pixel (y, x) of level 0.
        tile_source_px: Height and width of a tile in level-0 pixels.
        magnification: The objective's power as the file states it, or by its microns per pixel.
        tile_magnification: The magnification of tiles.
        corners: ``(N, 2)`` float64: (y, x) of each tile's upper left corner in level-0 pixels, not rounded.
    """

    slide_id: str
    encoder: str
    size_px: int
    stride_px: int
    mpp_um: float
    source_size_px: tuple[int, int]
    source_mpp_um: tuple[float, float]
    tile_source_px: tuple[float, float]
    magnification: float
    tile_magnification: float
    corners: NDArray[np.float64]

    def __len__(self) -> int:
        """Return the number of tiles."""
        return len(self.corners)

    @property
    def coords(self) -> NDArray[np.int64]:
        """``(N, 2)`` int64: (y, x) of each tile's upper left corner in whole level-0 pixels."""
        # Rounded only here, each by itself: no error adds up along a row of tiles.
        coords: NDArray[np.int64] = self.corners.round().astype(np.int64)
        return coords

    @classmethod
    def of(cls, slide: SlideStore, tiles: TissueTiles, encoder: str) -> TiledSlide:
        """Return how other tools find a slide's tiles in the scan; without provenance, in level 0 of the store."""
        finest, mpp = slide.levels[0], sum(tiles.plane.mpp) / 2
        source = slide.attributes.get("source") or {}
        # Corners count from the origin of the scan, so the size that contains them ends at (y1, x1).
        bounds = source.get("bounds") or {"y1": finest.height_px, "x1": finest.width_px}
        source_mpp = tuple(float(side) for side in source.get("mpp") or finest.mpp)
        power = source.get("objective_power") or _nearest_standard(_MAGNIFICATION_MPP / (sum(source_mpp) / 2))
        return cls(
            slide_id=slide.slide_id,
            encoder=encoder,
            size_px=tiles.size_px,
            stride_px=tiles.stride_px,
            mpp_um=mpp,
            source_size_px=(int(bounds["y1"]), int(bounds["x1"])),
            source_mpp_um=(source_mpp[0], source_mpp[1]),
            tile_source_px=tiles.source_size_px,
            magnification=_without_fraction(float(power)),
            tile_magnification=_without_fraction(float(power) * (sum(source_mpp) / 2) / mpp),
            corners=tiles.source_corners,
        )


def _nearest_standard(power: float) -> float:
    """Return the nearest of the usual magnifications: 5, 10, 20, 40, 80, …."""
    # Nearest in ratio: 30 is nearer to 40 (1.33) than to 20 (1.5).
    return float(5 * 2.0 ** round(log2(power / 5)))


def _without_fraction(value: float) -> float:
    """Return a magnification as a whole number if it nearly is one."""
    nearest = round(value)
    return float(nearest) if nearest and abs(value / nearest - 1) <= _WHOLE_SHARE else value
