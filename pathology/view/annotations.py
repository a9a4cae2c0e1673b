"""Annotations of slides as GeoJSON files for QuPath, in pixels of level 0 from the corner of the slide's bounds.

They are stored in ``<folder>/<slide_id>.geojson``, not beside the slides, and a file is always replaced as a whole. A
save states the version (a digest) that was loaded. If the file has changed since, the save is refused, so that changes
of another user are not lost.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import write_atomically
from hyfi_core.errors import RequestError
from pathology.tissue.outlines import SlideGrid

LARGEST_BYTES = 64 * 2**20
NO_FILE = "none"
_DEPTHS = {"Point": 0, "MultiPoint": 1, "LineString": 1, "Polygon": 2, "MultiLineString": 2, "MultiPolygon": 3}
"""Nesting depth of the positions in the coordinates of a geometry."""

MapPoints = Callable[[Any], list[list[float]]]


class AnnotationError(RequestError):
    """The data is not GeoJSON of annotations."""


class ChangedMeanwhileError(RequestError):
    """The file has changed since the annotations were loaded."""


@dataclass(frozen=True)
class AnnotationFile:
    """The annotations of one slide.

    Attributes:
        path: ``<folder>/<slide_id>.geojson``; need not exist.
        grid: Map between shown pixels and level 0.
    """

    path: Path
    grid: SlideGrid

    def load(self) -> tuple[dict[str, Any], str]:
        """Return the feature collection in shown pixels, and the version of the file, for `save`.

        Raises:
            AnnotationError: The file is not GeoJSON.
            OSError: The file cannot be read.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return {"type": "FeatureCollection", "features": []}, NO_FILE
        return shown_collection(data, str(self.path), self.grid), _version(data)

    def save(self, data: bytes, version: str) -> str:
        """Replace the file by a feature collection in shown pixels, and return its new version.

        Args:
            data: GeoJSON.
            version: The version that `load` or the last `save` returned.

        Raises:
            AnnotationError: The data is not GeoJSON of annotations; nothing is written.
            ChangedMeanwhileError: The file has another version and other content; nothing is written.
            OSError: The file cannot be written.
        """
        collection = level0_collection(data, self.grid)
        text = (json.dumps(collection, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "backslashreplace")
        # Comparison and replacement are one step: of two saves with the same version, one must be refused.
        with _saving:
            try:
                current = _version(self.path.read_bytes())
            except FileNotFoundError:
                current = NO_FILE
            # A client that got no answer sends the same content again, which was saved the first time.
            if current == _version(text):
                return current
            if current != version:
                raise ChangedMeanwhileError(f"{self.path}: was changed by somebody else; load the page again to see it")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, text)
        return _version(text)


_saving = threading.Lock()


def parsed(data: bytes, name: str) -> dict[str, Any]:
    """Parse GeoJSON into a feature collection with valid geometries.

    Args:
        data: A feature collection, a list of features, or one feature.
        name: Name of the data in error messages.

    Raises:
        AnnotationError: The data is too large or invalid; the message says what is wrong.
    """
    # Checked before it is parsed: parsed JSON takes many times its size in memory.
    if len(data) > LARGEST_BYTES:
        raise AnnotationError(f"{name}: has {len(data) / 1e6:.0f} MB; at most {LARGEST_BYTES / 1e6:.0f} MB are read")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AnnotationError(f"{name}: is not GeoJSON ({error})") from error
    if isinstance(document, dict) and document.get("type") == "Feature":
        document = [document]
    if isinstance(document, list):  # QuPath writes features without a collection, too
        document = {"type": "FeatureCollection", "features": document}
    if not isinstance(document, dict) or not isinstance(document.get("features"), list):
        raise AnnotationError(f"{name}: is not a feature collection")
    for number, feature in enumerate(document["features"]):
        geometry = feature.get("geometry") if isinstance(feature, dict) else None
        kind = geometry.get("type") if isinstance(geometry, dict) else None
        if not isinstance(geometry, dict) or not isinstance(kind, str) or kind not in _DEPTHS:
            raise AnnotationError(
                f"{name}: feature {number} has the geometry {kind}; supported are {', '.join(_DEPTHS)}"
            )
        if not _are_valid(geometry.get("coordinates"), _DEPTHS[kind]):
            raise AnnotationError(f"{name}: feature {number} has invalid coordinates for a {kind}")
    return document


def shown_collection(data: bytes, name: str, grid: SlideGrid) -> dict[str, Any]:
    """Convert GeoJSON in level-0 pixels, as of QuPath, to a feature collection in shown pixels.

    Args:
        data: Content of the file.
        name: Name of the file in error messages.
        grid: Map between shown pixels and level 0.

    Raises:
        AnnotationError: The data is not GeoJSON.
    """
    # `from_level0` returns rows and columns; GeoJSON has x first.
    return _mapped_collection(parsed(data, name), lambda ring: grid.from_level0(ring)[:, ::-1].round(3).tolist())


def level0_collection(data: bytes, grid: SlideGrid) -> dict[str, Any]:
    """Convert GeoJSON in shown pixels to a feature collection in level-0 pixels, as of QuPath.

    Raises:
        AnnotationError: The data is not GeoJSON of annotations.
    """
    return _mapped_collection(parsed(data, "annotations"), grid.to_level0)


def _mapped_collection(collection: dict[str, Any], map_points: MapPoints) -> dict[str, Any]:
    """Return a copy of a feature collection with all positions mapped and everything else unchanged."""
    features = []
    for feature in collection["features"]:
        geometry = feature["geometry"]
        coordinates = _mapped(geometry["coordinates"], _DEPTHS[geometry["type"]], map_points)
        features.append({**feature, "geometry": {**geometry, "coordinates": coordinates}})
    return {**collection, "features": features}


def _mapped(coordinates: Any, depth: int, map_points: MapPoints) -> Any:
    """Return the coordinates of a geometry with all positions mapped; see `_DEPTHS`."""
    if depth == 0:
        return map_points([coordinates[:2]])[0]
    if depth == 1:
        # All points of a ring at once, which is a single product of matrices.
        return map_points([position[:2] for position in coordinates]) if coordinates else []
    return [_mapped(part, depth - 1, map_points) for part in coordinates]


def _are_valid(coordinates: Any, depth: int) -> bool:
    """Whether coordinates are nested lists of this depth with finite positions; see `_DEPTHS`."""
    if not isinstance(coordinates, list):
        return False
    if depth:
        return all(_are_valid(part, depth - 1) for part in coordinates)
    return len(coordinates) >= 2 and all(map(_is_finite_number, coordinates))


def _is_finite_number(value: Any) -> bool:
    """Whether a value of JSON is a number within the range of a float."""
    # JSON's `true` is an int in Python, and its NaN and Infinity, which the standard lacks, are floats.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number may have any number of digits
        return False


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
