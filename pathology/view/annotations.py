"""Annotations drawn on slides, as GeoJSON that QuPath opens: pixels of level 0, minus the slide's bounds.

They lie in ``<folder>/<slide_id>.geojson``, never beside the slides' files, and are replaced as a whole. Whoever saves
says which state they began from; where somebody else saved meanwhile, they are refused rather than lose his work.
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
"""How deep positions lie in a geometry's coordinates."""


Move = Callable[[Any], list[list[float]]]


class AnnotationError(RequestError):
    """What was given is no GeoJSON of annotations."""


class ChangedMeanwhileError(RequestError):
    """The file is not what the annotations were loaded from."""


@dataclass(frozen=True)
class AnnotationFile:
    """The annotations of one slide.

    Attributes:
        path: ``<folder>/<slide_id>.geojson``; need not exist.
        grid: from shown pixels to level 0 as QuPath counts it.
    """

    path: Path
    grid: SlideGrid

    def load(self) -> tuple[dict[str, Any], str]:
        """Return the feature collection in shown pixels, and its state, to be given to `save`.

        Raises:
            AnnotationError: the file is no GeoJSON.
            OSError: it cannot be read.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return {"type": "FeatureCollection", "features": []}, NO_FILE
        return shown_collection(data, str(self.path), self.grid), _state(data)

    def save(self, data: bytes, state: str) -> str:
        """Replace the file by a feature collection in shown pixels, and return its new state.

        Args:
            data: GeoJSON.
            state: what `load` or the last `save` returned.

        Raises:
            AnnotationError: it is no GeoJSON of annotations; nothing is written.
            ChangedMeanwhileError: the file has another state; nothing is written.
            OSError: it cannot be written.
        """
        collection = level0_collection(data, self.grid)
        text = (json.dumps(collection, ensure_ascii=False, indent=1) + "\n").encode()
        with _saving:
            try:
                now = _state(self.path.read_bytes())
            except FileNotFoundError:
                now = NO_FILE
            if now != state:
                raise ChangedMeanwhileError(f"{self.path}: was changed by somebody else; load the page again to see it")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, text)
        return _state(text)


_saving = threading.Lock()


def parsed(data: bytes, name: str) -> dict[str, Any]:
    """Return GeoJSON as a feature collection whose geometries are sound.

    Raises:
        AnnotationError: it is something else; the message says what.
    """
    if len(data) > LARGEST_BYTES:
        raise AnnotationError(f"{name}: has {len(data) / 1e6:.0f} MB; at most {LARGEST_BYTES / 1e6:.0f} MB are read")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AnnotationError(f"{name}: is no GeoJSON ({error})") from error
    if isinstance(found, dict) and found.get("type") == "Feature":
        found = [found]
    if isinstance(found, list):  # QuPath writes features without a collection, too
        found = {"type": "FeatureCollection", "features": found}
    if not isinstance(found, dict) or not isinstance(found.get("features"), list):
        raise AnnotationError(f"{name}: is no feature collection")
    for number, feature in enumerate(found["features"]):
        geometry = feature.get("geometry") if isinstance(feature, dict) else None
        kind = geometry.get("type") if isinstance(geometry, dict) else None
        if not isinstance(geometry, dict) or not isinstance(kind, str) or kind not in _DEPTHS:
            raise AnnotationError(f"{name}: feature {number} has the geometry {kind}; {', '.join(_DEPTHS)} are known")
        if not _sound(geometry.get("coordinates"), _DEPTHS[kind]):
            raise AnnotationError(f"{name}: the coordinates of feature {number} are no {kind}")
    return found


def shown_collection(data: bytes, name: str, grid: SlideGrid) -> dict[str, Any]:
    """Return GeoJSON that counts as QuPath does as a feature collection in shown pixels.

    Args:
        data: the file's content.
        name: what to call it in errors.
        grid: of the slide.

    Raises:
        AnnotationError: it is no GeoJSON.
    """
    return _moved(parsed(data, name), lambda ring: grid.from_level0(ring)[:, ::-1].round(3).tolist())


def level0_collection(data: bytes, grid: SlideGrid) -> dict[str, Any]:
    """Return GeoJSON in shown pixels as a feature collection that counts as QuPath does.

    Raises:
        AnnotationError: it is no GeoJSON of annotations.
    """
    return _moved(parsed(data, "annotations"), grid.to_level0)


def _moved(collection: dict[str, Any], move: Move) -> dict[str, Any]:
    """Return a feature collection with all its positions moved; everything else stays as it is."""
    features = []
    for feature in collection["features"]:
        geometry = feature["geometry"]
        places = _mapped(geometry["coordinates"], _DEPTHS[geometry["type"]], move)
        features.append({**feature, "geometry": {**geometry, "coordinates": places}})
    return {**collection, "features": features}


def _mapped(coordinates: Any, depth: int, move: Move) -> Any:
    if depth == 0:
        return move([coordinates[:2]])[0]
    if depth == 1:
        return move([position[:2] for position in coordinates]) if coordinates else []
    return [_mapped(part, depth - 1, move) for part in coordinates]


def _sound(coordinates: Any, depth: int) -> bool:
    if not isinstance(coordinates, list):
        return False
    if depth:
        return all(_sound(part, depth - 1) for part in coordinates)
    numbers = [v for v in coordinates if isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)]
    return len(coordinates) >= 2 and len(numbers) == len(coordinates)


def _state(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
