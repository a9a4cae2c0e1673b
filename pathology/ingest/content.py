"""The content written for a slide: its pixels resampled to a pyramid, or copies of its JPEG tiles.

Copied tiles are not decoded, so such a slide is measured separately:

```
finest level     tiles are copied, none is decoded
about 1 µm       up to 48 blocks of tissue, spread over the slide: blur, stains
about 8 µm       all of the slide: tissue, pen
```
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageCms

from data.arrays import Mask
from data.store.layout import StoredLevel, pyramid_levels
from data.store.writer import SlideWriter
from hyfi_core.plan.box import Box
from pathology.arrays import Planes
from pathology.errors import SlideError
from pathology.ingest.frame import Frame, find_frame, slide_grid, whole_frame
from pathology.ingest.level_reader import LevelReader, choose_level, stored_mpp
from pathology.ingest.lossless import LosslessSlide
from pathology.ingest.options import IngestOptions
from pathology.ingest.pyramid import PyramidBuilder, fitted, level_sizes
from pathology.readers.mpp import SourceMpp
from pathology.readers.per_thread import PerThread
from pathology.readers.slide_source import SlideSource
from pathology.readers.source_level import RGB
from pathology.readers.threads import run_in_pool
from pathology.tissue.blur import MEASURED_MPP_UM
from pathology.tissue.given import SlideTissue
from pathology.tissue.quality import Quality, QualityAccumulator, mask_level
from pathology.tissue.tissue import TissueParameters, find_tissue

_SAMPLES = 48
_SAMPLE_PX = 256
_CONVERTED_PX = 2**20
"""Pixels converted to sRGB at a time, which limits Pillow's copies."""


class SlideContent(Protocol):
    """The content of a slide, for a writer."""

    @property
    def kind(self) -> str:
        """``resampled`` or ``source``, as the slide's attributes say."""

    @property
    def frame(self) -> Frame:
        """The written part of the slide."""

    @property
    def levels(self) -> Sequence[StoredLevel]:
        """The levels to write, finest first."""

    @property
    def tissue_to_keep(self) -> tuple[Mask, float] | None:
        """(tissue mask, its microns per pixel): chunks far from tissue are omitted; None: all chunks are written."""

    @property
    def bad_tiles(self) -> int:
        """Number of tiles that could not be read."""

    @property
    def tiles(self) -> int:
        """Number of tiles requested."""

    def write(self, writer: SlideWriter, progress: Callable[[float], None]) -> Quality:
        """Write pixels and tissue label; return the measurements.

        Raises:
            SlideError: The slide cannot be read.
            OSError: The store cannot be written.
        """


def content_of(
    slide: SlideSource, mpp: SourceMpp, options: IngestOptions, tissue: SlideTissue | None = None
) -> SlideContent:
    """Return the content to write for an open slide.

    Args:
        slide: Open for reading.
        mpp: Microns per pixel of its finest level.
        options: How to ingest.
        tissue: Tissue outlines that the user gave; None: detect the tissue.

    Raises:
        SlideError: The slide cannot be ingested with these options.
        RequestError: The given outlines do not belong to this slide.
    """
    if options.lossless:
        return LosslessContent(slide, mpp, options, tissue)
    options_of_slide = options.at(stored_mpp(slide, mpp.um, None if options.native else options.mpp))
    return ResampledContent(slide, mpp, options_of_slide, tissue)


