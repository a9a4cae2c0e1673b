"""Tiles of layers over a slide: the outline of its tissue, and the channels of a prediction's maps.

A pixel of a tile shows the heatmap's square under its centre, found with the affine matrices of slide and heatmap, so
layers are in register at any zoom, for slides of stores and of files.
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
from pathology.predict.colors import NEGATIVE_RGB, class_color
from pathology.tissue.outlines import SlideGrid
from pathology.view.byte_cache import ByteCache
from pathology.view.pixels import ShownSlide, TissueMask
from pathology.view.tiles import TILE_PX, TileGrid

RGBA = NDArray[np.uint8]
SCORE, CONTRIBUTION, ATTENTION, DROP, GRADIENT = "score", "contribution", "attention", "drop", "gradient"
ATTENTION_RGB = (124, 58, 237)
MAX_ALPHA = 235
_OUTLINE_PX = 2
_RANGE_PERCENTILE = 99.5
"""Percentile of the contributions that is drawn with full opacity."""
_MAX_RANGE_PX = 1_000_000
"""The percentile is computed from a level with at most this many squares."""
_OME = "{http://www.openmicroscopy.org/Schemas/OME/2016-06}"


class LayerError(RequestError):
    """A heatmap cannot be shown."""


@dataclass(frozen=True)
class HeatmapChannel:
    """One channel of a heatmap.

    Attributes:
        index: Index of the channel in the file.
        kind: ``score``, ``contribution``, ``attention``, ``drop`` (by how much an output drops when a block is covered)
            or ``gradient`` (an estimate of the drop).
        class_name: Its class; empty for attention.
        color: Colour of the class.
        strongest: The value that is drawn with full opacity: 1 for scores, a high percentile for others.
        offset: Subtracted before drawing: the background's part, which is equal in all squares.
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
        return f"{self.kind} {self.class_name}".rstrip()


class HeatmapFile:
    """One ``heatmap.tiff``, ``occlusion.tiff`` or ``gradient.tiff``. Several threads may use it; each read opens it.

    Args:
        path: The file.

    Attributes:
        path: The file.
        mtime_ns: Its time of modification when its metadata were read.
        grid: Map between squares and level 0.
        channels: Its channels, in the order of the file.

    Raises:
        LayerError: The file cannot be read, or does not state its position on the slide.
    """

    def __init__(self, path: Path) -> None:
        import tifffile

        self.path = path
        try:
            self.mtime_ns = path.stat().st_mtime_ns
            with tifffile.TiffFile(path) as file:
                metadata, names = _metadata_of(file.ome_metadata or "")
                self._shapes = [level.shape[-2:] for level in file.series[0].levels]
        except (OSError, ValueError, IndexError, ElementTree.ParseError, tifffile.TiffFileError) as error:
            raise LayerError(f"{path}: cannot be read ({error})") from error
        if "cell_to_level0" not in metadata:
            raise LayerError(f"{path}: does not state its position on the slide; predict again with --overwrite")
        self.grid = SlideGrid(np.array(metadata["cell_to_level0"], np.float64))
        classes = list(metadata["class_names"])
        backgrounds = list(metadata.get("background_share_per_pixel", [0.0] * len(classes)))
        self.channels = tuple(self._channel(k, name, classes, backgrounds) for k, name in enumerate(names))

    def values(self, channel: int, level: int = 0) -> NDArray[np.float32]:
        """Return a level of a channel, ``(rows, columns)`` float32; NaN in squares that were not seen."""
        import tifffile

        with tifffile.TiffFile(self.path) as file:
            return np.asarray(file.series[0].levels[level].pages[channel].asarray(), np.float32)  # type: ignore[union-attr]

    def level_for(self, squares_per_pixel: float) -> int:
        """Return the coarsest level whose squares are not larger than a pixel.

        Args:
            squares_per_pixel: Squares of the finest level for each pixel, along an axis.
        """
        return min(len(self._shapes) - 1, max(0, math.floor(math.log2(max(squares_per_pixel, 1.0)))))

    def _channel(self, index: int, name: str, classes: list[str], backgrounds: list[float]) -> HeatmapChannel:
        """Return how a channel of the file is shown: its colour and the range of its values.

        Args:
            index: Index of the channel.
            name: Name of the channel in the file, such as ``score tumour``.
            classes: Names of all classes, in the order of their colours.
            backgrounds: The background's part of each class, see ``HeatmapChannel.offset``.
        """
        kind, _, class_name = name.partition(" ")
        if name == ATTENTION:
            strongest = self._strongest(index, offset=0.0)
            return HeatmapChannel(index, kind, class_name="", color=ATTENTION_RGB, strongest=strongest, offset=0.0)
        if kind not in (SCORE, CONTRIBUTION, DROP, GRADIENT) or class_name not in classes:
            raise LayerError(
                f"{self.path}: has a channel {name!r}; expected score, contribution, drop or gradient of a class"
            )
        class_index = classes.index(class_name)
        if kind == SCORE:
            return HeatmapChannel(index, kind, class_name, class_color(class_index), strongest=1.0, offset=0.0)
        offset = backgrounds[class_index]
        strongest = self._strongest(index, offset)
        return HeatmapChannel(index, kind, class_name, class_color(class_index), strongest, offset)

    def _strongest(self, index: int, offset: float) -> float:
        """Return a high percentile of a channel's absolute values, after an offset is subtracted; 1 if that is 0."""
        # The finest level of few enough pixels.
        small = next(
            (k for k, shape in enumerate(self._shapes) if shape[0] * shape[1] <= _MAX_RANGE_PX),
            len(self._shapes) - 1,
        )
        strength = np.abs(self.values(index, small) - offset)
        finite = strength[np.isfinite(strength)]
        percentile = float(np.percentile(finite, _RANGE_PERCENTILE)) if finite.size else 0.0
        return percentile or 1.0  # not 0: values are divided by this


