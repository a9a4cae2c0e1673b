"""The tiles of one slide that show tissue.

::

    plane    ┌────┬────┬────┬─         tiles of size_px at multiples of stride_px from the slide's corner;
             │    │ ▒▒ │▒▒▒▒│          the last row and column may reach beyond the slide, where pixels are white
             ├────┼────┼────┼─
             │  ▒▒│▒▒▒▒│▒▒▒ │          kept: at least min_tissue of size_px² is tissue
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from data.samples.keyed import keyed_permutation
from data.store.slide_store import SlideStore
from data.store.tissue_grid import TissueGrid
from data.tiles.tiling import TilePlane, Tiling, plane_of
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box

Corners = NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)

_WHOLE = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))


class NoTilesError(RequestError):
    """A slide has no tile with enough tissue."""


@dataclass(frozen=True, eq=False)
class TissueTiles:
    """The tiles of one slide that show tissue, in the order of the store's files, and within a file row by row.

    Attributes:
        slide_id: The slide.
        size_px: Height and width of a tile.
        stride_px: Distance between neighbouring tiles.
        plane: The slide at the resolution of the tiles.
        corners: ``(N, 2)`` int64: (y, x) of each tile's upper left corner in the plane; read-only.
        tissue: ``(N,)`` float64: share of each tile's area that is tissue; read-only.
        to_source: Rows of the matrix that maps (y, x, 1) of the plane to (y, x) of level 0 of the ingested file; both
            are measured from the corner of pixel 0.
        content: Digest of the slide's pixels; empty if the store has none.
        square_px: Side of a heatmap's squares, a divisor of the size; None: the largest that also divides the stride.
    """

    slide_id: str
    size_px: int
    stride_px: int
    plane: TilePlane
    corners: Corners
    tissue: NDArray[np.float64]
    to_source: tuple[tuple[float, float, float], tuple[float, float, float]]
    content: str = ""
    square_px: int | None = None

    def __len__(self) -> int:
        """Return the number of tiles."""
        return len(self.corners)

    @property
    def coords(self) -> Corners:
        """``(N, 2)`` int64: (y, x) of each tile's upper left corner, in level-0 pixels of the slide that was ingested.

        These are the pixels that OpenSlide's ``read_region`` counts. Formats of other tools have them as (x, y).
        """
        coords: Corners = self.source_corners.round().astype(np.int64)
        return coords

    @property
    def source_corners(self) -> NDArray[np.float64]:
        """``(N, 2)`` float64: `coords` before they are rounded to whole pixels."""
        matrix = np.array(self.to_source)
        ends = np.stack([self.corners, self.corners + self.size_px], axis=1).astype(np.float64)
        # The map may mirror or turn the plane: then another corner of the tile is the upper left one in the source.
        corners: NDArray[np.float64] = (ends @ matrix[:, :2].T + matrix[:, 2]).min(axis=1)
        return corners

    @property
    def source_size_px(self) -> tuple[float, float]:
        """Height and width of a tile in level-0 pixels of the slide that was ingested."""
        matrix = np.abs(np.array(self.to_source)[:, :2])
        height, width = matrix @ np.array([self.size_px, self.size_px], np.float64)
        return float(height), float(width)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The smallest box of level ``plane.level`` around each tile."""
        return tuple(self.level_box(corner) for corner in self.corners)

    def level_box(self, corner: Corners) -> Box:
        """Return the smallest box of level ``plane.level`` around the tile with this corner, (y, x) of the plane."""
        (y, x), (sy, sx), size = corner.tolist(), self.plane.step, self.size_px
        return Box(floor(y * sy), ceil((y + size) * sy), floor(x * sx), ceil((x + size) * sx))

    def drawn(self, most: int | None, seed: int, epoch: int) -> TissueTiles:
        """Return at most ``most`` of the tiles, drawn at random by (seed, epoch, slide), in their present order.

        Raises:
            RequestError: ``most`` is below 1.
        """
        if most is not None and most < 1:
            raise RequestError(f"at most {most} tiles of a slide; use 1 or more, or none for all tiles")
        if most is None or most >= len(self):
            return self
        # Sorted into the order of the store's files: in random order, each tile would decode its chunks again.
        chosen = np.sort(keyed_permutation(len(self), "tiles", seed, epoch, self.slide_id)[:most])
        return replace(self, corners=read_only(self.corners[chosen]), tissue=read_only(self.tissue[chosen]))

    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal digits, of all that determines the tiles' pixels and places."""
        described = (
            self.content,
            self.size_px,
            self.plane.level,
            [str(step) for step in self.plane.step],
            self.to_source,
        )
        summed = hashlib.sha256(repr(described).encode())
        # Little-endian, so that the digest is the same on every machine.
        summed.update(np.ascontiguousarray(self.corners, dtype="<i8").tobytes())
        return summed.hexdigest()


