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
from pathology.predict.regions import LEAST_SHARE, RankedRegions
from pathology.tissue.outlines import outline, signed_area

OUTLINE_RGB = (52, 64, 84)
REGION_RGB = (17, 24, 39)
SATURATION = 0.35  # of the slide under the colours, so that stain is not mistaken for score
MAX_OPACITY = 0.62
VISIBLE = 0.03  # opacity from which the colour of a class, or a mark, is in the legend
MOST_OUTLINES = 100
LEAST_HOLE_PX = 64.0
_BAND_PX = 128
Plane = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Overlay:
    """The contents of an overlay.

    Attributes:
        thumbnail: (h, w, 3) uint8, the whole slide.
        heatmap: Heatmap of the slide.
        shown: Whether to show scores; otherwise only tissue that was not seen is marked.
        tissue: Bool mask of the slide, from its upper left corner; it may extend beyond the slide at the other end.
        tissue_mpp: (y, x) micrometres per pixel of the mask.
        regions: Regions; those that are listed are outlined and numbered.
    """

    thumbnail: NDArray[np.uint8]
    heatmap: Heatmap
    shown: bool
    tissue: NDArray[np.bool_]
    tissue_mpp: tuple[float, float]
    regions: RankedRegions


def draw_overlay(overlay: Overlay) -> Image.Image:
    """Return the thumbnail with scores in translucent colours, outlines of tissue and regions, and a legend below."""
    shape = overlay.thumbnail.shape[:2]
    extent = slide_extent(overlay.tissue_mpp, overlay.heatmap)
    tissue = _resize(overlay.tissue.astype(np.float32), shape, extent)
    seen_share = _resize(overlay.heatmap.seen_squares.astype(np.float32), shape, _squares_extent(overlay.heatmap))
    # Interpolated masks are 0.5 at their edge; mark only the inside of tissue as not seen.
    unseen = np.clip(tissue * 2 - 1, 0, 1) * (1 - np.clip(seen_share, 0, 1))
    # (colour, opacity) of each layer, the lowest first.
    paints: list[tuple[Plane, Plane]] = [(np.full(3, 255, np.float32), 0.65 * unseen * _hatching(shape))]
    classes: list[int] = []
    if overlay.shown:
        colors, certainty = score_colors(overlay.heatmap, shape)
        opacity = MAX_OPACITY * certainty * seen_share * _near(tissue)
        paints.append((colors, opacity))
        classes = _visible_classes(overlay.heatmap, opacity)
    line = _line(tissue)
    paints.append((np.array(OUTLINE_RGB, np.float32), 0.8 * line))
    image = Image.fromarray(_painted(overlay.thumbnail, paints))
    left_out = _draw_regions(image, overlay)
    items = _legend(overlay, classes, left_out, outlined=_shows(line), some_unseen=_shows(unseen))
    return add_legend(image, items)


def _visible_classes(heatmap: Heatmap, opacity: Plane) -> list[int]:
    """Return the classes whose colour is visible somewhere in a picture with this opacity (h, w) of colours.

    For exclusive classes, a position counts for the class with the highest score, although its colour is a mixture.
    """
    extent = _squares_extent(heatmap)

    def score_of(index: int) -> Plane:  # one at a time: a picture of each class would be large
        return _resize(np.nan_to_num(heatmap.scores[index]).astype(np.float32), opacity.shape, extent)

    classes = range(len(heatmap.scores))
    # Classes that are not exclusive count wherever they have a score: a limit of 0.
    highest = np.zeros_like(opacity)
    if heatmap.exclusive:
        for index in classes:
            np.maximum(highest, score_of(index), out=highest)
    visible = []
    for index in classes:
        score = score_of(index)
        if _shows(np.where(score >= highest, score, np.float32(0)) * opacity, VISIBLE):
            visible.append(index)
    return visible


def _shows(weights: Plane, least: float = 0.5) -> bool:
    """Whether more than a few pixels, one in 10,000, have at least this weight."""
    return bool((weights >= least).mean() > 1e-4)


