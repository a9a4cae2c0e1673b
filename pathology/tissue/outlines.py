"""Masks as GeoJSON polygons and back, for editing in QuPath.

Outlines follow the edges of the mask's pixels, and a pixel is inside a polygon if its centre is. So a mask that is
exported and imported unchanged is the same.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from skimage.draw import polygon

from data.components import label
from hyfi_core.errors import RequestError

Mask = NDArray[np.bool_]
Ring = list[tuple[float, float]]

TISSUE_CLASS = "Tissue"
TISSUE_RGB = (52, 64, 84)
_NAMESPACE = uuid.UUID("0b5c2f0e-7f0b-5d7c-9a55-0c1f2b6f4d10")


@dataclass(frozen=True)
class SlideGrid:
    """Position of a mask's pixels on the slide.

    Attributes:
        affine: (2, 3): maps (row, column, 1) of a pixel's corner to (y, x) of level 0, from the corner of the slide's
            bounds, as in QuPath.
    """

    affine: NDArray[np.float64]

    @classmethod
    def of(cls, attributes: dict[str, Any], store_mpp: tuple[float, float], mask_mpp: tuple[float, float]) -> SlideGrid:
        """Return the grid of a mask of a stored slide.

        Args:
            attributes: The slide's attributes in the store.
            store_mpp: (y, x) microns per pixel of the store's finest level.
            mask_mpp: (y, x) microns per pixel of the mask.
        """
        bounds = attributes["source"]["bounds"]
        affine = np.array(attributes["affine"], np.float64)
        affine[:, :2] *= [coarse / fine for coarse, fine in zip(mask_mpp, store_mpp, strict=True)]
        affine[:, 2] -= bounds["y0"], bounds["x0"]
        return cls(affine)

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
                "id": str(uuid.uuid5(_NAMESPACE, f"{slide_id}/{number}")),
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


def mask_of_geojson(path: Path, grid: SlideGrid, shape: tuple[int, int]) -> Mask:
    """Return the mask ``shape`` of the polygons of a GeoJSON file: those of the class Tissue; all if none has it.

    Raises:
        RequestError: The file cannot be read, or has no valid polygon.
    """
    rings = [polygon_rings for feature in _features(path) for polygon_rings in _polygons(feature)]
    if not rings:
        raise RequestError(
            f"{path}: it has no polygon; draw areas of the class {TISSUE_CLASS} and export them as GeoJSON"
        )
    mask = np.zeros(shape, bool)
    for outer, *holes in rings:
        part = np.zeros(shape, bool)
        for ring, value in ((outer, True), *((hole, False) for hole in holes)):
            try:
                corners = grid.from_level0(ring) - 0.5  # scikit-image's coordinates are those of pixel centres
            except (TypeError, ValueError, IndexError) as error:
                raise RequestError(f"{path}: it has an invalid polygon ({error})") from error
            part[polygon(corners[:, 0], corners[:, 1], shape)] = value  # type: ignore[no-untyped-call]
        mask |= part
    return mask


def _features(path: Path) -> list[dict[str, Any]]:
    """Return the features of the class Tissue; all features if none has it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise RequestError(f"{path}: not GeoJSON ({error}); export annotations from QuPath as GeoJSON") from error
    listed = found.get("features", [found]) if isinstance(found, dict) else found
    features = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    tissue = [feature for feature in features if _class_of(feature) == TISSUE_CLASS.lower()]
    return tissue or features


def _class_of(feature: dict[str, Any]) -> str:
    classification = (feature.get("properties") or {}).get("classification") or {}
    return str(classification.get("name", "")).strip().lower() if isinstance(classification, dict) else ""


def _polygons(feature: dict[str, Any]) -> list[list[Any]]:
    """Return the polygons of a feature (or of a bare geometry), each as its outer ring and holes."""
    geometry = feature.get("geometry", feature) or {}
    coordinates = geometry.get("coordinates") or []
    return {"Polygon": [coordinates], "MultiPolygon": coordinates}.get(str(geometry.get("type")), [])


def outline(cells: tuple[NDArray[np.intp], NDArray[np.intp]]) -> list[Ring]:
    """Return the rings around cells that are connected by their edges: the outer ring first, then the holes.

    Args:
        cells: Rows and columns of the cells, as from ``np.nonzero``.

    Returns:
        Lists of the corners' (x, y) in units of cells; the first point is repeated at the end. With y pointing down,
        the outer ring is clockwise, holes are counter-clockwise.
    """
    rings = list(_rings(set(zip(cells[0].tolist(), cells[1].tolist(), strict=True))))
    return sorted(rings, key=_area, reverse=True)


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
    unused = {(start, step) for start, steps in steps_from.items() for step in steps}
    while unused:
        edge = min(unused)
        ring: Ring = []
        while edge in unused:
            unused.remove(edge)
            start, step = edge
            end = (start[0] + step[0], start[1] + step[1])
            next_step = _turn(step, steps_from[end])
            if next_step != step:
                ring.append((float(end[0]), float(end[1])))
            edge = (end, next_step)
        yield [*ring, ring[0]]


def _turn(step: tuple[int, int], choices: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Choose left of ``step``, else straight on, else right (y points down)."""
    left = (step[1], -step[0])
    return next(choice for choice in (left, step, (-left[0], -left[1])) if choice in choices)


def _area(ring: Ring) -> float:
    """Return the signed area: positive for a clockwise ring (y points down)."""
    return sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairwise(ring)) / 2
