"""The overlay: a picture of the slide, coloured by the class scores of each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from pathology.predict.colors import class_color
from pathology.predict.heatmap import Heatmap
from pathology.predict.legend import Key, LegendItem, ScaleBar, add_legend, typeset
from pathology.predict.regions import Region
from pathology.tissue.outlines import outline

OUTLINE_RGB = (52, 64, 84)
REGION_RGB = (17, 24, 39)
SATURATION = 0.35  # of the slide under the colours, so that stain is not mistaken for score
MAX_OPACITY = 0.62


@dataclass(frozen=True, eq=False)
class Overlay:
    """The contents of an overlay.

    Attributes:
        thumbnail: (h, w, 3) uint8, the whole slide.
        heatmap: Heatmap of the slide.
        shown: Whether to show scores; otherwise only tissue that was not seen is marked.
        tissue: Bool mask of the slide, from its upper left corner; it may extend beyond the slide at the other end.
        tissue_mpp: (y, x) micrometres per pixel of the mask.
        regions: Regions to outline and number.
    """

    thumbnail: NDArray[np.uint8]
    heatmap: Heatmap
    shown: bool
    tissue: NDArray[np.bool_]
    tissue_mpp: tuple[float, float]
    regions: Sequence[Region]


def draw_overlay(overlay: Overlay) -> Image.Image:
    """Return the thumbnail with scores in translucent colours, outlines of tissue and regions, and a legend below."""
    shape = overlay.thumbnail.shape[:2]
    extent = slide_extent(overlay.tissue_mpp, overlay.heatmap)
    tissue = _resize(overlay.tissue.astype(np.float32), shape, extent)
    seen = _resize(overlay.heatmap.seen_cells.astype(np.float32), shape, _cells_extent(overlay.heatmap))
    unseen = np.clip(tissue * 2 - 1, 0, 1) * (1 - np.clip(seen, 0, 1))
    canvas = _greyed(overlay.thumbnail)
    canvas = _blend(canvas, np.full(3, 255.0), 0.65 * unseen * _hatching(shape))
    if overlay.shown:
        colors, certainty = score_colors(overlay.heatmap, shape)
        canvas = _blend(canvas, colors, MAX_OPACITY * certainty * seen * _near(tissue))
    canvas = _blend(canvas, np.array(OUTLINE_RGB, dtype=np.float64), 0.8 * _line(tissue))
    image = Image.fromarray(np.round(canvas).clip(0, 255).astype(np.uint8))
    _draw_regions(image, overlay)
    return add_legend(image, _legend(overlay, bool((unseen > 0.5).mean() > 1e-4)))


def score_colors(heatmap: Heatmap, shape: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean of the class colours weighted by score, (h, w, 3) from 0 to 255, and the certainty, (h, w).

    Args:
        heatmap: Heatmap of the slide.
        shape: (h, w) of a picture of the whole slide.
    """
    extent = _cells_extent(heatmap)
    colors = np.zeros((*shape[:2], 3))
    for index, score in enumerate(heatmap.scores):
        part = _resize(np.nan_to_num(score).astype(np.float32), shape, extent)
        colors += part[..., None] * np.array(class_color(index), dtype=np.float64)
    return colors, _resize(heatmap.certainty.astype(np.float32), shape, extent)


def slide_extent(mpp: tuple[float, float], heatmap: Heatmap) -> tuple[float, float]:
    """Return the (height, width) of the slide in pixels of ``mpp``; not rounded."""
    return (
        heatmap.slide_size_px[0] * heatmap.mpp[0] / mpp[0],
        heatmap.slide_size_px[1] * heatmap.mpp[1] / mpp[1],
    )


def _cells_extent(heatmap: Heatmap) -> tuple[float, float]:
    """Return the (height, width) of the slide in cells; not rounded."""
    return slide_extent(heatmap.cell_um, heatmap)


def tissue_cells(tissue: NDArray[np.bool_], tissue_mpp: tuple[float, float], heatmap: Heatmap) -> NDArray[np.bool_]:
    """Return the mask of the heatmap's cells that contain tissue, (rows, columns) bool.

    Args:
        tissue: Mask of the slide.
        tissue_mpp: (y, x) micrometres per pixel of the mask.
        heatmap: Heatmap of the slide.
    """
    rows, columns = heatmap.values.shape[1:]
    scale_y, scale_x = (fine / coarse for fine, coarse in zip(tissue_mpp, heatmap.cell_um, strict=True))
    y, x = np.nonzero(tissue)
    # A cell that is smaller than the mask's pixels may contain none of their centres.
    i, j = (((np.arange(n) + 0.5) / scale).astype(int) for n, scale in ((rows, scale_y), (columns, scale_x)))
    inside = (i < tissue.shape[0])[:, None] & (j < tissue.shape[1])
    cells: NDArray[np.bool_] = (
        inside & tissue[np.minimum(i, tissue.shape[0] - 1)[:, None], np.minimum(j, tissue.shape[1] - 1)]
    )
    cells[
        np.minimum(((y + 0.5) * scale_y).astype(int), rows - 1),
        np.minimum(((x + 0.5) * scale_x).astype(int), columns - 1),
    ] = True
    return cells


