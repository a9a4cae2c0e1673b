"""Regions of a slide where a class scores highest, its tissue and density contours, as GeoJSON for QuPath.

The squares in which a class has more than half of the score are divided into connected regions, which are ranked by
score. Outlines follow the edges of squares:

    +--+--+        Coordinates are (x, y) of level 0 from the corner of the slide's bounds, as in QuPath.
    |  |  |        Squares of a region share edges. At a corner where only two diagonal squares meet, outlines
    +--+  +--+     are closed separately, so that holes are rings of their own and no ring touches itself.
    |  |     |
    +--+-----+
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.components import label
from data.files import in_utf8
from pathology.predict.colors import class_color
from pathology.predict.heatmap import Heatmap
from pathology.tissue.outlines import TISSUE_RGB, Ring, outline

CONTOUR_LEVELS = (0.25, 0.5, 0.75)
DENSITY_UM = 64.0
"""Standard deviation of the smoothing of densities."""
MOST_CONTOURS = 50
"""Maximum number of areas for each contour level: the largest."""
TISSUE_UM = 32.0
"""Resolution of the outlines of tissue."""
LEAST_SHARE = 0.01
"""Regions with less than this fraction of the evidence, the positive contribution to the logit, are not listed."""
MOST_REGIONS = 12
_NAMESPACE = uuid.UUID("5a0f1e0c-6f3f-5d0f-8a57-2f1d5f1f6b11")


@dataclass(frozen=True, eq=False)
class Region:
    """A connected set of squares where a class has a high score.

    Attributes:
        rank: 1 for the region with the highest score.
        squares: (rows, columns) of the squares to outline on the heatmap, each (n,): those of the region, or a block
            around its peak if it is too small to be visible.
        score: Mean score of the region's own squares, 0 to 1.
        contribution: Sum of the positive contributions of its own squares to the logit.
        share: ``contribution`` as a fraction of that of all squares of the heatmap, 0 to 1; None if no square has any.
        area_um2: Area of its own squares.
        peak: (row, column) of its square with the highest score.
    """

    rank: int
    squares: tuple[NDArray[np.intp], NDArray[np.intp]]
    score: float
    contribution: float
    share: float | None
    area_um2: float
    peak: tuple[int, int]


@dataclass(frozen=True, eq=False)
class RankedRegions:
    """The regions of a class, by score in descending order, and the number of those that are not listed.

    Attributes:
        listed: The regions that are listed and outlined.
        faint: Number of regions that each have less than `LEAST_SHARE` of the evidence.
        beyond: Number of further regions, which score less than all that are listed.
    """

    listed: tuple[Region, ...] = ()
    faint: int = 0
    beyond: int = 0


def find_regions(
    heatmap: Heatmap,
    class_index: int,
    tissue: NDArray[np.bool_] | None = None,
    *,
    most: int = MOST_REGIONS,
    least_um: float = 100.0,
    fold: bool = True,
) -> RankedRegions:
    """Return the regions where a class scores highest, by mean score in descending order; ties by contribution.

    Regions are connected squares with a score of at least 0.5, or, if there are none, of at least half of the highest
    score. Regions with less than `LEAST_SHARE` of the evidence are only counted. A region that is too small to be
    visible is outlined by a block around its highest score; a small region inside the block of an earlier region is
    neither listed nor counted, because that outline shows it.

    Args:
        heatmap: Heatmap of the slide.
        class_index: The class.
        tissue: (rows, columns) mask of squares that may be in a region; None: all.
        most: Maximum number of regions.
        least_um: Side of the block for small regions, in micrometres.
        fold: Whether regions with little evidence are only counted. Pass False for a model that takes a maximum over
            positions: a few squares then have all evidence, whatever the others show.

    Returns:
        At most ``most`` regions; none if the class has no score above 0. If no square contributes to the logit, there
        is no evidence to have a share of, and no region is faint.
    """
    score = np.nan_to_num(heatmap.scores[class_index].astype(np.float64))
    if tissue is not None:
        score = np.where(tissue, score, 0.0)
    if score.max() <= 0:
        return RankedRegions()
    groups = _groups_by_score(score, heatmap.positive_contributions(class_index), heatmap.square_um)
    strong = [group for group in groups if not fold or group.share is None or group.share >= LEAST_SHARE]
    side_px = tuple(max(1, round(least_um / um)) for um in heatmap.square_um)
    regions: list[Region] = []
    beyond = 0
    outlined = np.zeros(score.shape, bool)
    for group in strong:
        small = len(group.squares[0]) < side_px[0] * side_px[1]
        if small and outlined[group.peak]:
            continue
        if len(regions) == most:
            beyond += 1
            continue
        squares = _block_around(group.peak, score.shape, side_px) if small else group.squares
        outlined[squares] = True
        regions.append(replace(group, rank=len(regions) + 1, squares=squares))
    return RankedRegions(tuple(regions), faint=len(groups) - len(strong), beyond=beyond)


def _groups_by_score(
    score: NDArray[np.float64], evidence: NDArray[np.float64], square_um: tuple[float, float]
) -> list[Region]:
    """Return regions of connected squares with a high score, by falling mean score; ranks are 0, to be set later."""
    groups = label(score >= (0.5 if score.max() >= 0.5 else score.max() / 2)).ravel()
    ends = np.cumsum(np.bincount(groups))
    # One stable sort for all groups: squares of a group stay in the order of the map. Drop group 0, the background.
    by_group = np.split(np.argsort(groups, kind="stable"), ends[:-1])[1:]
    total = float(evidence.sum())
    regions = []
    for flat in by_group:
        squares = np.unravel_index(flat, score.shape)
        contribution = float(evidence[squares].sum())
        strongest = int(np.argmax(score[squares]))
        regions.append(
            Region(
                rank=0,
                squares=(squares[0], squares[1]),
                score=float(score[squares].mean()),
                contribution=contribution,
                share=contribution / total if total > 0 else None,
                area_um2=len(flat) * square_um[0] * square_um[1],
                peak=(int(squares[0][strongest]), int(squares[1][strongest])),
            )
        )
    # Round means: equal ones must tie, whatever the rounding of their sums.
    return sorted(regions, key=lambda region: (-round(region.score, 9), -region.contribution))


def _block_around(peak: tuple[int, int], shape: tuple[int, ...], side_px: tuple[int, ...]) -> Any:
    """Return the squares of a block of ``side_px`` squares around the peak, within the heatmap."""
    starts = [max(0, middle - n // 2) for middle, n in zip(peak, side_px, strict=True)]
    rows, columns = (
        np.arange(start, min(start + n, size)) for start, n, size in zip(starts, side_px, shape, strict=True)
    )
    return tuple(axis.ravel() for axis in np.meshgrid(rows, columns, indexing="ij"))


def to_geojson(
    regions: Sequence[Region], heatmap: Heatmap, class_index: int, *, slide_id: str, level0: Level0
) -> dict[str, Any]:
    """Return the regions as a GeoJSON feature collection of QuPath annotations.

    Args:
        regions: Regions of ``heatmap``.
        heatmap: Heatmap of the slide.
        class_index: Class of the regions; gives their name and colour.
        slide_id: Name of the slide, from which ids of features are made: they are the same in each run.
        level0: Map to the coordinates of QuPath.
    """
    name = heatmap.class_names[class_index]
    color = list(class_color(class_index))
    features = []
    for region in regions:
        rings = [[level0.point(x, y, heatmap) for x, y in ring] for ring in outline(region.squares)]
        properties = {
            "objectType": "annotation",
            "name": f"{name} {region.rank}",
            "classification": {"name": name, "color": color},
            "isLocked": False,
            "measurements": {
                "mean score": round(region.score, 6),
                "contribution to the logit": round(region.contribution, 6),
                **({} if region.share is None else {"share of the positive contribution": round(region.share, 6)}),
                "area um^2": round(region.area_um2, 2),
            },
        }
        features.append(_feature(f"{slide_id}/{name}/{region.rank}", rings, properties))
    return {"type": "FeatureCollection", "features": features}


def tissue_features(
    tissue: NDArray[np.bool_], mpp: tuple[float, float], heatmap: Heatmap, *, slide_id: str, level0: Level0
) -> list[dict[str, Any]]:
    """Return the outlines of the tissue as GeoJSON features, one for each connected component, at about 32 µm.

    Args:
        tissue: Mask of the slide.
        mpp: (y, x) micrometres per pixel of the mask.
        heatmap: Heatmap of the slide.
        slide_id: Name of the slide. Features have the same id whenever they are written.
        level0: Map to the coordinates of QuPath.
    """
    from skimage.measure import block_reduce

    step = max(1, round(TISSUE_UM / max(mpp)))
    # The maximum, so that thin tissue does not vanish.
    coarse = np.asarray(block_reduce(tissue, (step, step), np.max))  # type: ignore[no-untyped-call]
    groups = label(coarse)
    scale = [step * um / square_um for um, square_um in zip(mpp, heatmap.square_um, strict=True)]
    features = []
    for number in range(1, int(groups.max()) + 1):
        rows, columns = np.nonzero(groups == number)
        rings = outline((rows, columns))
        corners = [[level0.point(x * scale[1], y * scale[0], heatmap) for x, y in ring] for ring in rings]
        properties = {
            "objectType": "annotation",
            "name": f"Tissue {number}",
            "classification": {"name": "Tissue", "color": list(TISSUE_RGB)},
            "isLocked": True,
        }
        features.append(_feature(f"{slide_id}/tissue/{number}", corners, properties))
    return features


def contour_features(
    heatmap: Heatmap, class_index: int, tissue: NDArray[np.bool_], *, slide_id: str, level0: Level0
) -> list[dict[str, Any]]:
    """Return contours of a class's density as GeoJSON features, one for each area above one of `CONTOUR_LEVELS`.

    Each level has its `MOST_CONTOURS` largest areas: scores of a weak model may exceed a level in hundreds of places.

    The density at a position is the mean score of the tissue around it, weighted by a Gaussian of `DENSITY_UM`.

    Args:
        heatmap: Heatmap of the slide.
        class_index: The class.
        tissue: (rows, columns) mask of the squares with tissue; only these count.
        slide_id: Name of the slide. Features have the same id whenever they are written.
        level0: Map to the coordinates of QuPath.
    """
    from contourpy import FillType, contour_generator
    from scipy.ndimage import gaussian_filter

    is_seen = tissue & np.isfinite(heatmap.scores[class_index])
    sigma = [DENSITY_UM / um for um in heatmap.square_um]
    score_and_one = [np.where(is_seen, values, 0.0).astype(np.float64) for values in (heatmap.scores[class_index], 1.0)]
    total, weight = (gaussian_filter(values, sigma, mode="constant") for values in score_and_one)
    density = np.where(is_seen, total / np.maximum(weight, 1e-6), 0.0)
    # Values are those of square centres. A border of zeros around the map closes every contour.
    rows, columns = (np.arange(-1, n + 1) + 0.5 for n in density.shape)
    lines = contour_generator(columns, rows, np.pad(density, 1), fill_type=FillType.OuterOffset)
    name, color = heatmap.class_names[class_index], list(class_color(class_index))
    features = []
    for level in CONTOUR_LEVELS:
        # Densities are at most 1, so 2.0 is no upper limit. For each area: (points of all rings, starts of rings in
        # them), first the outer ring, then holes.
        areas = list(zip(*lines.filled(level, 2.0), strict=True))
        by_size = sorted(areas, key=lambda area: -_area_of_outer_ring(*area))
        for number, (points, offsets) in enumerate(by_size[:MOST_CONTOURS], start=1):
            rings = [
                # `max`, because the border of zeros begins half a square outside of the slide.
                [level0.point(max(0.0, x), max(0.0, y), heatmap) for x, y in points[start:stop].tolist()]
                for start, stop in pairwise(offsets.tolist())
            ]
            properties = {
                "objectType": "annotation",
                "name": f"{name}: density of {level:g} or more",
                "classification": {"name": f"{name} density {level:g}", "color": color},
                "isLocked": True,
                "measurements": {"density": level},
            }
            features.append(_feature(f"{slide_id}/{name}/density/{level:g}/{number}", rings, properties))
    return features


def _area_of_outer_ring(points: NDArray[np.float64], offsets: NDArray[np.integer]) -> float:
    """Return the area that the first ring of an area encloses; ``points``: (n, 2), ``offsets``: starts of its rings."""
    x, y = points[: offsets[1]].T
    return abs(float(np.sum(x[:-1] * y[1:] - x[1:] * y[:-1]))) / 2


def _feature(identity: str, rings: list[Ring], properties: dict[str, Any]) -> dict[str, Any]:
    """Return a polygon as a feature of GeoJSON; ``identity`` gives it the same id in each run."""
    return {
        "type": "Feature",
        "id": str(uuid.uuid5(_NAMESPACE, in_utf8(identity))),
        "geometry": {"type": "Polygon", "coordinates": rings},
        "properties": properties,
    }


@dataclass(frozen=True)
class Level0:
    """Maps pixels of the slide at the model's resolution to level 0 of the file, in the coordinates of QuPath.

    Attributes:
        affine: 2 × 3 matrix that maps (y, x, 1), measured from the corner of pixel 0, to (y, x) of level 0.
        bounds_origin_px: (y, x) of the corner of the bounds that the file states, which is the origin in QuPath.
    """

    affine: tuple[tuple[float, float, float], tuple[float, float, float]]
    bounds_origin_px: tuple[float, float] = (0.0, 0.0)

    def point(self, column: float, row: float, heatmap: Heatmap) -> tuple[float, float]:
        """Return the corner of a square as (x, y) of level 0 from the corner of the bounds, clipped to the slide."""
        y = min(row * heatmap.square_px, heatmap.slide_size_px[0])
        x = min(column * heatmap.square_px, heatmap.slide_size_px[1])
        level0_y, level0_x = (a * y + b * x + c for a, b, c in self.affine)
        return round(level0_x - self.bounds_origin_px[1], 2), round(level0_y - self.bounds_origin_px[0], 2)


def write_regions(path: Path, collection: dict[str, Any]) -> None:
    """Write a feature collection as UTF-8 JSON.

    Raises:
        OSError: The file cannot be written.
    """
    path.write_text(
        json.dumps(collection, ensure_ascii=False, indent=1) + "\n", encoding="utf-8", errors="backslashreplace"
    )
