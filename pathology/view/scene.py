"""What a viewer answers about the slides of a gallery: facts, tiles, layers, regions, annotations."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from hyfi_core.errors import RequestError
from pathology.view.annotations import AnnotationFile, level0_collection, shown_collection
from pathology.view.byte_cache import ByteCache
from pathology.view.encode import jpeg, png
from pathology.view.gallery import Gallery, GallerySlide
from pathology.view.layers import HeatmapFile, LayerError, LayerPainter
from pathology.view.pixels import ShownSlide, TissueMask
from pathology.view.tiles import TILE_PX, TileCutter, TileGrid

TISSUE = "tissue"
HEATMAP_FILE, REGIONS_FILE = "heatmap.tiff", "regions.geojson"
MOST_MASKS = 8
Place = tuple[int, int, int]
"""(zoom, row, column) of a tile."""


class NotInGalleryError(RequestError):
    """There is no such slide, layer or tile."""


class Scene:
    """Answers about the slides of a gallery. Threads may share one.

    Args:
        gallery: what may be shown.
        cache_bytes: for decoded pixels and maps together.
    """

    def __init__(self, gallery: Gallery, cache_bytes: int) -> None:
        self.gallery = gallery
        self.cache = ByteCache(cache_bytes)
        self._cutter, self._painter = TileCutter(self.cache), LayerPainter(self.cache)
        self._heatmaps: dict[tuple[str, int], HeatmapFile] = {}
        self._masks: dict[str, TissueMask] = {}
        self._finding = threading.Lock()

    def slides(self) -> list[dict[str, Any]]:
        """Return the list of slides, with the reasons why some cannot be shown."""
        reasons = self.gallery.reasons
        return [
            {"key": one.key, "prediction": one.prediction, "reason": reasons.get(one.key, "")}
            for one in self.gallery.slides.values()
        ]

    def about(self, key: str) -> dict[str, Any]:
        """Return what the page must know of a slide.

        Raises:
            NotInGalleryError, SlideError, StoreError: it cannot be shown.
        """
        one = self._slide(key)
        layers, note = self._layers(one)
        with self.gallery.opened(key) as slide:
            grid = TileGrid.of(slide)
            return {
                "key": key,
                "slide_id": one.slide_id,
                "prediction": one.prediction,
                "height_px": grid.height_px,
                "width_px": grid.width_px,
                "finest_zoom": grid.finest_zoom,
                "tile_px": TILE_PX,
                "mpp": slide.mpp,
                "facts": slide.facts,
                "tissue": slide.mpp is not None,
                "layers": layers,
                "layers_note": note,
                "regions": _file_of(one, REGIONS_FILE) is not None,
                "annotations": _saving_words(one),
            }

    def tile(self, key: str, place: Place, lossless: bool) -> bytes:
        """Return a tile of a slide as PNG (exactly the pixels that are cut) or JPEG.

        Raises:
            NotInGalleryError, SlideError, StoreError: it cannot be shown.
        """
        self._slide(key)
        with self.gallery.opened(key) as slide:
            pixels = self._cutter.cut(slide, key, *place)
        if pixels is None:
            raise NotInGalleryError(f"{key} has no tile {place}")
        return png(pixels) if lossless else jpeg(pixels)

    def layer(self, key: str, layer: str, place: Place, smooth: bool) -> bytes:
        """Return a tile of a layer as PNG.

        Args:
            key: of the slide.
            layer: ``tissue``, or the number of a channel of its heatmap.
            place: of the tile.
            smooth: whether values are interpolated between cells.

        Raises:
            NotInGalleryError, LayerError, SlideError, StoreError: it cannot be shown.
        """
        one = self._slide(key)
        with self.gallery.opened(key) as slide:
            if TileGrid.of(slide).box(*place).empty:
                raise NotInGalleryError(f"{key} has no tile {place}")
            if layer == TISSUE:
                return png(self._painter.tissue(slide, self._tissue(key, slide), place))
            heatmap = self._heatmap(one)
            if heatmap is None or not layer.isdecimal() or int(layer) >= len(heatmap.channels):
                raise NotInGalleryError(f"{key} has no layer {layer}")
            return png(self._painter.heatmap(slide, heatmap, heatmap.channels[int(layer)], place, smooth))

    def regions(self, key: str) -> dict[str, Any]:
        """Return the regions of a slide's prediction in shown pixels; none where there is no prediction.

        Raises:
            NotInGalleryError, SlideError, StoreError, AnnotationError, OSError: they cannot be read.
        """
        path = _file_of(self._slide(key), REGIONS_FILE)
        if path is None:
            return {"type": "FeatureCollection", "features": []}
        with self.gallery.opened(key) as slide:
            return shown_collection(path.read_bytes(), str(path), slide.to_level0)

    def annotations(self, key: str) -> tuple[dict[str, Any], str]:
        """Return a slide's annotations in shown pixels, and their state.

        Raises:
            NotInGalleryError, SlideError, StoreError, AnnotationError, OSError: they cannot be read.
        """
        file = self._annotation_file(key)
        return file.load() if file is not None else ({"type": "FeatureCollection", "features": []}, "")

    def save(self, key: str, data: bytes, state: str) -> str:
        """Replace a slide's annotations and return their new state; see `AnnotationFile.save`.

        Raises:
            RequestError: they are not saved; the message says why.
        """
        file = self._annotation_file(key)
        if file is None:
            raise RequestError(f"{key}: {_saving_words(self._slide(key))['reason']}")
        return file.save(data, state)

    def exported(self, key: str, data: bytes) -> dict[str, Any]:
        """Return annotations given in shown pixels as they count for QuPath; nothing is written.

        Raises:
            RequestError, SlideError: they are no GeoJSON, or the slide cannot be opened.
        """
        self._slide(key)
        with self.gallery.opened(key) as slide:
            return level0_collection(data, slide.to_level0)

    def _annotation_file(self, key: str) -> AnnotationFile | None:
        path = self._slide(key).annotations
        if path is None:
            return None
        with self.gallery.opened(key) as slide:
            return AnnotationFile(path, slide.to_level0)

    def _slide(self, key: str) -> GallerySlide:
        try:
            return self.gallery.slides[key]
        except KeyError:
            raise NotInGalleryError(f"there is no slide {key!r} here") from None

    def _layers(self, one: GallerySlide) -> tuple[list[dict[str, Any]], str]:
        """Return the maps of a slide's prediction, and why there are none."""
        try:
            heatmap = self._heatmap(one)
        except LayerError as error:
            return [], str(error)
        found = [
            {
                "id": str(channel.index),
                "kind": channel.kind,
                "class_name": channel.class_name,
                "color": channel.color,
                "strongest": channel.strongest,
            }
            for channel in (heatmap.channels if heatmap else ())
        ]
        return found, ""

    def _heatmap(self, one: GallerySlide) -> HeatmapFile | None:
        path = _file_of(one, HEATMAP_FILE)
        if path is None:
            return None
        state = str(path), path.stat().st_mtime_ns
        if state not in self._heatmaps:
            self._heatmaps[state] = HeatmapFile(path)
        return self._heatmaps[state]

    def _tissue(self, key: str, slide: ShownSlide) -> TissueMask:
        """Return where the tissue of a slide is; found once."""
        with self._finding:  # a browser asks for several tiles at once; to find it twice would take twice as long
            found = self._masks.get(key)
            if found is None:
                found = slide.tissue()
                if found is None:
                    raise NotInGalleryError(f"{key}: where its tissue is is not known")
                self._masks[key] = found
                while len(self._masks) > MOST_MASKS:
                    del self._masks[next(iter(self._masks))]
            return found


def _file_of(one: GallerySlide, name: str) -> Path | None:
    """Return a file of a slide's results; None where there is none."""
    if one.predictions is None:
        return None
    path = one.predictions / one.slide_id / name
    return path if path.is_file() else None


def _saving_words(one: GallerySlide) -> dict[str, Any]:
    """Return whether annotations of a slide are saved, where, and why not."""
    if one.annotations is None:
        return {"saved": False, "path": "", "reason": "start with --annotations DIR to save what is drawn"}
    folder = one.annotations.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return {"saved": False, "path": "", "reason": f"{folder} cannot be written; start with --annotations DIR"}
    return {"saved": True, "path": str(one.annotations), "reason": ""}