def _near(soft_mask: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights: 1 in the tissue and close to it, decreasing to 0 on the glass."""
    from skimage.filters import gaussian

    wide: NDArray[np.float64] = gaussian(soft_mask, max(soft_mask.shape) / 400)  # type: ignore[no-untyped-call]
    return np.clip(wide * 3, 0.0, 1.0)


def _resize(values: NDArray[np.float32], shape: Sequence[int], extent: tuple[float, float]) -> NDArray[np.float64]:
    """Resample values to (h, w), cropped to ``extent`` (height, width), which excludes parts off the slide."""
    box = (0.0, 0.0, min(extent[1], values.shape[1]), min(extent[0], values.shape[0]))
    image = Image.fromarray(values).resize((shape[1], shape[0]), Image.Resampling.BILINEAR, box=box)
    return np.asarray(image, dtype=np.float64)


def _greyed(thumbnail: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Reduce the saturation; structure and lightness stay."""
    rgb = thumbnail.astype(np.float64)
    grey = (rgb @ np.array([0.299, 0.587, 0.114]))[..., None]
    mixed: NDArray[np.float64] = grey + SATURATION * (rgb - grey)
    return mixed


def _blend(canvas: NDArray[np.float64], color: NDArray[np.float64], alpha: NDArray[np.float64]) -> NDArray[np.float64]:
    return canvas + (color - canvas) * alpha[..., None]


def _hatching(shape: Sequence[int]) -> NDArray[np.float64]:
    """Return weights (h, w) of diagonal stripes."""
    y, x = np.ogrid[: shape[0], : shape[1]]
    return np.where((y + x) % 8 < 4, 1.0, 0.55)


def _line(soft_mask: NDArray[np.float64], width_px: float = 1.6) -> NDArray[np.float64]:
    """Return the opacity, per pixel, of an antialiased line along the mask's border."""
    from skimage.filters import gaussian

    smooth: NDArray[np.float64] = gaussian(soft_mask, 1.2)  # type: ignore[no-untyped-call]
    slope = np.hypot(*np.gradient(smooth))
    distance_px = np.abs(smooth - 0.5) / np.maximum(slope, 1e-3)
    covered: NDArray[np.float64] = np.clip(width_px / 2 + 0.5 - distance_px, 0.0, 1.0)
    return covered


def _draw_regions(image: Image.Image, overlay: Overlay) -> None:
    draw = ImageDraw.Draw(image)
    scale = image.width / overlay.heatmap.slide_size_px[1] * overlay.heatmap.cell_px
    size = max(12, round(image.width / 110))
    for region in overlay.regions:
        for ring in outline(region.cells):
            draw.line([(x * scale, y * scale) for x, y in ring], fill=REGION_RGB, width=2, joint="curve")
    for region in reversed(overlay.regions):
        top = int(region.cells[0].min())
        x = float(region.cells[1][region.cells[0] == top].max() + 1) * scale + size * 0.7
        y = top * scale - size * 0.2
        x, y = min(x, image.width - size), max(y, size)
        radius = size * 0.78
        draw.ellipse(
            (x - radius, y - radius, x + radius, y + radius), fill=(255, 255, 255), outline=REGION_RGB, width=2
        )
        text, font = typeset(str(region.rank), size)
        draw.text((x, y), text, fill=REGION_RGB, font=font, anchor="mm")


def _legend(overlay: Overlay, some_unseen: bool) -> list[LegendItem]:
    names = overlay.heatmap.class_names if overlay.shown else ()
    items: list[LegendItem] = [Key("class", name, class_color(index)) for index, name in enumerate(names)]
    items.append(Key("outline", "tissue"))
    if overlay.regions:
        items.append(Key("region", "regions that score highest, ranked"))
    if some_unseen:
        items.append(Key("unseen", "tissue not seen"))
    um_per_px = overlay.heatmap.mpp[1] * overlay.heatmap.slide_size_px[1] / overlay.thumbnail.shape[1]
    return [*items, ScaleBar(um_per_px)]