def score_colors(heatmap: Heatmap, shape: Sequence[int]) -> tuple[Plane, Plane]:
    """Return the mean of the class colours weighted by score, (h, w, 3), 0 to 255; and ``Heatmap.certainty``, (h, w).

    Both are of the heatmap's squares, interpolated; those that were not seen count as 0.

    Args:
        heatmap: Heatmap of the slide.
        shape: (h, w) of a picture of the whole slide.
    """
    # (height, width) of the slide in squares, not rounded: the last row and column may reach beyond the slide.
    extent = _squares_extent(heatmap)
    colors = np.zeros((*shape[:2], 3), np.float32)
    for index, weights in enumerate(heatmap.color_weights):
        part = _resize(weights.astype(np.float32), shape, extent)
        for channel, value in enumerate(class_color(index)):
            colors[..., channel] += part * np.float32(value)
    return colors, _resize(heatmap.certainty.astype(np.float32), shape, extent)


def slide_extent(mpp: tuple[float, float], heatmap: Heatmap) -> tuple[float, float]:
    """Return the (height, width) of the slide in pixels of ``mpp``; not rounded."""
    return (
        heatmap.slide_size_px[0] * heatmap.mpp[0] / mpp[0],
        heatmap.slide_size_px[1] * heatmap.mpp[1] / mpp[1],
    )


def _squares_extent(heatmap: Heatmap) -> tuple[float, float]:
    """Return the (height, width) of the slide in squares; not rounded."""
    return slide_extent(heatmap.square_um, heatmap)


def tissue_squares(tissue: NDArray[np.bool_], tissue_mpp: tuple[float, float], heatmap: Heatmap) -> NDArray[np.bool_]:
    """Return the mask of the heatmap's squares that contain tissue, (rows, columns) bool.

    Args:
        tissue: Mask of the slide.
        tissue_mpp: (y, x) micrometres per pixel of the mask.
        heatmap: Heatmap of the slide.
    """
    rows, columns = heatmap.values.shape[1:]
    # Squares for each pixel of the mask.
    scale_y, scale_x = (fine / coarse for fine, coarse in zip(tissue_mpp, heatmap.square_um, strict=True))
    # First squares whose centre is in tissue: a small square may contain no centre of a mask pixel.
    i, j = (((np.arange(n) + 0.5) / scale).astype(int) for n, scale in ((rows, scale_y), (columns, scale_x)))
    inside = (i < tissue.shape[0])[:, None] & (j < tissue.shape[1])
    squares: NDArray[np.bool_] = (
        inside & tissue[np.minimum(i, tissue.shape[0] - 1)[:, None], np.minimum(j, tissue.shape[1] - 1)]
    )
    # Then squares that contain the centre of a tissue pixel: the centre of a large square may be on glass.
    y, x = np.nonzero(tissue)
    squares[
        np.minimum(((y + 0.5) * scale_y).astype(int), rows - 1),
        np.minimum(((x + 0.5) * scale_x).astype(int), columns - 1),
    ] = True
    return squares


def _near(soft_mask: Plane) -> Plane:
    """Return weights: 1 in the tissue and close to it, decreasing to 0 on the glass."""
    from skimage.filters import gaussian

    wide: Plane = gaussian(soft_mask, max(soft_mask.shape) / 400)  # type: ignore[no-untyped-call]
    return np.clip(wide * 3, 0.0, 1.0)


def _resize(values: NDArray[np.float32], shape: Sequence[int], extent: tuple[float, float]) -> Plane:
    """Resample values to (h, w), cropped to ``extent`` (height, width), which excludes parts off the slide."""
    # Not whole pixels: the last row of squares reaches beyond the slide by a part of a square.
    box = (0.0, 0.0, min(extent[1], values.shape[1]), min(extent[0], values.shape[0]))
    image = Image.fromarray(values).resize((shape[1], shape[0]), Image.Resampling.BILINEAR, box=box)
    return np.asarray(image, dtype=np.float32)


def _painted(thumbnail: NDArray[np.uint8], paints: Sequence[tuple[Plane, Plane]]) -> NDArray[np.uint8]:
    """Return the greyed slide with layers blended in: (colour, opacity) of each, the lowest first.

    A colour is (3,) or (h, w, 3), an opacity (h, w). Band by band, because pictures in floating point take many times
    the memory of the result.
    """
    result = np.empty_like(thumbnail)
    for top in range(0, len(thumbnail), _BAND_PX):
        band = slice(top, top + _BAND_PX)
        canvas = _greyed(thumbnail[band])
        for color, alpha in paints:
            canvas += ((color if color.ndim == 1 else color[band]) - canvas) * alpha[band, :, None]
        result[band] = np.round(canvas).clip(0, 255)
    return result


