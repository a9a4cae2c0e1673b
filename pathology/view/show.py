"""A picture of a region of a stored slide for notebooks, with the outline of its tissue and a heatmap."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data.store.slide_store import SlideStore
from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box
from pathology.view.layers import HeatmapChannel, HeatmapFile, painted

_OUTLINE_RGB = (28, 36, 48)


def show(
    slide: SlideStore,
    box: Box | None = None,
    *,
    heatmap: str | os.PathLike[str] | None = None,
    channel: str | None = None,
    tissue: bool = True,
    size_px: int = 800,
) -> Image.Image:
    """Return a picture of a stored slide, which a notebook shows.

    Args:
        slide: From `data.open_store`.
        box: Rectangle in pixels of the finest level; None: the whole slide.
        heatmap: Folder of the predictions of slides of this store; its heatmap is drawn over the picture.
        channel: Name of the heatmap's channel, such as ``score tumour``; None: the first.
        tissue: Whether the outline of the tissue is drawn.
        size_px: Pixels of the picture's longer side, at most.

    Raises:
        RequestError: There is no heatmap of the slide, or no such channel; or the box has no pixel of the slide.
    """
    finest = slide.levels[0]
    whole = Box.of_size(finest.height_px, finest.width_px)
    box = whole if box is None else box.intersect(whole)
    if box.empty or size_px < 1:
        raise RequestError(f"show: {box} has no pixel of {slide.slide_id}, {whole.height} × {whole.width} px")
    downsample = max(1.0, max(box.height, box.width) / size_px)
    size = (max(1, round(box.width / downsample)), max(1, round(box.height / downsample)))
    image = _picture(slide, box, size, downsample)
    rows, columns = _places(box, size)
    if heatmap is not None:
        file = _heatmap_of(slide, Path(heatmap))
        shown = _channel_of(file, channel)
        squares = _squares_of(slide, file, rows, columns)
        colours = painted(_sampled(file.values(shown.index), *squares), shown)
        image = Image.alpha_composite(image.convert("RGBA"), Image.fromarray(colours)).convert("RGB")
    if tissue:
        mask, mpp = slide.tissue()
        y, x = np.meshgrid(rows * finest.mpp[0] / mpp[0], columns * finest.mpp[1] / mpp[1], indexing="ij")
        inside = _sampled(mask, y, x)
        pixels = np.array(image)
        pixels[_edge(inside)] = _OUTLINE_RGB
        image = Image.fromarray(pixels)
    return image


def _picture(slide: SlideStore, box: Box, size: tuple[int, int], downsample: float) -> Image.Image:
    """Return the pixels of a box, reduced to a size, from the coarsest level that is as fine as the picture.

    Args:
        slide: The slide.
        box: Rectangle in pixels of the finest level.
        size: (width, height) of the picture.
        downsample: Pixels of the finest level for each pixel of the picture.
    """
    finest = slide.levels[0]
    # With a tolerance: sizes of levels are rounded.
    level = max(k for k, v in enumerate(slide.levels) if finest.height_px / v.height_px <= downsample * 1.001)
    fy, fx = finest.height_px / slide.levels[level].height_px, finest.width_px / slide.levels[level].width_px
    # `part` is rounded outwards to whole pixels of the level; `exact` is the box inside it that is resampled.
    part = Box(math.floor(box.y0 / fy), math.ceil(box.y1 / fy), math.floor(box.x0 / fx), math.ceil(box.x1 / fx))
    exact = (box.x0 / fx - part.x0, box.y0 / fy - part.y0, box.x1 / fx - part.x0, box.y1 / fy - part.y0)
    image = Image.fromarray(np.ascontiguousarray(slide.read(part, level).transpose(1, 2, 0)))
    return image.resize(size, Image.Resampling.LANCZOS, box=exact)


def _places(box: Box, size: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the rows (h,) and columns (w,) of the picture's pixel centres in pixels of the slide's finest level."""
    rows = box.y0 + (np.arange(size[1]) + 0.5) * (box.height / size[1])
    columns = box.x0 + (np.arange(size[0]) + 0.5) * (box.width / size[0])
    return np.asarray(rows, np.float64), np.asarray(columns, np.float64)


def _squares_of(
    slide: SlideStore, file: HeatmapFile, rows: NDArray[np.float64], columns: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the rows and columns in the heatmap, each (h, w), of points of the slide's finest level.

    Slide and heatmap both state their position on level 0 of the file, so they may differ in resolution and cover
    different parts.

    Args:
        slide: The stored slide.
        file: The heatmap.
        rows: (h,): rows of the points, in pixels of the slide's finest level.
        columns: (w,): their columns.

    Raises:
        RequestError: The slide does not state its position.
    """
    if "affine" not in slide.attributes or "source" not in slide.attributes:
        raise RequestError(
            f"show: {slide.path} does not state its position on the slide file, which a heatmap needs; ingest the "
            f"slide with hyfi ingest"
        )
    to_level0 = np.array(slide.attributes["affine"], np.float64)
    bounds, squares_to_level0 = slide.attributes["source"]["bounds"], file.grid.affine
    places = np.stack(np.meshgrid(rows, columns, indexing="ij"))
    # From the heatmap's first square to the slide's first pixel, at level 0. The heatmap counts from the corner of the
    # bounds, as QuPath does, the slide from that of the file.
    shift = to_level0[:, 2] - (bounds["y0"], bounds["x0"]) - squares_to_level0[:, 2]
    level0 = np.einsum("ij,jhw->ihw", to_level0[:, :2], places) + shift[:, None, None]
    row, column = np.einsum("ij,jhw->ihw", np.linalg.inv(squares_to_level0[:, :2]), level0)
    return row, column


def _sampled(grid: NDArray[Any], rows: NDArray[np.float64], columns: NDArray[np.float64]) -> NDArray[Any]:
    """Return the values of the squares of a grid in which points (h, w) lie; beyond the grid, of the nearest square."""
    y = np.clip(np.floor(rows), 0, grid.shape[0] - 1).astype(np.int64)
    x = np.clip(np.floor(columns), 0, grid.shape[1] - 1).astype(np.int64)
    return np.asarray(grid[y, x])


def _edge(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the pixels of a mask that have a neighbour outside of it."""
    inner = mask.copy()
    inner[1:] &= mask[:-1]
    inner[:-1] &= mask[1:]
    inner[:, 1:] &= mask[:, :-1]
    inner[:, :-1] &= mask[:, 1:]
    return mask & ~inner


def _heatmap_of(slide: SlideStore, folder: Path) -> HeatmapFile:
    path = folder / slide.slide_id / "heatmap.tiff"
    if not path.is_file():
        raise RequestError(f"show: {folder} has no heatmap of {slide.slide_id}; give the --out of hyfi predict")
    return HeatmapFile(path)


def _channel_of(file: HeatmapFile, name: str | None) -> HeatmapChannel:
    """Return the channel with this name, or the first one; refuse names that the file does not have."""
    channels = {channel.name: channel for channel in file.channels}
    if name is None:
        return file.channels[0]
    if name not in channels:
        raise RequestError(f"show: the heatmap has no channel {name!r}; it has: {', '.join(channels)}")
    return channels[name]
