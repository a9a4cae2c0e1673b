"""What lies over a slide as tiles: the outline of its tissue, and the maps of a prediction's ``heatmap.tiff``.

A pixel of a layer's tile shows the cell under its centre, found through the same affine maps that put the cells on the
slide; so layers are in register at any zoom, whatever the slide is shown from.
"""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyfi_core.errors import RequestError
from pathology.ingest.thumbnail import OUTLINE
from pathology.predict.colors import class_color
from pathology.tissue.outlines import SlideGrid
from pathology.view.byte_cache import ByteCache
from pathology.view.pixels import ShownSlide, TissueMask
from pathology.view.tiles import TILE_PX, TileGrid

RGBA = NDArray[np.uint8]
SCORE, CONTRIBUTION = "score", "contribution"
AGAINST_RGB = (64, 68, 78)
"""What speaks against a class."""
STRONGEST_ALPHA = 235
_OUTLINE_PX = 2
_LOUD_PERCENTILE = 99.5
_LARGEST_FOR_RANGE_PX = 1_000_000
_OME = "{http://www.openmicroscopy.org/Schemas/OME/2016-06}"


class LayerError(RequestError):
    """A heatmap cannot be shown."""


@dataclass(frozen=True)
class HeatmapChannel:
    """One map of a prediction.

    Attributes:
        index: of the channel in the file.
        kind: ``score`` or ``contribution``.
        class_name: of which class.
        color: of the class.
        strongest: the value that is drawn in full: 1 of a score, of contributions what few places exceed.
        offset: what every place was given alike; taken off before drawing.
    """

    index: int
    kind: str
    class_name: str
    color: tuple[int, int, int]
    strongest: float
    offset: float

    @property
    def name(self) -> str:
        """The channel's name in the file."""
        return f"{self.kind} {self.class_name}"


class HeatmapFile:
    """The maps of one ``heatmap.tiff``; threads may share one. Every read opens the file anew: nothing to close.

    Args:
        path: the file.

    Raises:
        LayerError: it cannot be read, or does not say where it lies on the slide.
    """

    def __init__(self, path: Path) -> None:
        import tifffile

        self.path = path
        try:
            with tifffile.TiffFile(path) as file:
                about, names = _annotation(file.ome_metadata or "")
                self._shapes = [level.shape[-2:] for level in file.series[0].levels]
        except (OSError, ValueError, IndexError, ElementTree.ParseError, tifffile.TiffFileError) as error:
            raise LayerError(f"{path}: cannot be read ({error})") from error
        if "cell_to_level0" not in about:
            raise LayerError(f"{path}: does not say where it lies on the slide; predict again with --overwrite")
        self.cells = SlideGrid(np.array(about["cell_to_level0"], np.float64))
        classes, shared = list(about["class_names"]), list(about["background_share_per_pixel"])
        self.channels = tuple(self._channel(k, name, classes, shared) for k, name in enumerate(names))

    def values(self, channel: int, level: int = 0) -> NDArray[np.float32]:
        """Return ``(rows, columns)`` float32 of a channel, NaN where the network did not look."""
        import tifffile

        with tifffile.TiffFile(self.path) as file:
            return np.asarray(file.series[0].levels[level].pages[channel].asarray(), np.float32)  # type: ignore[union-attr]

    def level_for(self, cells_per_pixel: float) -> int:
        """Return the coarsest level whose cells are not larger than a pixel that spans so many of the finest."""
        return min(len(self._shapes) - 1, max(0, math.floor(math.log2(max(cells_per_pixel, 1.0)))))

    def _channel(self, index: int, name: str, classes: list[str], shared: list[float]) -> HeatmapChannel:
        kind, _, class_name = name.partition(" ")
        if kind not in (SCORE, CONTRIBUTION) or class_name not in classes:
            raise LayerError(f"{self.path}: has a channel {name!r}; score or contribution of a class is expected")
        place = classes.index(class_name)
        if kind == SCORE:
            return HeatmapChannel(index, kind, class_name, class_color(place), 1.0, 0.0)
        small = next(
            (k for k, shape in enumerate(self._shapes) if shape[0] * shape[1] <= _LARGEST_FOR_RANGE_PX),
            len(self._shapes) - 1,
        )
        strength = np.abs(self.values(index, small) - shared[place])
        seen = strength[np.isfinite(strength)]
        strongest = float(np.percentile(seen, _LOUD_PERCENTILE)) if seen.size else 0.0
        return HeatmapChannel(index, kind, class_name, class_color(place), strongest or 1.0, shared[place])


def _annotation(ome_xml: str) -> tuple[dict[str, Any], list[str]]:
    """Return the map annotation, its values read as JSON where they are, and the names of the channels."""
    root = ElementTree.fromstring(ome_xml)
    about: dict[str, Any] = {}
    for entry in root.iter(f"{_OME}M"):
        text = entry.text or ""
        try:
            about[entry.get("K", "")] = json.loads(text)
        except ValueError:
            about[entry.get("K", "")] = text
    return about, [channel.get("Name", "") for channel in root.iter(f"{_OME}Channel")]