class ResampledContent:
    """A pyramid whose finest level has ``options.mpp``, made in one pass over the source."""

    kind = "resampled"

    def __init__(
        self, slide: SlideSource, mpp: SourceMpp, options: IngestOptions, tissue: SlideTissue | None = None
    ) -> None:
        self._options = options
        self._to_srgb = ToSrgb(slide.icc) if options.icc == "apply" and slide.icc else None
        self.frame = find_frame(slide, mpp, options, tissue)
        # After the frame, which determines the level to read.
        self._reader = LevelReader(slide, self.frame.choice, options.max_bad)
        self._sizes = self.frame.sizes(options)
        self.levels = pyramid_levels(self._sizes, options.mpp, options.pixel_codec, options.sharded)
        tissue_mask = self.frame.tissue if options.glass == "blank" else None
        self.tissue_to_keep = None if tissue_mask is None else (tissue_mask, self.frame.mask_mpp)

    @property
    def bad_tiles(self) -> int:
        """See `SlideContent`."""
        return self._reader.bad_tiles

    @property
    def tiles(self) -> int:
        """See `SlideContent`."""
        return self._reader.tiles

    def write(self, writer: SlideWriter, progress: Callable[[float], None]) -> Quality:
        """Write the pyramid and return what was measured. Memory: a shard (48 MiB) of each level, the slide at 8 µm."""
        accumulator = QualityAccumulator(self._sizes, self._options.mpp, self._options.tissue)
        done_px, all_px = 0, self.frame.box.area

        def read(box: Box) -> Planes:
            nonlocal done_px
            progress(done_px / all_px)
            done_px += box.area
            # Reuse shards of a killed run, unless bad tiles are allowed: these must be counted again.
            written = writer.read_back(0, box) if self._options.max_bad == 0 else None
            if written is not None:
                return written
            # The reader's coordinates begin at the slide's corner, the writer's at the frame's.
            pixels = self._reader.read(box.shift(self.frame.box.y0, self.frame.box.x0))
            return pixels if self._to_srgb is None else self._to_srgb.planes(pixels)

        def write(level: int, y0: int, x0: int, block: Planes) -> None:
            writer.write(level, y0, x0, block)
            # Measure the block while the writer's threads read it.
            accumulator.add(level, y0, x0, block)

        PyramidBuilder(self._sizes, read, write).build()
        quality = accumulator.result(self.frame.masks, self.frame.given)
        writer.write_tissue(quality.masks.tissue, quality.mpp_um)
        return quality


class LosslessContent:
    """The scanner's JPEG tiles and levels, copied."""

    kind = "source"

    def __init__(
        self, slide: SlideSource, mpp: SourceMpp, options: IngestOptions, tissue: SlideTissue | None = None
    ) -> None:
        self._slide, self._mpp, self._options, self._tissue = slide, mpp, options, tissue
        self._copier = LosslessSlide(slide)
        self._copier.check()
        self.frame = whole_frame(slide, mpp)  # the part of the slide that is written: all of it
        self.levels = self._copier.stored_levels(mpp.um)
        self.tissue_to_keep: tuple[Mask, float] | None = None
        self._quality: Quality | None = None
        # Chunks that show only glass are omitted, so where the tissue is must be known before the first is copied.
        if options.glass == "blank":
            self._quality = self._measure()
            self.tissue_to_keep = (self._quality.masks.tissue, self._quality.mpp_um)
        self.bad_tiles = self.tiles = 0

    def _measure(self) -> Quality:
        """Return the measurements: earlier ones if there are any, else new ones."""
        return self._quality or measure_lossless(self._slide, self._mpp, self._options.tissue, self._tissue)

    def write(self, writer: SlideWriter, progress: Callable[[float], None]) -> Quality:
        """Copy the tiles and return what was measured. Memory: three shards, and `measure_lossless` in parallel."""
        progress(0.0)
        with ThreadPoolExecutor(1, "measure") as pool:
            measured = pool.submit(self._measure)
            copied = self._copier.copy(writer, self._options.max_bad)
            # After the copy, whose error names the damaged tile; for measuring, the tile is only white.
            quality = measured.result()
        self.bad_tiles, self.tiles = len(copied.bad), copied.tiles
        writer.write_tissue(quality.masks.tissue, quality.mpp_um)
        return quality