def _metadata_of(ome_xml: str) -> tuple[dict[str, Any], list[str]]:
    """Return the map annotation, with values parsed as JSON if possible, and the names of the channels."""
    root = ElementTree.fromstring(ome_xml)
    metadata: dict[str, Any] = {}
    for entry in root.iter(f"{_OME}M"):
        text = entry.text or ""
        try:
            metadata[entry.get("K", "")] = json.loads(text)
        except ValueError:
            metadata[entry.get("K", "")] = text
    return metadata, [channel.get("Name", "") for channel in root.iter(f"{_OME}Channel")]


class LayerPainter:
    """Renders tiles of layers. Safe to use from several threads.

    Args:
        cache: Cache for channels of heatmaps.
    """

    def __init__(self, cache: ByteCache) -> None:
        self._cache = cache

    def heatmap(
        self,
        slide: ShownSlide,
        heatmap: HeatmapFile,
        channel: HeatmapChannel,
        tile: tuple[int, int, int],
        smooth: bool,
    ) -> RGBA:
        """Return a tile of a heatmap, ``(TILE_PX, TILE_PX, 4)`` uint8.

        Args:
            slide: The slide below the layer.
            heatmap: The heatmap.
            channel: One of its channels.
            tile: (zoom, row, column) of the tile.
            smooth: Whether to interpolate between the centres of squares; otherwise each square has one colour.
        """
        y, x = _shown_points(slide, tile)
        # From shown pixels to level 0, and on to squares of the heatmap.
        to_squares = np.linalg.inv(_square(heatmap.grid)) @ _square(slide.to_level0)
        rows, columns = _along(to_squares[0], y, x), _along(to_squares[1], y, x)
        # The coarsest level with at least one square for each pixel: coarser ones would show blocks, finer ones would
        # take longer to read.
        level = heatmap.level_for(TileGrid.of(slide).scale(tile[0]) * float(np.abs(to_squares[0, :2]).max()))
        # The key has the file's time, because a slide may be predicted again while the viewer runs.
        key = (str(heatmap.path), heatmap.mtime_ns, channel.index, level)
        values = self._cache.get(key, lambda: heatmap.values(channel.index, level))
        factor = 2**level
        sampled = (interpolated if smooth else nearest)(values, rows / factor, columns / factor)
        return painted(sampled - channel.offset, channel)

    def tissue(self, slide: ShownSlide, tissue: TissueMask, tile: tuple[int, int, int]) -> RGBA:
        """Return a tile with the outline of the tissue, transparent elsewhere, ``(TILE_PX, TILE_PX, 4)`` uint8."""
        # With a margin, so that outlines have no gaps where tiles meet.
        y, x = _shown_points(slide, tile, margin=_OUTLINE_PX)
        inside = nearest(tissue.mask.astype(np.float32), y / tissue.pixel_px[0], x / tissue.pixel_px[1]) > 0
        edge = np.zeros_like(inside)
        for shift in (-_OUTLINE_PX, _OUTLINE_PX):
            # Pixels that `roll` moves to the opposite side lie in the margin, which is cut off.
            edge |= inside & ~np.roll(inside, shift, 0)
            edge |= inside & ~np.roll(inside, shift, 1)
        out: RGBA = np.zeros((TILE_PX, TILE_PX, 4), np.uint8)
        out[edge[_OUTLINE_PX:-_OUTLINE_PX, _OUTLINE_PX:-_OUTLINE_PX]] = (*OUTLINE, 255)
        return out


