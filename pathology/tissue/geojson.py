"""Areas of GeoJSON files, as QuPath and other tools write them.

```
FeatureCollection, list, Feature, GeometryCollection, geometry    read, at any depth
class     properties.classification: {"name": …}, {"names": [… ]}, or a text
Tissue    tissue; if no area has it, all areas but those whose class ends with * (QuPath: ignored)
Ignore*   no tissue, also inside of tissue
```
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyfi_core.errors import RequestError

Polygon = list[list[list[float]]]
"""Rings of (x, y): the outer one, then the holes."""

TISSUE_CLASS = "Tissue"
IGNORED_CLASS = "Ignore*"


@dataclass(frozen=True)
class Areas:
    """The areas of one file, in level-0 pixels from the corner of the slide's bounds.

    Attributes:
        tissue: Polygons of the tissue; not empty.
        ignored: Polygons that are cut out of the tissue.
        left_out: How many objects of each kind the file has besides these, as text; empty if there are none.
    """

    tissue: tuple[Polygon, ...]
    ignored: tuple[Polygon, ...] = ()
    left_out: str = ""


def read_areas(path: Path, data: bytes) -> Areas:
    """Return the areas of a GeoJSON file; see the top of this module.

    Args:
        path: The file, for messages.
        data: Its content.

    Raises:
        RequestError: It is not GeoJSON, has no area of tissue, or an invalid polygon.
    """
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not GeoJSON ({error}); export annotations from QuPath as GeoJSON") from error
    of_class: dict[str, list[Polygon]] = {}
    left_out: Counter[str] = Counter()
    for name, geometry in _geometries(content, ""):
        kind = str(geometry.get("type"))
        coordinates = geometry.get("coordinates")
        if kind not in ("Polygon", "MultiPolygon"):
            left_out[kind if kind != "None" else "empty"] += 1
            continue
        # Of invalid files, coordinates may be anything: `_checked` refuses what is no list.
        polygons = [coordinates] if kind == "Polygon" else coordinates or [[]]
        for rings in polygons if isinstance(polygons, list) else [polygons]:
            if isinstance(rings, list) and not (rings and rings[0]):
                left_out["empty"] += 1
            else:
                of_class.setdefault(name, []).append(_checked(path, rings))
    # Popped: what remains in `of_class` at the end is left out.
    ignored = of_class.pop(IGNORED_CLASS.lower(), [])
    names = [TISSUE_CLASS.lower()] if TISSUE_CLASS.lower() in of_class else [n for n in of_class if not n.endswith("*")]
    tissue = [polygon for name in names for polygon in of_class.pop(name)]
    left_out.update({f"of the class {name or '(none)'}": len(polygons) for name, polygons in of_class.items()})
    listed = ", ".join(f"{count} {kind}" for kind, count in left_out.items())
    if not tissue:
        others = listed or (f"areas of the class {IGNORED_CLASS}" if ignored else "")
        note = f" (only {others})" if others else ""
        raise RequestError(
            f"{path}: it has no polygon of tissue{note}; draw areas of the class {TISSUE_CLASS} and export them as "
            "GeoJSON"
        )
    return Areas(tuple(tissue), tuple(ignored), listed)


def _geometries(item: Any, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (class in lower case, geometry) of all geometries in a GeoJSON object and in the collections inside it.

    ``name`` is the class of the feature that the object is in; empty if it is in none.
    """
    if isinstance(item, list):
        for part in item:
            yield from _geometries(part, name)
    elif isinstance(item, dict) and "features" in item:
        yield from _geometries(item["features"] or [], name)
    elif isinstance(item, dict) and "geometries" in item:
        yield from _geometries(item["geometries"] or [], name)
    elif isinstance(item, dict) and "geometry" in item:
        inner = item["geometry"]
        yield from _geometries(inner, _class_of(item)) if inner else [(name, {})]
    elif isinstance(item, dict) and "type" in item:
        yield name, item


def _class_of(feature: Mapping[str, Any]) -> str:
    """Return the class of a feature in lower case; ``a: b`` for a class with a subclass; empty if it has none."""
    properties = feature.get("properties")
    classification = properties.get("classification") if isinstance(properties, dict) else None
    if isinstance(classification, dict):
        names = classification.get("names")
        classification = classification.get("name") or (
            ": ".join(map(str, names)) if isinstance(names, list) else names
        )
    return str(classification or "").strip().lower()


def _checked(path: Path, rings: Any) -> Polygon:
    """Return the rings of a polygon as numbers, without those that are empty."""
    try:
        # A third coordinate, a height, is dropped.
        polygon = [[[float(x), float(y)] for x, y, *_ in ring] for ring in rings if ring]
        if any(len(ring) < 3 for ring in polygon):
            raise ValueError("fewer than three points")
        if not all(math.isfinite(v) for ring in polygon for point in ring for v in point):
            raise ValueError("a coordinate that is not a finite number")
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"{path}: it has an invalid polygon ({error})") from error
    return polygon
