"""Division of slides into tiles: size, distance and resolution of tiles, and the share of tissue that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from data.samples.dataset import MPP_TOLERANCE
from data.store.slide_store import StoreLevel
from data.store.tissue_grid import LARGEST_DENOMINATOR
from hyfi_core.errors import RequestError


@dataclass(frozen=True)
class Tiling:
    """The tiles to take from slides.

    Attributes:
        size_px: Height and width of a tile.
        stride_px: Distance between neighbouring tiles; None: the size, so that they neither overlap nor leave gaps.
        mpp: Microns per pixel of tiles; None: that of the slide's finest level.
        min_tissue: Share of a tile's area that must be tissue in the store's label; 0: all tiles, even of glass.
    """

    size_px: int = 224
    stride_px: int | None = None
    mpp: float | None = None
    min_tissue: float = 0.25

    def __post_init__(self) -> None:
        if self.size_px < 1:
            raise RequestError(f"tiles of {self.size_px} px; use a size of 1 or more")
        if self.step_px < 1:
            raise RequestError(f"tiles at a stride of {self.step_px} px; use 1 or more")
        if self.mpp is not None and not 0 < self.mpp < float("inf"):
            raise RequestError(f"tiles of {self.mpp} µm/px; use a number above 0")
        if not 0 <= self.min_tissue <= 1:
            raise RequestError(f"tiles with a share of tissue of {self.min_tissue}; use a number from 0 to 1")

    @property
    def step_px(self) -> int:
        """Distance between neighbouring tiles."""
        return self.size_px if self.stride_px is None else self.stride_px


@dataclass(frozen=True)
class TilePlane:
    """The slide at the resolution of the tiles: a level of its pyramid, or one reduced by an exact factor.

    ::

        level    |0|1|2|3|4|5|6|7|8|9|      0.5 µm/px
        plane    |  0 |  1 |  2 |  3 |      1.25 µm/px: step 5/2; its pixel 0 is the mean of 0, 1 and half of 2

    Both start at the slide's corner.

    Attributes:
        level: Index of the level that is read.
        step: Pixels (y, x) of the level for each pixel of the plane, at least 1; below 1 only where stored features are
            finer than the store: their pixels are not read.
        mpp: Microns per pixel (y, x).
        size_px: Height and width; the last row and column may reach beyond the slide.
    """

    level: int
    step: tuple[Fraction, Fraction]
    mpp: tuple[float, float]
    size_px: tuple[int, int]

    @property
    def is_level(self) -> bool:
        """Whether it is a level of the pyramid."""
        return self.step == (Fraction(1), Fraction(1))


def plane_of(levels: Sequence[StoreLevel], mpp_um: float | None, slide_id: str) -> TilePlane:
    """Return the plane of a slide with the resolution of the tiles.

    It is a level within 2 % of ``mpp_um``, or else a reduction of the coarsest level that is finer.

    Args:
        levels: The slide's pyramid, finest first.
        mpp_um: Microns per pixel of the tiles; None: the finest level.
        slide_id: For messages.

    Raises:
        RequestError: The finest level is coarser by more than 2 %.
    """
    if mpp_um is None:
        return _level(levels, 0)
    off = [max(abs(side / mpp_um - 1) for side in level.mpp) for level in levels]
    best = min(range(len(levels)), key=off.__getitem__)
    if off[best] <= MPP_TOLERANCE:
        return _level(levels, best)
    finer = [k for k, level in enumerate(levels) if max(level.mpp) <= mpp_um]
    if not finer:
        finest = max(levels[0].mpp)
        raise RequestError(
            f"tiles of {mpp_um:g} µm/px: slide {slide_id} has {finest:g} µm/px at its finest level; use {finest:g} or "
            f"more, or ingest with `hyfi ingest --mpp {mpp_um:g}`"
        )
    # The coarsest level that is finer: it has the fewest pixels to read, and none are interpolated.
    read = max(finer, key=lambda k: max(levels[k].mpp))
    level = levels[read]
    # Fractions: positions are computed in whole numbers, with the same result in every box and on every machine.
    y, x = (Fraction(mpp_um / side).limit_denominator(LARGEST_DENOMINATOR) for side in level.mpp)
    size = (-(-level.height_px * y.denominator // y.numerator), -(-level.width_px * x.denominator // x.numerator))
    return TilePlane(read, (y, x), (mpp_um, mpp_um), size)


def _level(levels: Sequence[StoreLevel], index: int) -> TilePlane:
    """Return a level of the pyramid as a plane."""
    level = levels[index]
    return TilePlane(index, (Fraction(1), Fraction(1)), level.mpp, (level.height_px, level.width_px))
