"""Content of the viewer for the slides of a gallery: metadata, tiles, layers, regions, annotations."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from hyfi_core.errors import RequestError
from pathology.view.annotations import AnnotationFile, shown_collection
from pathology.view.byte_cache import ByteCache
from pathology.view.gallery import Gallery, GallerySlide
from pathology.view.layers import HeatmapChannel, HeatmapFile, LayerError, LayerPainter
from pathology.view.pixels import ShownSlide, TissueMask
from pathology.view.tiles import TILE_PX, TileCutter, TileGrid

TISSUE = "tissue"
MAP_FILES, REGIONS_FILE = ("heatmap.tiff", "occlusion.tiff", "gradient.tiff"), "regions.geojson"
MAX_MASKS = 8
JPEG_QUALITY = 90
_RUN_LENGTHS = 3
"""zlib's strategy for run-length encoding: nearly as small as the default, in half of the time."""
TileAddress = tuple[int, int, int]
"""(zoom, row, column) of a tile."""


class NotInGalleryError(RequestError):
    """The requested slide, layer or tile does not exist."""


class Scene:
    """Content of the viewer, independent of HTTP. Safe to use from several threads.

    Args:
        gallery: The slides.
        cache_bytes: Size of the cache of decoded pixels and heatmaps.
    """

    def __init__(self, gallery: Gallery, cache_bytes: int) -> None:
        self.gallery = gallery
        self.cache = ByteCache(cache_bytes)
        self._cutter, self._painter = TileCutter(self.cache), LayerPainter(self.cache)
        self._maps: dict[tuple[str, int], HeatmapFile] = {}
        self._masks: dict[str, TissueMask] = {}
        self._mask_lock = threading.Lock()

    def slides(self) -> list[dict[str, Any]]:
        """Return the list of slides as JSON, with the reasons why some cannot be shown."""
        reasons = self.gallery.reasons
        return [
            {"key": entry.key, "prediction": entry.prediction, "reason": reasons.get(entry.key, "")}
            for entry in self.gallery.slides.values()
        ]

    def about(self, key: str) -> dict[str, Any]:
        """Return the metadata of a slide as JSON.

        Raises:
            NotInGalleryError, SlideError, StoreError: The slide cannot be shown.
        """
        entry = self._slide(key)
        layers, note = self._layers(entry)
        with self.gallery.opened(key) as slide:
            grid = TileGrid.of(slide)
            return {
                "key": key,
                "slide_id": entry.slide_id,
                "prediction": entry.prediction,
                "height_px": grid.height_px,
                "width_px": grid.width_px,
                "finest_zoom": grid.finest_zoom,
                "tile_px": TILE_PX,
                "mpp": slide.mpp,
                "to_level0": slide.to_level0.affine.tolist(),
                "facts": slide.facts,
                "tissue": slide.mpp is not None,  # whether its outline can be shown: finding it takes a resolution
                "layers": layers,
                "layers_note": note,
                "regions": _file_of(entry, REGIONS_FILE) is not None,
                "annotations": _annotation_target(entry),
            }

    def tile(self, key: str, tile: TileAddress, lossless: bool) -> bytes:
        """Return a tile of a slide, as PNG if ``lossless``, else as JPEG.

        Raises:
            NotInGalleryError, SlideError, StoreError: The tile cannot be shown.
        """
        self._slide(key)
        with self.gallery.opened(key) as slide:
            # Open while it is cut: the gallery closes slides that nobody uses.
            pixels = self._cutter.cut(slide, key, *tile)
        if pixels is None:
            raise NotInGalleryError(f"{key} has no tile {tile}")
        # Encoded outside of the context: the slide is free for others.
        return png(pixels) if lossless else jpeg(pixels)

    def layer(self, key: str, layer: str, tile: TileAddress, smooth: bool) -> bytes:
        """Return a tile of a layer as PNG.

        Args:
            key: Key of the slide.
            layer: ``tissue``, or the index of a channel of its maps, in their order.
            tile: Position of the tile.
            smooth: Whether to interpolate between squares.

        Raises:
            NotInGalleryError, LayerError, SlideError, StoreError: The tile cannot be shown.
        """
        entry = self._slide(key)
        with self.gallery.opened(key) as slide:
            if TileGrid.of(slide).box(*tile).empty:
                raise NotInGalleryError(f"{key} has no tile {tile}")
            if layer == TISSUE:
                return png(self._painter.tissue(slide, self._tissue(key, slide), tile))
            channels = self._channels(entry)
            if not layer.isdecimal() or int(layer) >= len(channels):
                raise NotInGalleryError(f"{key} has no layer {layer}")
            file, channel = channels[int(layer)]
            return png(self._painter.heatmap(slide, file, channel, tile, smooth))

    def regions(self, key: str) -> dict[str, Any]:
        """Return the regions of a slide's prediction as GeoJSON in shown pixels; without features if there are none.

        Raises:
            NotInGalleryError, SlideError, StoreError, AnnotationError, OSError: They cannot be read.
        """
        path = _file_of(self._slide(key), REGIONS_FILE)
        if path is None:
            return {"type": "FeatureCollection", "features": []}
        with self.gallery.opened(key) as slide:
            return shown_collection(path.read_bytes(), str(path), slide.to_level0)

    def annotations(self, key: str) -> tuple[dict[str, Any], str]:
        """Return a slide's annotations as GeoJSON in shown pixels, and their version.

        Raises:
            NotInGalleryError, SlideError, StoreError, AnnotationError, OSError: They cannot be read.
        """
        file = self._annotation_file(key)
        return file.load() if file is not None else ({"type": "FeatureCollection", "features": []}, "")

    def save(self, key: str, data: bytes, version: str) -> str:
        """Replace a slide's annotations and return their new version; see `AnnotationFile.save`.

        Raises:
            RequestError: They are not saved; the message says why.
        """
        file = self._annotation_file(key)
        if file is None:
            raise RequestError(f"{key}: {_annotation_target(self._slide(key))['reason']}")
        return file.save(data, version)

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
            raise NotInGalleryError(f"there is no slide {key!r}") from None

    def _layers(self, entry: GallerySlide) -> tuple[list[dict[str, Any]], str]:
        """Return the channels of a slide's maps as JSON, and the reason if one cannot be read."""
        try:
            channels = self._channels(entry)
        except LayerError as error:
            return [], str(error)
        return [
            {
                "id": str(k),
                "kind": channel.kind,
                "class_name": channel.class_name,
                "color": channel.color,
                "strongest": channel.strongest,
            }
            for k, (_, channel) in enumerate(channels)
        ], ""

    def _channels(self, entry: GallerySlide) -> list[tuple[HeatmapFile, HeatmapChannel]]:
        """Return the channels of a slide's maps, in the order of `MAP_FILES`, each with its file."""
        paths = [path for name in MAP_FILES if (path := _file_of(entry, name)) is not None]
        return [(file, channel) for file in map(self._map, paths) for channel in file.channels]

    def _map(self, path: Path) -> HeatmapFile:
        path_and_time = str(path), path.stat().st_mtime_ns  # a changed file is read again
        if path_and_time not in self._maps:
            self._maps[path_and_time] = HeatmapFile(path)
        return self._maps[path_and_time]

    def _tissue(self, key: str, slide: ShownSlide) -> TissueMask:
        """Return the tissue mask of a slide, which is cached.

        Raises:
            NotInGalleryError: It is unknown.
        """
        with self._mask_lock:  # several tiles are requested at once; only the first request computes the mask
            mask = self._masks.get(key)
            if mask is None:
                mask = slide.tissue()
                if mask is None:
                    raise NotInGalleryError(f"{key}: its tissue mask is unknown")
                self._masks[key] = mask
                while len(self._masks) > MAX_MASKS:
                    # The oldest is dropped: dicts keep the order in which keys were added.
                    del self._masks[next(iter(self._masks))]
            return mask


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode ``(h, w, 3)`` or ``(h, w, 4)`` as PNG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1, compress_type=_RUN_LENGTHS)
    return buffer.getvalue()


def jpeg(pixels: NDArray[np.uint8]) -> bytes:
    """Encode ``(h, w, 3)`` as JPEG without chroma subsampling."""
    return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), quality=JPEG_QUALITY, colorsubsampling="444"))


def _file_of(entry: GallerySlide, name: str) -> Path | None:
    """Return a file of a slide's results; None if it does not exist."""
    if entry.predictions is None:
        return None
    path = entry.predictions / entry.slide_id / name
    return path if path.is_file() else None


def _annotation_target(entry: GallerySlide) -> dict[str, Any]:
    """Return as JSON whether annotations of a slide can be saved, and the file, or the reason why not."""
    if entry.annotations is None:
        return {"saved": False, "path": "", "reason": "start with --annotations DIR to save annotations"}
    # The nearest folder that exists: missing ones are made when annotations are saved.
    folder = entry.annotations.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return {"saved": False, "path": "", "reason": f"{folder} cannot be written; start with --annotations DIR"}
    return {"saved": True, "path": str(entry.annotations), "reason": ""}
