"""The part of a slide that is ingested: all of it, or the bounding box of its tissue."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from data.arrays import Mask
from data.store.layout import LevelSize
from hyfi_core.plan.box import Box
from pathology.ingest.level_reader import LevelChoice, LevelReader, choose_level
from pathology.ingest.options import IngestOptions
from pathology.ingest.pyramid import fitted, level_sizes
from pathology.readers.mpp import SourceMpp
from pathology.readers.slide_source import SlideSource
from pathology.tissue.given import SlideTissue
from pathology.tissue.outlines import SlideGrid
from pathology.tissue.quality import mask_level
from pathology.tissue.tissue import TissueMasks, find_tissue

CROP_ALIGN_PX = 512
"""Crops start at multiples of this, so that their pyramid has the same pixels as the whole slide's."""
CROP_MARGIN_UM = 100.0


@dataclass(frozen=True, slots=True)
class Frame:
    """The part of a slide to write.

    Attributes:
        choice: The source's level to read, and the size of the whole slide.
        mpp: Microns per pixel (y, x) of the store's finest level.
        box: The part to write, in pixels of the whole slide at ``mpp``.
        masks: Detected tissue and pen masks of the part, if the writer needs them; else None.
        mask_mpp: Microns per pixel of the masks.
        given: Tissue mask of the part from the user's outlines; None: tissue is detected.
    """

    choice: LevelChoice
    mpp: tuple[float, float]
    box: Box
    masks: TissueMasks | None
    mask_mpp: float
    given: Mask | None = None

    @property
    def tissue(self) -> Mask | None:
        """Tissue mask of that part, if it is known before the pixels are read; else None."""
        return self.given if self.masks is None or self.given is not None else self.masks.tissue

    @property
    def cropped(self) -> bool:
        """Whether it is not the whole slide."""
        return self.box != Box.of_size(self.choice.height_px, self.choice.width_px)

    def sizes(self, options: IngestOptions) -> tuple[LevelSize, ...]:
        """Return the sizes of the pyramid's levels."""
        return level_sizes(self.box.height, self.box.width, at_least=mask_level(options.mpp, options.tissue) + 1)


