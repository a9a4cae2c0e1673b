"""Masks as GeoJSON polygons and back, for editing in QuPath.

Outlines follow the edges of the mask's pixels, and a pixel is inside a polygon if its centre is. So a mask that is
exported and imported unchanged is the same.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from skimage.draw import polygon

from data.arrays import Mask
from data.components import label
from data.files import in_utf8
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from pathology.tissue.geojson import TISSUE_CLASS, Areas, Polygon

Ring = list[tuple[float, float]]
TISSUE_RGB = (52, 64, 84)
_OVERDRAWN = 0.05
"""Polygons may reach beyond the slide by this share of its height or width, as when drawn by hand around an edge."""
_NAMESPACE = uuid.UUID("0b5c2f0e-7f0b-5d7c-9a55-0c1f2b6f4d10")


@dataclass(frozen=True)
class SlideGrid:
    """Position of a mask's pixels on the slide.

    Attributes:
        affine: (2, 3): maps (row, column, 1) of a pixel's corner to (y, x) of level 0, which start at the corner of the
            slide's bounds, as in QuPath.
        size_px: (height, width) of the bounds at level 0; None if unknown.
    """

    affine: NDArray[np.float64]
    size_px: tuple[int, int] | None = None

    @classmethod
    def of(cls, attributes: dict[str, Any], store_mpp: tuple[float, float], mask_mpp: tuple[float, float]) -> SlideGrid:
        """Return the position of a mask's pixels on a stored slide.

        Args:
            attributes: The slide's attributes in the store.
            store_mpp: (y, x) microns per pixel of the store's finest level.
            mask_mpp: (y, x) microns per pixel of the mask.
        """
        bounds = Box(**{side: int(attributes["source"]["bounds"][side]) for side in ("y0", "y1", "x0", "x1")})
        return cls.within(bounds, attributes["affine"], store_mpp, mask_mpp)

    @classmethod
    def within(
        cls,
        bounds: Box,
        affine: Sequence[Sequence[float]],
        store_mpp: tuple[float, float],
        mask_mpp: tuple[float, float],
    ) -> SlideGrid:
        """Return the position of a mask's pixels on a slide.

        Args:
            bounds: Bounds of the slide, at level 0.
            affine: (2, 3): maps (row, column, 1) of the store's finest level to (y, x) of level 0.
            store_mpp: (y, x) microns per pixel of the store's finest level.
            mask_mpp: (y, x) microns per pixel of the mask.
        """
        to_level0 = np.array(affine, np.float64)
        to_level0[:, :2] *= [coarse / fine for coarse, fine in zip(mask_mpp, store_mpp, strict=True)]
        # QuPath counts from the corner of the bounds, the file from its own.
        to_level0[:, 2] -= bounds.y0, bounds.x0
        return cls(to_level0, (bounds.height, bounds.width))

    def to_level0(self, ring: Sequence[tuple[float, float]]) -> list[list[float]]:
        """Return points (x, y) of the mask as (x, y) of level 0, rounded to a hundredth of a pixel."""
        points = np.array(ring)[:, ::-1] @ self.affine[:, :2].T + self.affine[:, 2]
        return np.round(points[:, ::-1], 2).tolist()  # type: ignore[no-any-return]

    def from_level0(self, ring: Sequence[Sequence[float]]) -> NDArray[np.float64]:
        """Return points (x, y) of level 0 as (n, 2) rows and columns of the mask."""
        points = np.array([[float(v) for v in point[:2]] for point in ring])[:, ::-1]
        return np.asarray(np.linalg.solve(self.affine[:, :2], (points - self.affine[:, 2]).T).T, np.float64)


def mask_to_geojson(mask: Mask, grid: SlideGrid, slide_id: str) -> dict[str, Any]:
    """Return a mask as a GeoJSON feature collection of QuPath annotations, one for each connected component."""
    groups = label(mask)
    features = []
    for number in range(1, int(groups.max(initial=0)) + 1):
        features.append(
            {
                "type": "Feature",
                # The same slide and number give the same id, so that a second import replaces the first in QuPath.
                "id": str(uuid.uuid5(_NAMESPACE, in_utf8(f"{slide_id}/{number}"))),
                "geometry": {
                    "type": "Polygon",
                    "coordinates": [grid.to_level0(ring) for ring in outline(np.nonzero(groups == number))],  # type: ignore[arg-type]
                },
                "properties": {
                    "objectType": "annotation",
                    "name": f"{TISSUE_CLASS} {number}",
                    "classification": {"name": TISSUE_CLASS, "color": list(TISSUE_RGB)},
                },
            }
        )
    return {"type": "FeatureCollection", "features": features}


def mask_of_areas(path: Path, areas: Areas, grid: SlideGrid, shape: tuple[int, int]) -> Mask:
    """Return a mask of the tissue areas, without the ignored ones.

    Args:
        path: The file of the areas, for messages.
        areas: From `read_areas`.
        grid: Position of the mask.
        shape: Rows and columns of the mask.

    Raises:
        RequestError: They reach far beyond the slide, or contain no pixel's centre.
    """
    _check_inside(path, areas.tissue, grid)
    mask = _filled(areas.tissue, grid, shape) & ~_filled(areas.ignored, grid, shape)
    if not mask.any():
        raise RequestError(
            f"{path}: its polygons cover no part of the slide's mask; they must be in level-0 pixels, as QuPath "
            f"exports them"
        )
    return mask


def _filled(polygons: Sequence[Polygon], grid: SlideGrid, shape: tuple[int, int]) -> Mask:
    """Return the union of polygons as a mask."""
    mask = np.zeros(shape, bool)
    for outer, *holes in polygons:
        part = np.zeros(shape, bool)
        for ring, value in ((outer, True), *((hole, False) for hole in holes)):
            corners = grid.from_level0(ring) - 0.5  # scikit-image's coordinates are those of pixel centres
            part[polygon(corners[:, 0], corners[:, 1], shape)] = value  # type: ignore[no-untyped-call]
        mask |= part
    return mask


def _check_inside(path: Path, polygons: Sequence[Polygon], grid: SlideGrid) -> None:
    """Refuse polygons that reach far beyond the slide: they belong to another one, or are in other units."""
    if grid.size_px is None:
        return
    points = np.array([point for rings in polygons for ring in rings for point in ring])[:, ::-1]
    low, high = points.min(0), points.max(0)
    size = np.array(grid.size_px, np.float64)
    if (low < -_OVERDRAWN * size).any() or (high > (1 + _OVERDRAWN) * size).any():
        raise RequestError(
            f"{path}: its polygons reach from y {low[0]:.0f}, x {low[1]:.0f} to y {high[0]:.0f}, x {high[1]:.0f}, but "
            f"the slide has {size[0]:.0f} × {size[1]:.0f} pixels (rows × columns); give the file of this slide, in "
            f"level-0 pixels, as QuPath exports it"
        )


def outline(cells: tuple[NDArray[np.intp], NDArray[np.intp]]) -> list[Ring]:
    """Return the rings around cells that are connected by their edges: the outer ring first, then the holes.

    Args:
        cells: Rows and columns of the cells, as from ``np.nonzero``.

    Returns:
        Lists of the corners' (x, y) in units of cells; the first point is repeated at the end. With y pointing down,
        the outer ring is clockwise, holes are counter-clockwise.
    """
    rings = list(_rings(set(zip(cells[0].tolist(), cells[1].tolist(), strict=True))))
    # GeoJSON wants the outer ring first. It is the only one with a positive signed area.
    return sorted(rings, key=signed_area, reverse=True)


def _rings(cells: set[tuple[int, int]]) -> Iterator[Ring]:
    """Follow the edges of the cells, with the cells on the right-hand side, until every edge is used once."""
    steps_from: dict[tuple[int, int], list[tuple[int, int]]] = {}  # from a corner along the edges that start there
    for y, x in cells:
        for neighbour, start, step in (
            ((y - 1, x), (x, y), (1, 0)),
            ((y, x + 1), (x + 1, y), (0, 1)),
            ((y + 1, x), (x + 1, y + 1), (-1, 0)),
            ((y, x - 1), (x, y + 1), (0, -1)),
        ):
            if neighbour not in cells:
                steps_from.setdefault(start, []).append(step)
    # All edges around the cells; edges between two cells are not among them.
    unused = {(start, step) for start, steps in steps_from.items() for step in steps}
    # Sorted, so that rings have the same order every time.
    for first in sorted(unused):
        edge, ring = first, Ring()
        while edge in unused:
            unused.remove(edge)
            start, step = edge
            end = (start[0] + step[0], start[1] + step[1])
            next_step = _leftmost_step(step, steps_from[end])
            # Only corners are kept: points on a straight edge are not needed.
            if next_step != step:
                ring.append((float(end[0]), float(end[1])))
            edge = (end, next_step)
        if ring:  # else the ring of this edge was followed before
            yield [*ring, ring[0]]


def _leftmost_step(step: tuple[int, int], choices: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Choose left of ``step``, else straight on, else right (y points down).

    Where two cells touch only by a corner, a hole may touch the outside. Turning left there keeps the hole a ring of
    its own: a single ring that passes the corner twice would not be a valid polygon.
    """
    left = (step[1], -step[0])
    return next(choice for choice in (left, step, (-left[0], -left[1])) if choice in choices)


def signed_area(ring: Ring) -> float:
    """Return the signed area: positive for a clockwise ring (y points down)."""
    return sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairwise(ring)) / 2