def measure_lossless(
    slide: SlideSource, source_mpp: SourceMpp, parameters: TissueParameters, tissue: SlideTissue | None = None
) -> Quality:
    """Measure a slide whose tiles are copied; tiles that cannot be decoded count as white (the copy reports them).

    Memory: the slide at about 8 µm per pixel, and the pixels that are decoded for it.

    Args:
        slide: Open for reading.
        source_mpp: Microns per pixel of its finest level.
        parameters: Parameters of the tissue mask.
        tissue: Tissue outlines that the user gave; None: detect the tissue.

    Raises:
        SlideError: A level cannot be read at all.
        RequestError: The given outlines do not belong to this slide.
    """
    mpp = source_mpp.um
    # The resolution for which blur and stains are defined, or that of a coarser slide.
    base_um = max(MEASURED_MPP_UM, sum(mpp) / 2)
    fine = choose_level(slide, mpp, base_um)
    level = mask_level(base_um, parameters)
    sizes = level_sizes(fine.height_px, fine.width_px, at_least=level + 1)
    accumulator = QualityAccumulator(sizes, base_um, parameters)
    mask_mpp, shape = base_um * 2**level, (sizes[level].height_px, sizes[level].width_px)
    mask = None if tissue is None else tissue.mask(slide_grid(slide, source_mpp, mpp, mask_mpp), shape)
    coarse = choose_level(slide, mpp, mask_mpp)
    overview = LevelReader(slide, coarse, max_bad=1.0).read(Box.of_size(coarse.height_px, coarse.width_px))
    # The slide's level may differ by a pixel from that of the pyramid, on whose grid masks must lie.
    overview = fitted(overview, sizes[level])
    masks = find_tissue(overview, mask_mpp, parameters)
    accumulator.add(level, 0, 0, overview)
    if level > 0:
        reader = LevelReader(slide, fine, max_bad=1.0)

        def measure(box: Box) -> None:
            accumulator.add(0, box.y0, box.x0, reader.read(box))

        # Blocks do not overlap, so each is read and measured by one thread.
        run_in_pool(
            measure,
            _samples(masks.tissue if mask is None else mask, 2**level, Box.of_size(fine.height_px, fine.width_px)),
        )
    return accumulator.result(masks, mask)


def _samples(tissue: Mask, scale: int, extent: Box) -> list[Box]:
    """Return up to ``_SAMPLES`` blocks with tissue in their middle, spread over the slide, row by row.

    Args:
        tissue: The tissue mask.
        scale: Pixels of a block for each pixel of the mask.
        extent: Box of the whole level.
    """
    step = _SAMPLE_PX // scale
    # The mask pixel in the middle of each block.
    rows, columns = np.nonzero(tissue[step // 2 :: step, step // 2 :: step])
    chosen = np.unique(np.linspace(0, max(0, len(rows) - 1), _SAMPLES).astype(int))[: len(rows)]
    corners = [(int(rows[k]) * _SAMPLE_PX, int(columns[k]) * _SAMPLE_PX) for k in chosen]
    return [Box(y, y + _SAMPLE_PX, x, x + _SAMPLE_PX).intersect(extent) for y, x in corners]


class ToSrgb:
    """Converts with an ICC profile: relative colorimetric with black point compensation, as viewers do.

    Args:
        profile: The bytes of the slide's ICC profile.

    Raises:
        SlideError: They are not an RGB profile.
    """

    def __init__(self, profile: bytes) -> None:
        self._profile = profile
        # Little CMS transforms cache the last colour and are not thread-safe.
        self._transforms = PerThread(self._build, lambda transform: None)
        # Build one now: an unusable profile is then refused before anything is written.
        self._transforms.get()

    def _build(self) -> Any:
        """Return the colour transform from the slide's profile to sRGB."""
        try:
            return ImageCms.buildTransform(
                ImageCms.ImageCmsProfile(io.BytesIO(self._profile)),
                ImageCms.createProfile("sRGB"),
                "RGB",
                "RGB",
                renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
                flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
            )
        except (ImageCms.PyCMSError, OSError, ValueError) as error:
            raise SlideError(f"its ICC profile cannot be applied: {error}") from error

    # Transforms of Little CMS cannot be pickled; worker processes build their own.
    def __reduce__(self) -> tuple[Any, ...]:
        return ToSrgb, (self._profile,)

    def __call__(self, pixels: RGB) -> RGB:
        """Convert ``(h, w, 3)`` uint8 of any strides; return a new ``(h, w, 3)`` uint8 array."""
        height, width = pixels.shape[:2]
        out: RGB = np.empty((height, width, 3), np.uint8)
        step = max(1, _CONVERTED_PX // max(1, width))
        for y in range(0, height, step):
            image = Image.fromarray(np.ascontiguousarray(pixels[y : y + step]))
            out[y : y + step] = np.asarray(ImageCms.applyTransform(image, self._transforms.get()))
        return out

    def planes(self, pixels: Planes) -> Planes:
        """Convert ``(3, h, w)`` uint8; return a new ``(3, h, w)`` uint8 array."""
        return np.ascontiguousarray(self(pixels.transpose(1, 2, 0)).transpose(2, 0, 1))