def tissue_tiles(slide: SlideStore, tiling: Tiling) -> TissueTiles:
    """Return the tiles of a slide that show tissue.

    Args:
        slide: A stored slide.
        tiling: The tiles to take.

    Raises:
        RequestError: The slide is coarser than the tiles.
        NoTilesError: No tile has enough tissue.
        StoreError: The tissue label is damaged.
    """
    plane = plane_of(slide.levels, tiling.mpp, slide.slide_id)
    mask, mask_mpp = slide.tissue()
    starts = [_starts(length, tiling.size_px, tiling.step_px) for length in plane.size_px]
    share = _tissue_share(TissueGrid.under(mask, mask_mpp, plane.size_px, plane.mpp), starts, tiling.size_px)
    chosen = np.argwhere(share >= tiling.min_tissue)
    if not len(chosen):
        raise NoTilesError(
            f"slide {slide.slide_id}: none of its {share.size} tiles of {tiling.size_px} px at {plane.mpp[0]:g} µm/px "
            f"is tissue to {tiling.min_tissue:.0%}; the most is {share.max():.1%}"
        )
    corners = np.stack([starts[0][chosen[:, 0]], starts[1][chosen[:, 1]]], axis=1)
    # A reader keeps about as many decoded chunks as a file has, so tiles of a file must follow one another.
    order = _by_file(corners, plane, slide)
    return TissueTiles(
        slide_id=slide.slide_id,
        size_px=tiling.size_px,
        stride_px=tiling.step_px,
        plane=plane,
        corners=read_only(corners[order]),
        tissue=read_only(share[chosen[:, 0], chosen[:, 1]][order]),
        to_source=to_source_of(slide, plane),
        content=str(slide.attributes.get("metadata_sha256") or ""),
    )


def _starts(length: int, size: int, stride: int) -> Corners:
    """Return where tiles start so that they cover ``length`` pixels."""
    # The last tile is the first that reaches the end: a tile completely outside would show white only.
    return np.arange(max(0, -(-(length - size) // stride)) + 1, dtype=np.int64) * stride


def _tissue_share(tissue: TissueGrid, starts: list[Corners], size: int) -> NDArray[np.float64]:
    """Return ``(rows, columns)``: the share of each tile's area that is tissue; outside the slide there is none."""
    ends = [np.minimum(start + size, length) for start, length in zip(starts, tissue.size_px, strict=True)]
    cuts = [np.unique(np.concatenate([[0], start, end])) for start, end in zip(starts, ends, strict=True)]
    # A summed-area table over the rows and columns where tiles start or end: four lookups for each tile.
    summed = np.zeros((len(cuts[0]), len(cuts[1])), np.int64)
    summed[1:, 1:] = tissue.counts(cuts[0], cuts[1]).cumsum(axis=0).cumsum(axis=1)
    y0, x0 = (np.searchsorted(cut, start) for cut, start in zip(cuts, starts, strict=True))
    y1, x1 = (np.searchsorted(cut, end) for cut, end in zip(cuts, ends, strict=True))
    counts = summed[np.ix_(y1, x1)] - summed[np.ix_(y0, x1)] - summed[np.ix_(y1, x0)] + summed[np.ix_(y0, x0)]
    return np.asarray(counts / size**2, dtype=np.float64)


def _by_file(corners: Corners, plane: TilePlane, slide: SlideStore) -> NDArray[np.intp]:
    """Return the indices of tiles sorted by the store's file that has their corner, and within a file row by row."""
    layout = slide.images[slide.levels[plane.level].path].layout
    file_px = [side / step for side, step in zip(layout.shard_px, plane.step, strict=True)]
    file = [corners[:, k] * file_px[k].denominator // file_px[k].numerator for k in (0, 1)]
    # NumPy sorts by the last key first: file row, file column, then row and column of the tile.
    return np.lexsort((corners[:, 1], corners[:, 0], file[1], file[0]))


def to_source_of(slide: SlideStore, plane: TilePlane) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Return ``TissueTiles.to_source`` of a plane; if that is unknown, the map to the store's level 0."""
    rows = slide.attributes.get("affine") or _WHOLE
    scale = [mpp / finest for mpp, finest in zip(plane.mpp, slide.levels[0].mpp, strict=True)]
    y, x = ((float(a) * scale[0], float(b) * scale[1], float(c)) for a, b, c in rows)
    return y, x


def read_only(array: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """Make an array read-only and return it."""
    array.flags.writeable = False
    return array