def painted(values: NDArray[np.float32], channel: HeatmapChannel) -> RGBA:
    """Return values as RGBA: in the class's colour if positive, grey if negative, with proportional opacity."""
    strength = np.nan_to_num(values / channel.strongest)
    out: RGBA = np.empty((*values.shape, 4), np.uint8)
    out[..., :3] = np.where((strength >= 0)[..., None], channel.color, NEGATIVE_RGB)
    out[..., 3] = np.rint(np.minimum(np.abs(strength), 1.0) * MAX_ALPHA)
    return out


def nearest(
    values: NDArray[np.float32], rows: NDArray[np.float64], columns: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Return the values of the squares that contain points; NaN for points outside.

    Args:
        values: (rows, columns); square (i, j) covers ``[i, i + 1) × [j, j + 1)``.
        rows: Row coordinates of the points.
        columns: Column coordinates, of a shape that broadcasts with ``rows``.
    """
    # Rounded down, not towards zero: −0.5 is outside.
    i, j = np.floor(rows).astype(np.intp), np.floor(columns).astype(np.intp)
    inside = (i >= 0) & (i < values.shape[0]) & (j >= 0) & (j < values.shape[1])
    nearest_values = values[np.clip(i, 0, values.shape[0] - 1), np.clip(j, 0, values.shape[1] - 1)]
    return np.where(inside, nearest_values, np.float32(np.nan))


def interpolated(
    values: NDArray[np.float32], rows: NDArray[np.float64], columns: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Return values interpolated between centres of squares; NaN where `nearest` is. Squares with NaN have no weight.

    See `nearest` for the arguments.
    """
    # Values are those of the squares' centres.
    y, x = rows - 0.5, columns - 0.5
    i, j = np.floor(y).astype(np.intp), np.floor(x).astype(np.intp)
    down, across = (y - i).astype(np.float32), (x - j).astype(np.float32)
    total: NDArray[np.float32] = np.zeros(np.broadcast_shapes(rows.shape, columns.shape), np.float32)
    weight = np.zeros_like(total)
    for step_y, part_y in ((0, 1 - down), (1, down)):
        for step_x, part_x in ((0, 1 - across), (1, across)):
            at = (np.clip(i + step_y, 0, values.shape[0] - 1), np.clip(j + step_x, 0, values.shape[1] - 1))
            corner = values[at]
            part = np.where(np.isfinite(corner), part_y * part_x, np.float32(0))
            total += np.nan_to_num(corner) * part
            weight += part
    is_inside = np.isfinite(nearest(values, rows, columns))
    return np.where(is_inside, total / np.maximum(weight, np.float32(1e-6)), np.float32(np.nan))


def _shown_points(
    slide: ShownSlide, tile: tuple[int, int, int], margin: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return y, (n, 1), and x, (1, n), of the centres of a tile's pixels, in shown pixels, with a margin of pixels."""
    zoom, row, column = tile
    scale = TileGrid.of(slide).scale(zoom)
    steps = np.arange(-margin, TILE_PX + margin, dtype=np.float64) + 0.5
    y, x = (np.asarray((first * TILE_PX + steps) * scale, np.float64) for first in (row, column))
    return y[:, None], x[None, :]


def _along(axis: NDArray[np.float64], y: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return one coordinate of mapped points, as a column or row if the matrix does not mix the axes.

    Args:
        axis: Row of the affine matrix.
        y: (n, 1) coordinates of the points.
        x: (1, n) coordinates of the points.
    """
    # Terms with factor 0 are left out. If the map does not mix the axes, the result has n values instead of n × n.
    terms = [factor * points for factor, points in zip(axis[:2], (y, x), strict=True) if factor]
    return np.asarray(sum(terms, start=np.float64(axis[2])), np.float64)


def _square(grid: SlideGrid) -> NDArray[np.float64]:
    """Return the affine matrix as 3 × 3."""
    return np.vstack([grid.affine, [0.0, 0.0, 1.0]])