def _greyed(thumbnail: NDArray[np.uint8]) -> Plane:
    """Reduce the saturation; structure and lightness stay."""
    rgb = thumbnail.astype(np.float32)
    grey = (rgb @ np.array([0.299, 0.587, 0.114], np.float32))[..., None]
    mixed: Plane = grey + np.float32(SATURATION) * (rgb - grey)
    return mixed


def _hatching(shape: Sequence[int]) -> Plane:
    """Return weights (h, w) of diagonal stripes."""
    y, x = np.ogrid[: shape[0], : shape[1]]
    return np.where((y + x) % 8 < 4, np.float32(1), np.float32(0.55))


def _line(soft_mask: Plane, width_px: float = 1.6) -> Plane:
    """Return the opacity, per pixel, of an antialiased line along the mask's border."""
    from skimage.filters import gaussian

    smooth: Plane = gaussian(soft_mask, 1.2)  # type: ignore[no-untyped-call]
    slope = np.hypot(*np.gradient(smooth))
    # Distance to the border ≈ difference from 0.5, divided by the slope there.
    distance_px = np.abs(smooth - 0.5) / np.maximum(slope, 1e-3)
    covered: Plane = np.clip(width_px / 2 + 0.5 - distance_px, 0.0, 1.0)
    return covered


def _draw_regions(image: Image.Image, overlay: Overlay) -> int:
    """Draw outlines and ranks of regions; return the number of holes in them that are not outlined.

    Regions of a weak model are riddled with holes. The largest are outlined, up to `MOST_OUTLINES` with the regions.
    """
    draw = ImageDraw.Draw(image)
    scale = image.width / overlay.heatmap.slide_size_px[1] * overlay.heatmap.square_px
    size = max(12, round(image.width / 110))
    listed = overlay.regions.listed
    rings = [outline(region.squares) for region in listed]
    holes = [hole for ring, *inner in rings for hole in inner]
    # By `id`, because rings are lists. The area of a hole is negative, because its points run the other way round.
    sizes = {id(hole): -signed_area(hole) * scale**2 for hole in holes}
    large = sorted((hole for hole in holes if sizes[id(hole)] >= LEAST_HOLE_PX), key=lambda hole: -sizes[id(hole)])
    drawn = [ring for ring, *_ in rings] + large[: MOST_OUTLINES - len(listed)]
    for ring in drawn:
        draw.line([(x * scale, y * scale) for x, y in ring], fill=REGION_RGB, width=2, joint="curve")
    # The mark with the rank is beside the right end of the region's top row.
    for region in reversed(listed):  # where marks overlap, the highest rank is on top
        top = int(region.squares[0].min())
        x = float(region.squares[1][region.squares[0] == top].max() + 1) * scale + size * 0.7
        y = top * scale - size * 0.2
        x, y = min(x, image.width - size), max(y, size)
        radius = size * 0.78
        draw.ellipse(
            (x - radius, y - radius, x + radius, y + radius), fill=(255, 255, 255), outline=REGION_RGB, width=2
        )
        text, font = typeset(str(region.rank), size)
        draw.text((x, y), text, fill=REGION_RGB, font=font, anchor="mm")
    return len(listed) + len(holes) - len(drawn)


def _legend(
    overlay: Overlay, classes: Sequence[int], holes_left_out: int, *, outlined: bool, some_unseen: bool
) -> list[LegendItem]:
    """Return the items of the legend: what is drawn, and how many regions and holes are not outlined."""
    regions, names = overlay.regions, overlay.heatmap.class_names
    items: list[LegendItem] = [Key("class", names[index], class_color(index)) for index in classes]
    if outlined:
        items.append(Key("outline", "tissue"))
    if regions.listed:
        items.append(Key("region", "regions, ranked by score"))
    left_out = [
        (regions.beyond, "region", "of lower score"),
        (regions.faint, "region", f"below {LEAST_SHARE * 100:g} % of the evidence"),
        (holes_left_out, "hole", "in regions"),
    ]
    items += [Key("note", f"{n:,} {noun}{'s' * (n != 1)} {reason} not outlined") for n, noun, reason in left_out if n]
    if some_unseen:
        items.append(Key("unseen", "tissue not seen"))
    um_per_px = overlay.heatmap.mpp[1] * overlay.heatmap.slide_size_px[1] / overlay.thumbnail.shape[1]
    return [*items, ScaleBar(um_per_px)]
