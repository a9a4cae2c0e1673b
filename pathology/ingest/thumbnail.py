"""Thumbnails of slides with outlined tissue."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from data.arrays import Mask
from data.files import write_atomically
from data.store.slide_store import SlideStore
from hyfi_core.plan.box import Box
from pathology.arrays import Planes
from pathology.readers.resample import make_taps, resample, target_size
from pathology.readers.slide_source import SlideSource
from pathology.tissue.tissue import find_tissue

RGB = npt.NDArray[np.uint8]

OUTLINE = (0, 160, 60)
LONGEST_PX = 1600
"""Longer side of a picture."""
_MASK_MPP_UM = 8.0
_STRIP_SOURCE_PX = 32_000_000


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """A picture of a whole slide.

    Attributes:
        image: ``(h, w, 3)`` uint8.
        tissue: Tissue mask of the whole slide, at any resolution; None if unknown.
    """

    image: RGB
    tissue: Mask | None

    def drawn(self) -> RGB:
        """Return the picture with the outline of the tissue."""
        out = self.image.copy()
        if self.tissue is not None:
            height, width = out.shape[:2]
            rows = (np.arange(height) + 0.5) * self.tissue.shape[0] / height
            columns = (np.arange(width) + 0.5) * self.tissue.shape[1] / width
            # Resample the mask before outlining it: an outline in mask pixels would become thicker, or vanish.
            out[_outline(self.tissue[rows.astype(int)][:, columns.astype(int)])] = OUTLINE
        return out


def thumbnail_of_store(slide: SlideStore, longest_px: int = LONGEST_PX) -> Thumbnail:
    """Return the picture of an ingested slide, from its coarsest level of at least ``longest_px``, else the finest."""
    large = [k for k, v in enumerate(slide.levels) if max(v.height_px, v.width_px) >= longest_px]
    level = max(large, default=0)
    size = slide.levels[level]
    image = slide.read(Box.of_size(size.height_px, size.width_px), level)
    mask, mpp = slide.tissue()
    # The mask's last row may extend beyond the slide.
    rows, columns = size.height_px * size.mpp[0] / mpp[0], size.width_px * size.mpp[1] / mpp[1]
    return Thumbnail(_picture(_shrunk(image, longest_px)), mask[: max(1, round(rows)), : max(1, round(columns))])


def thumbnail_of_source(
    source: SlideSource, mpp: tuple[float, float] | None, longest_px: int = LONGEST_PX
) -> tuple[Thumbnail, float | None]:
    """Return (picture of a slide's file, its tissue fraction); without ``mpp``, tissue and fraction are None.

    Args:
        source: The open slide.
        mpp: Microns per pixel (y, x) of its finest level; None: unknown.
        longest_px: Longer side of the picture.

    Raises:
        SlideError: The slide cannot be decoded.
    """
    if mpp is None:
        return Thumbnail(_picture(_shrunk(_overview(source, longest_px), longest_px)), None), None
    longest_of_mask_px = _longest_of_mask(source, mpp)
    planes = _shrunk(_overview(source, longest_of_mask_px), longest_of_mask_px)
    mpp_of_mask = source.levels[0].height_px * mpp[0] / planes.shape[1]
    tissue = find_tissue(planes, mpp_of_mask).tissue
    # If the picture is to be larger than the mask, read it from a finer level.
    shown = _overview(source, longest_px) if longest_px > longest_of_mask_px else planes
    return Thumbnail(_picture(_shrunk(shown, longest_px)), tissue), float(tissue.mean())


def contact_sheet(slides: Sequence[tuple[str, Thumbnail]], columns: int = 6, side_px: int = 300) -> RGB:
    """Return one picture with many slides in rows, each with its name below."""
    rows = -(-len(slides) // columns)
    text_px = 18
    sheet = Image.new("RGB", (columns * side_px, max(1, rows) * (side_px + text_px)), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (name, thumbnail) in enumerate(slides):
        x, y = index % columns * side_px, index // columns * (side_px + text_px)
        picture = Image.fromarray(thumbnail.drawn())
        picture.thumbnail((side_px - 6, side_px - 6))
        sheet.paste(picture, (x + 3, y + 3))
        draw.text((x + 3, y + side_px), name[:44], fill="black")
    return np.asarray(sheet)


def save_png(image: RGB, path: Path) -> None:
    """Write a picture, atomically."""
    encoded = io.BytesIO()
    Image.fromarray(image).save(encoded, "PNG")
    write_atomically(path, encoded.getvalue())


def overview_px(source: SlideSource, mpp: tuple[float, float] | None) -> int:
    """Return the pixels that ``thumbnail_of_source`` reads; many if the slide has no small level."""
    size = source.levels[_level_of(source, LONGEST_PX if mpp is None else _longest_of_mask(source, mpp))]
    return size.height_px * size.width_px


def _longest_of_mask(source: SlideSource, mpp: tuple[float, float]) -> int:
    """Return the longer side, in pixels, of the picture in which tissue is searched."""
    finest = source.levels[0]
    return max(1, round(max(finest.height_px * mpp[0], finest.width_px * mpp[1]) / _MASK_MPP_UM))


def _level_of(source: SlideSource, longest_px: int) -> int:
    """Return the coarsest level with at least ``longest_px``; the finest if there is none."""
    large = [k for k, v in enumerate(source.levels) if max(v.height_px, v.width_px) >= longest_px]
    return max(large, key=lambda k: source.levels[k].downsample, default=0)


def _overview(source: SlideSource, longest_px: int) -> Planes:
    """Return a picture ``(3, h, w)`` whose longer side is ``longest_px``, or up to twice as long; read in strips.

    It is the coarsest level with at least ``longest_px``, reduced by a whole factor.
    """
    level = _level_of(source, longest_px)
    size = source.levels[level]
    # With a whole factor, each pixel is the mean of whole pixels, so strips need no rows of their neighbours.
    factor = max(1, max(size.height_px, size.width_px) // longest_px)
    height, width = max(1, size.height_px // factor), max(1, size.width_px // factor)
    across = make_taps(0, width, factor, size.width_px)
    strips = []
    step = max(1, _STRIP_SOURCE_PX // (size.width_px * factor))
    for y in range(0, height, step):
        down = make_taps(y, min(y + step, height), factor, size.height_px)
        strip = source.read(Box(down.first, down.end, across.first, across.end), level)
        strips.append(resample(np.ascontiguousarray(strip.transpose(2, 0, 1)), down, across))
    return np.concatenate(strips, axis=1)


def _picture(planes: Planes) -> RGB:
    """Return ``(3, h, w)`` as ``(h, w, 3)``."""
    return np.ascontiguousarray(planes.transpose(1, 2, 0))


def _shrunk(image: Planes, longest_px: int) -> Planes:
    """Return ``(3, h, w)`` reduced to at most ``longest_px``."""
    ratio = max(1.0, max(image.shape[1:]) / longest_px)
    _, height, width = image.shape
    rows = make_taps(0, target_size(height, ratio), ratio, height)
    columns = make_taps(0, target_size(width, ratio), ratio, width)
    return resample(image[:, rows.first : rows.end, columns.first : columns.end], rows, columns)


def _outline(mask: Mask) -> Mask:
    """Return the pixels of ``mask`` within two pixels of its border."""
    inner = np.pad(mask, 2)
    for axis in (0, 1):
        # `roll` moves pixels around to the other side, where the padding of two unset pixels keeps them unset.
        inner = inner & np.roll(inner, 2, axis) & np.roll(inner, -2, axis)
    result: Mask = mask & ~inner[2:-2, 2:-2]
    return result
