"""The regions of a slide that speak most for a class, as polygons that QuPath opens.

The smallest set of cells that together hold a given share of the class's positive contribution is cut into connected
regions, ranked by what they contribute. Outlines follow the edges of cells exactly:

    +--+--+        (x, y) of level 0, minus the slide's bounds: the coordinates that QuPath shows.
    |  |  |        Cells of a region share edges. Where two touch at a corner only, the outline
    +--+  +--+     crosses over, so that a hole there is a ring of its own and every ring is simple.
    |  |     |
    +--+-----+
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

from pathology.predict.colors import class_color
from pathology.predict.heatmap import Heatmap

Ring = list[tuple[float, float]]

_NAMESPACE = uuid.UUID("5a0f1e0c-6f3f-5d0f-8a57-2f1d5f1f6b11")


@dataclass(frozen=True, eq=False)
class Region:
    """A connected set of cells that speaks for a class.

    Attributes:
        rank: 1 for the region that contributes most.
        cells: (rows, columns) of its cells on the heatmap, each (n,).
        contribution: sum of its cells' contributions to the logit.
        share: of all positive contribution to this logit, 0 to 1.
        area_um2: of its cells.
        peak: (row, column) of the cell that contributes most.
    """

    rank: int
    cells: tuple[NDArray[np.intp], NDArray[np.intp]]
    contribution: float
    share: float
    area_um2: float
    peak: tuple[int, int]


def find_regions(
    heatmap: Heatmap,
    class_index: int,
    tissue: NDArray[np.bool_] | None = None,
    *,
    share: float = 0.5,
    most: int = 12,
    least: float = 0.05,
) -> list[Region]:
    """Return the regions that contribute most to a class, the strongest first.

    Args:
        heatmap: contributions on the slide.
        class_index: the class that they should speak for.
        tissue: (rows, columns) of the heatmap: where regions may lie; None: anywhere.
        share: of the positive contribution that the chosen cells hold together, before the weakest regions are dropped.
        most: regions to return at most.
        least: what a region must contribute, as a share of the strongest region's contribution.

    Returns:
        At most ``most`` regions; none where nothing speaks for the class.
    """
    from skimage.measure import label

    everywhere = heatmap.speaks_for(class_index)
    positive = everywhere if tissue is None else np.where(tissue, everywhere, 0.0)
    total = positive.sum()
    if total <= 0:
        return []
    descending = np.sort(positive, axis=None)[::-1]
    needed = min(int(np.searchsorted(np.cumsum(descending), share * total)), descending.size - 1)
    chosen = positive >= max(descending[needed], np.finfo(np.float64).tiny)
    groups = np.asarray(label(chosen, connectivity=1))  # type: ignore[no-untyped-call]
    sums = np.bincount(groups.ravel(), weights=positive.ravel())[1:]
    strongest = [group for group in np.argsort(-sums, kind="stable")[:most] if sums[group] >= least * sums.max()]
    return [
        _region(rank, np.nonzero(groups == group + 1), positive, everywhere.sum(), heatmap)
        for rank, group in enumerate(strongest, start=1)
    ]


def _region(rank: int, cells: Any, positive: NDArray[np.float64], total: float, heatmap: Heatmap) -> Region:
    strongest = int(np.argmax(positive[cells]))
    contribution = float(positive[cells].sum())
    return Region(
        rank=rank,
        cells=cells,
        contribution=contribution,
        share=contribution / float(total),
        area_um2=len(cells[0]) * heatmap.cell_um[0] * heatmap.cell_um[1],
        peak=(int(cells[0][strongest]), int(cells[1][strongest])),
    )


def outline(cells: tuple[NDArray[np.intp], NDArray[np.intp]]) -> list[Ring]:
    """Return the rings around cells that hang together by their edges: the outer ring first, then the holes.

    Rings are closed (the first point again at the end) lists of the corners' (x, y) in units of cells. On a screen,
    where y points down, the outer ring runs clockwise and holes the other way.
    """
    rings = list(_rings(set(zip(cells[0].tolist(), cells[1].tolist(), strict=True))))
    return sorted(rings, key=_area, reverse=True)


def _rings(cells: set[tuple[int, int]]) -> Iterator[Ring]:
    """Follow the edges of the cells, which stay on the right hand, until every edge is used once."""
    ahead: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for y, x in cells:
        for neighbour, start, step in (
            ((y - 1, x), (x, y), (1, 0)),
            ((y, x + 1), (x + 1, y), (0, 1)),
            ((y + 1, x), (x + 1, y + 1), (-1, 0)),
            ((y, x - 1), (x, y + 1), (0, -1)),
        ):
            if neighbour not in cells:
                ahead.setdefault(start, []).append(step)
    unused = {(start, step) for start, steps in ahead.items() for step in steps}
    while unused:
        edge = min(unused)
        ring: Ring = []
        while edge in unused:
            unused.remove(edge)
            start, step = edge
            end = (start[0] + step[0], start[1] + step[1])
            onward = _turn(step, ahead[end])
            if onward != step:
                ring.append((float(end[0]), float(end[1])))
            edge = (end, onward)
        yield [*ring, ring[0]]


def _turn(step: tuple[int, int], choices: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Choose left of ``step`` before straight on before right (y points down)."""
    left = (step[1], -step[0])
    return next(choice for choice in (left, step, (-left[0], -left[1])) if choice in choices)