class LayerPainter:
    """Paints tiles of layers. Threads may share one.

    Args:
        cache: keeps maps and masks.
    """

    def __init__(self, cache: ByteCache) -> None:
        self._cache = cache

    def heatmap(
        self,
        slide: ShownSlide,
        heatmap: HeatmapFile,
        channel: HeatmapChannel,
        place: tuple[int, int, int],
        smooth: bool,
    ) -> RGBA:
        """Return a tile ``(TILE_PX, TILE_PX, 4)`` of a map.

        Args:
            slide: what it lies over.
            heatmap: the file.
            channel: of it.
            place: (zoom, row, column) of the tile.
            smooth: between the centres of cells values are interpolated; else each cell has one colour.
        """
        y, x = _shown_points(slide, place)
        to_cells = np.linalg.inv(_square(heatmap.cells)) @ _square(slide.to_level0)
        rows, columns = _along(to_cells[0], y, x), _along(to_cells[1], y, x)
        level = heatmap.level_for(TileGrid.of(slide).scale(place[0]) * float(np.abs(to_cells[0, :2]).max()))
        values = self._cache.get(
            (str(heatmap.path), channel.index, level), lambda: heatmap.values(channel.index, level)
        )
        factor = 2**level
        sampled = (interpolated if smooth else nearest)(values, rows / factor, columns / factor)
        return painted(sampled - channel.offset, channel)

    def tissue(self, slide: ShownSlide, tissue: TissueMask, place: tuple[int, int, int]) -> RGBA:
        """Return a tile with the outline of the tissue; the rest is transparent."""
        y, x = _shown_points(slide, place, margin=_OUTLINE_PX)
        inside = nearest(tissue.mask.astype(np.float32), y / tissue.pixel_px[0], x / tissue.pixel_px[1]) > 0
        edge = np.zeros_like(inside)
        for shift in (-_OUTLINE_PX, _OUTLINE_PX):
            edge |= inside & ~np.roll(inside, shift, 0)
            edge |= inside & ~np.roll(inside, shift, 1)
        out: RGBA = np.zeros((TILE_PX, TILE_PX, 4), np.uint8)
        out[edge[_OUTLINE_PX:-_OUTLINE_PX, _OUTLINE_PX:-_OUTLINE_PX]] = (*OUTLINE, 255)
        return out


def painted(values: NDArray[np.float32], channel: HeatmapChannel) -> RGBA:
    """Return values as colours: the class's where they speak for it, grey where against, the stronger the denser."""
    strength = np.nan_to_num(values / channel.strongest)
    out: RGBA = np.empty((*values.shape, 4), np.uint8)
    out[..., :3] = np.where((strength >= 0)[..., None], channel.color, AGAINST_RGB)
    out[..., 3] = np.rint(np.minimum(np.abs(strength), 1.0) * STRONGEST_ALPHA)
    return out


def nearest(
    values: NDArray[np.float32], rows: NDArray[np.float64], columns: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Return the values of the cells under points, NaN beyond the map.

    Args:
        values: (rows, columns); cell (i, j) covers ``[i, i + 1) × [j, j + 1)``.
        rows: of the points.
        columns: likewise, of a shape that broadcasts with it.
    """
    i, j = np.floor(rows).astype(np.intp), np.floor(columns).astype(np.intp)
    inside = (i >= 0) & (i < values.shape[0]) & (j >= 0) & (j < values.shape[1])
    found = values[np.clip(i, 0, values.shape[0] - 1), np.clip(j, 0, values.shape[1] - 1)]
    return np.where(inside, found, np.float32(np.nan))


def interpolated(
    values: NDArray[np.float32], rows: NDArray[np.float64], columns: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Return values between the centres of cells; NaN where `nearest` is, cells without a value do not count."""
    y, x = rows - 0.5, columns - 0.5
    i, j = np.floor(y).astype(np.intp), np.floor(x).astype(np.intp)
    down, across = (y - i).astype(np.float32), (x - j).astype(np.float32)
    total: NDArray[np.float32] = np.zeros(np.broadcast_shapes(rows.shape, columns.shape), np.float32)
    weight = np.zeros_like(total)
    for step_y, part_y in ((0, 1 - down), (1, down)):
        for step_x, part_x in ((0, 1 - across), (1, across)):
            at = (np.clip(i + step_y, 0, values.shape[0] - 1), np.clip(j + step_x, 0, values.shape[1] - 1))
            found = values[at]
            part = np.where(np.isfinite(found), part_y * part_x, np.float32(0))
            total += np.nan_to_num(found) * part
            weight += part
    known = np.isfinite(nearest(values, rows, columns))
    return np.where(known, total / np.maximum(weight, np.float32(1e-6)), np.float32(np.nan))


def _shown_points(
    slide: ShownSlide, place: tuple[int, int, int], margin: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (y, x) of the centres of a tile's pixels in shown pixels, (n, 1) and (1, n), ``margin`` more around."""
    zoom, row, column = place
    scale = TileGrid.of(slide).scale(zoom)
    steps = np.arange(-margin, TILE_PX + margin, dtype=np.float64) + 0.5
    y, x = (np.asarray((first * TILE_PX + steps) * scale, np.float64) for first in (row, column))
    return y[:, None], x[None, :]


def _along(axis: NDArray[np.float64], y: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return one coordinate of mapped points; a column or a row where the other coordinate does not count."""
    terms = [factor * points for factor, points in zip(axis[:2], (y, x), strict=True) if factor]
    return np.asarray(sum(terms, start=np.float64(axis[2])), np.float64)


def _square(grid: SlideGrid) -> NDArray[np.float64]:
    return np.vstack([grid.affine, [0.0, 0.0, 1.0]])