def find_frame(slide: SlideSource, mpp: SourceMpp, options: IngestOptions, tissue: SlideTissue | None = None) -> Frame:
    """Return the part of a slide to write.

    If the tissue must be known first (`--crop-tissue`, `--glass blank`), a coarse level is read.

    Args:
        slide: Open for reading.
        mpp: Microns per pixel of its finest level.
        options: How to ingest.
        tissue: Tissue outlines that the user gave; None: detect the tissue.

    Raises:
        SlideError: No level is fine enough, or the coarse level cannot be read.
        RequestError: The given outlines do not belong to this slide.
    """
    choice = choose_level(slide, mpp.um, options.mpp)
    extent = Box.of_size(choice.height_px, choice.width_px)
    level = mask_level(options.mpp, options.tissue)  # of the pyramid, whose pixels are those of masks
    scale = 2**level
    stored, mask_mpp = (options.mpp, options.mpp), options.mpp * scale
    size = level_sizes(choice.height_px, choice.width_px, level + 1)[level]
    given_mask = (
        None
        if tissue is None
        else tissue.mask(slide_grid(slide, mpp, stored, mask_mpp), (size.height_px, size.width_px))
    )
    if not options.crop_tissue and options.glass == "keep":
        return Frame(choice, stored, extent, masks=None, mask_mpp=mask_mpp, given=given_mask)
    masks = _masks(slide, mpp, options, size)
    mask = masks.tissue if given_mask is None else given_mask
    box = _tissue_box(mask, scale, extent, options.mpp) if options.crop_tissue else extent
    # The box starts at a multiple of 512 px, where a mask pixel starts; its end may be that of the slide.
    part = (slice(box.y0 // scale, -(-box.y1 // scale)), slice(box.x0 // scale, -(-box.x1 // scale)))
    # Only if the writer needs them before the pixels; otherwise masks are computed from the written pixels.
    written = TissueMasks(masks.tissue[part], masks.pen[part]) if options.glass == "blank" else None
    given_part = None if given_mask is None else given_mask[part]
    return Frame(choice, stored, box, masks=written, mask_mpp=mask_mpp, given=given_part)


def slide_grid(slide: SlideSource, mpp: SourceMpp, stored_mpp: tuple[float, float], mask_mpp_um: float) -> SlideGrid:
    """Return the grid of a mask of the whole slide: where its pixels are on the slide.

    Args:
        slide: Open for reading.
        mpp: Microns per pixel of its finest level.
        stored_mpp: (y, x) microns per pixel of the store's finest level.
        mask_mpp_um: Microns per pixel of the mask.
    """
    affine = affine_to_source(slide, mpp, stored_mpp)
    return SlideGrid.within(slide.bounds, affine, stored_mpp, (mask_mpp_um, mask_mpp_um))


def affine_to_source(
    slide: SlideSource, mpp: SourceMpp, stored_mpp: tuple[float, float], y0: int = 0, x0: int = 0
) -> list[list[float]]:
    """Return the (2, 3) matrix that maps (y, x, 1) of the store's level 0 to (y, x) of the file's level 0.

    Both are measured from the corner of pixel 0. ``y0`` and ``x0`` are the corner of the part that is written, in
    pixels of the whole slide at ``stored_mpp``.
    """
    scale = [stored / stated for stored, stated in zip(stored_mpp, mpp.um, strict=True)]
    # The product of three maps: shift by the corner of the part, scale to source pixels, and the reader's own map.
    return [[a * scale[0], b * scale[1], a * y0 * scale[0] + b * x0 * scale[1] + c] for a, b, c in slide.to_file_px]


def whole_frame(slide: SlideSource, mpp: SourceMpp) -> Frame:
    """Return the frame of a slide whose own levels are kept."""
    finest = slide.levels[0]
    choice = LevelChoice(0, mpp.um, (1.0, 1.0), finest.height_px, finest.width_px, upsampled=False)
    return Frame(choice, mpp.um, Box.of_size(finest.height_px, finest.width_px), None, 0.0)


def _masks(slide: SlideSource, mpp: SourceMpp, options: IngestOptions, size: LevelSize) -> TissueMasks:
    """Return the masks of the whole slide on the grid of the pyramid's level that they are made from."""
    mask_mpp = options.mpp * 2 ** mask_level(options.mpp, options.tissue)
    choice = choose_level(slide, mpp.um, mask_mpp)
    pixels = LevelReader(slide, choice, options.max_bad).read(Box.of_size(choice.height_px, choice.width_px))
    return find_tissue(fitted(pixels, size), mask_mpp, options.tissue)


def _tissue_box(tissue: Mask, scale: int, extent: Box, mpp_um: float) -> Box:
    """Return the aligned box around the tissue and a margin; the whole slide if there is no tissue.

    Args:
        tissue: The tissue mask.
        scale: Pixels of the slide for each pixel of the mask.
        extent: Box of the whole slide.
        mpp_um: Microns per pixel of the slide.
    """
    rows, columns = np.flatnonzero(tissue.any(1)), np.flatnonzero(tissue.any(0))
    if not rows.size:
        return extent
    margin = round(CROP_MARGIN_UM / mpp_um)
    (y0, y1), (x0, x1) = (_aligned(indices, scale, margin) for indices in (rows, columns))
    return Box(y0, y1, x0, x1).intersect(extent)


def _aligned(indices: npt.NDArray[np.intp], scale: int, margin: int) -> tuple[int, int]:
    """Return the start and end, with a margin, of sorted indices of a mask, in pixels aligned to `CROP_ALIGN_PX`."""
    start, stop = int(indices[0]) * scale - margin, (int(indices[-1]) + 1) * scale + margin
    # Outwards on both sides: the tissue stays inside.
    return max(0, start // CROP_ALIGN_PX * CROP_ALIGN_PX), -(-stop // CROP_ALIGN_PX) * CROP_ALIGN_PX