def _area(ring: Ring) -> float:
    """Signed area: positive for a ring that is clockwise on the screen."""
    return sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairwise(ring)) / 2


def to_geojson(
    regions: Sequence[Region], heatmap: Heatmap, class_index: int, *, slide_id: str, level0: Level0
) -> dict[str, Any]:
    """Return the regions as a GeoJSON feature collection of QuPath annotations.

    Args:
        regions: of ``heatmap``.
        heatmap: on whose cells they lie.
        class_index: the class that they speak for; it names and colours them.
        slide_id: the same slide and region have the same id every time.
        level0: how pixels of the slide at the model's resolution become QuPath's.
    """
    name = heatmap.class_names[class_index]
    color = list(class_color(class_index))
    features = []
    for region in regions:
        rings = [[level0.point(x, y, heatmap) for x, y in ring] for ring in outline(region.cells)]
        features.append(
            {
                "type": "Feature",
                "id": str(uuid.uuid5(_NAMESPACE, f"{slide_id}/{name}/{region.rank}")),
                "geometry": {"type": "Polygon", "coordinates": rings},
                "properties": {
                    "objectType": "annotation",
                    "name": f"{name} {region.rank}",
                    "classification": {"name": name, "color": color},
                    "isLocked": False,
                    "measurements": {
                        "contribution to the logit": round(region.contribution, 6),
                        "share of the positive contribution": round(region.share, 6),
                        "area um^2": round(region.area_um2, 2),
                    },
                },
            }
        )
    return {"type": "FeatureCollection", "features": features}


@dataclass(frozen=True)
class Level0:
    """From pixels of the slide at the model's resolution to the file's level 0, as QuPath counts it.

    Attributes:
        affine: (2, 3) rows: the point (y, x, 1), measured from the corner of pixel 0, becomes (y, x) of level 0.
        bounds_origin_px: (y, x) where the file says that its scanned part begins; QuPath counts from there.
    """

    affine: tuple[tuple[float, float, float], tuple[float, float, float]]
    bounds_origin_px: tuple[float, float] = (0.0, 0.0)

    def point(self, column: float, row: float, heatmap: Heatmap) -> tuple[float, float]:
        """Return the corner of a cell as GeoJSON's (x, y), in level-0 pixels minus the bounds; never off the slide."""
        y = min(row * heatmap.cell_px, heatmap.slide_size_px[0])
        x = min(column * heatmap.cell_px, heatmap.slide_size_px[1])
        level0_y, level0_x = (a * y + b * x + c for a, b, c in self.affine)
        return round(level0_x - self.bounds_origin_px[1], 2), round(level0_y - self.bounds_origin_px[0], 2)


def write_regions(path: Path, collection: dict[str, Any]) -> None:
    """Write a feature collection as UTF-8 JSON."""
    path.write_text(json.dumps(collection, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
