"""Positions of the tiles of stored features on their slide.

::

    hyfi features      | 0 | 1 | 2 |          whole tiles from the slide's corner: a square of heatmaps is a tile
    CLAM              |  0 |  1 | | 2 |       from the corner of each piece of tissue: squares are quarters of a tile
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.store.slide_store import SlideStore, StoreLevel
from data.store.tissue_grid import LARGEST_DENOMINATOR
from data.tiles.features.stored import StoredFeatures
from data.tiles.tiling import TilePlane
from data.tiles.tissue_tiles import TissueTiles, read_only, to_source_of
from hyfi_core.errors import RequestError

_USUAL_PX = 256
"""Pixels of a tile whose file does not state them; for heatmaps and pictures only."""
_MOST_SQUARES = 4
"""Most squares of a heatmap along the side of a tile, for tiles that do not lie on a grid of whole tiles."""
_ROUNDED_PX = 0.6
"""Largest difference, in level-0 pixels, between the stated side of a tile and the side measured from corners."""


class WrongSlideError(RequestError):
    """Features belong to another slide."""


def source_mpp(slide: SlideStore) -> tuple[float, float]:
    """Return the microns per pixel (y, x) of level 0 of the ingested file; if unknown, those of the store."""
    y, x = (slide.attributes.get("source") or {}).get("mpp") or slide.levels[0].mpp
    return float(y), float(x)


def tile_um(stored: StoredFeatures, slide: SlideStore) -> float | None:
    """Return height and width of a tile in micrometres; None if the file does not state them."""
    if stored.tile_size is None or stored.unit is None:
        return None
    return stored.tile_size * (sum(source_mpp(slide)) / 2 if stored.unit == "px" else 1.0)


def level0_corners(stored: StoredFeatures, slide: SlideStore) -> NDArray[np.float64] | None:
    """Return ``(N, 2)``: (y, x) of each tile's upper left corner, in level-0 pixels of the ingested file.

    None if the features have no positions.

    Raises:
        RequestError: The file is damaged.
    """
    coords = stored.coords()
    if coords is None or stored.unit == "px":
        return coords
    # In micrometres: features with positions have a unit.
    scaled: NDArray[np.float64] = coords / np.array(source_mpp(slide))
    return scaled


def check_slide(stored: StoredFeatures, slide: SlideStore) -> None:
    """Check that features belong to a slide: by the slide's size, if their file states it, and by positions.

    Raises:
        WrongSlideError: The slide has another size, or a tile lies beyond it.
        RequestError: The file is damaged.
    """
    sizes = _sizes(slide)
    if stored.slide_px is not None and stored.slide_px not in sizes:
        raise WrongSlideError(
            f"{stored.path}: its slide has {_size_text(stored.slide_px)} px at level 0, but slide {slide.slide_id} of "
            f"the store has {_size_text(sizes[0])}"
        )
    corners = level0_corners(stored, slide)
    if corners is None:
        return
    # A tile is beyond the slide if it lies outside of all sizes that level 0 may have for another program.
    height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
    beyond = (corners >= [height, width]).any(axis=1) | ~np.isfinite(corners).all(axis=1)
    if beyond.any():
        y, x = corners[int(np.argmax(beyond))].tolist()
        raise WrongSlideError(
            f"{stored.path}: {int(beyond.sum())} of {stored.count} tiles are beyond slide {slide.slide_id} of the "
            f"store, which has {_size_text((height, width))} px at level 0, such as that at (y, x) = ({y:g}, {x:g})"
        )


def placed_tiles(stored: StoredFeatures, slide: SlideStore) -> TissueTiles | None:
    """Return the tiles of stored features, in the order of the vectors; None if the file has no positions.

    They lie in a plane of the slide, at the resolution at which the encoder saw them. Their shares of tissue are
    unknown (NaN).

    Raises:
        RequestError: The file is damaged.
    """
    corners = level0_corners(stored, slide)
    if corners is None:
        return None
    mpp_um = sum(source_mpp(slide)) / 2
    stated_um = tile_um(stored, slide)
    side_um = mpp_um * (_smallest_gap(corners) if stated_um is None else _unrounded(corners, stated_um / mpp_um))
    size_px = stored.tile_px or _USUAL_PX
    plane = _plane(slide.levels, side_um / size_px)
    # The affine map (2, 3) from the plane to level 0, which is inverted here.
    to_source = to_source_of(slide, plane)
    matrix = np.array(to_source)
    # Map centres: if the map turns or mirrors, a tile's upper left corner becomes another corner.
    centres = corners + side_um / np.array(source_mpp(slide)) / 2
    in_plane = np.linalg.solve(matrix[:, :2], (centres - matrix[:, 2]).T).T - size_px / 2
    square_px, on_grid = _square(in_plane, size_px)
    rounded = np.round(in_plane / square_px) * square_px if on_grid else np.round(in_plane)
    return TissueTiles(
        slide_id=slide.slide_id,
        size_px=size_px,
        stride_px=size_px,
        plane=plane,
        corners=read_only(rounded.astype(np.int64)),
        tissue=read_only(np.full(stored.count, np.nan)),
        to_source=to_source,
        square_px=square_px,
    )


def _plane(levels: Sequence[StoreLevel], mpp_um: float) -> TilePlane:
    """Return the plane with exactly this resolution; if the store is coarser, its step is below 1."""
    # The store may be coarser, because no pixels are read.
    finer = [k for k, level in enumerate(levels) if max(level.mpp) <= mpp_um]
    read = max(finer, default=0)
    level = levels[read]
    y, x = (Fraction(mpp_um / side).limit_denominator(LARGEST_DENOMINATOR) for side in level.mpp)
    return TilePlane(read, (y, x), (mpp_um, mpp_um), (ceil(level.height_px / y), ceil(level.width_px / x)))


def _square(corners: NDArray[np.float64], size_px: int) -> tuple[int, bool]:
    """Return (side of a heatmap's square in pixels, whether all corners lie on its grid, apart from rounding)."""
    parts = [k for k in range(1, _MOST_SQUARES + 1) if size_px % k == 0]
    for k in parts:
        square = size_px // k
        if bool((np.abs(corners - np.round(corners / square) * square) <= max(1.0, size_px / 100)).all()):
            return square, True
    return size_px // parts[-1], False


def _unrounded(corners: NDArray[np.float64], side_px: float) -> float:
    """Return a tile's side before its file rounded it to ``side_px``, measured from the grid of all corners."""
    if side_px % 1:
        return side_px
    # Corners lie on a grid whose step is the unrounded side, or 1/n of it where tiles overlap. Choose the step so that
    # the farthest corner is a whole number of steps away; it is right if all corners are within a pixel of the grid.
    axis = int(np.argmax(np.ptp(corners, axis=0)))
    offsets = corners[:, axis] - corners[:, axis].min()
    for parts in range(1, _MOST_SQUARES + 1):
        steps = round(float(offsets.max()) / side_px * parts)
        if not steps:
            continue
        step = float(offsets.max()) / steps
        on_grid = np.abs(offsets - np.round(offsets / step) * step).max() <= 1
        if on_grid and abs(step * parts - side_px) <= _ROUNDED_PX:
            return step * parts
    return side_px


def _smallest_gap(corners: NDArray[np.float64]) -> float:
    """Return the smallest distance between corners along an axis: about a tile's side, or less if tiles overlap."""
    gaps = [np.diff(np.unique(corners[:, axis])) for axis in (0, 1)]
    return min((float(gap.min()) for gap in gaps if len(gap)), default=float(_USUAL_PX))


def _sizes(slide: SlideStore) -> list[tuple[int, int]]:
    """Return (height, width) of level 0: up to the end of the ingested part, and of the whole file if known."""
    source: dict[str, Any] = slide.attributes.get("source") or {}
    finest = slide.levels[0]
    bounds = source.get("bounds") or {"y1": finest.height_px, "x1": finest.width_px}
    levels = source.get("levels") or []
    whole = [(int(level["height_px"]), int(level["width_px"])) for level in levels[:1]]
    return [(int(bounds["y1"]), int(bounds["x1"])), *whole]


def _size_text(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]}"
