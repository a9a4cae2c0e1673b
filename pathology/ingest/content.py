"""What is written of a slide: its pixels resampled to a pyramid, or its JPEG tiles as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from data.store.writer import Mask, SlideWriter, StoredLevel, pyramid_levels
from hyfi_core.plan.box import Box
from pathology.ingest.frame import Frame, find_frame, whole_frame
from pathology.ingest.level_reader import LevelReader
from pathology.ingest.lossless import LosslessSlide
from pathology.ingest.lossless_survey import survey_lossless
from pathology.ingest.options import IngestOptions
from pathology.ingest.pyramid import PyramidBuilder
from pathology.readers.icc import ToSrgb
from pathology.readers.mpp import SourceMpp
from pathology.readers.resample import Planes
from pathology.readers.sources import SlideSource
from pathology.tissue.quality import Quality, Survey

Tick = Callable[[float], None]


class SlideContent(Protocol):
    """What a writer needs, and what is known once it is written.

    Attributes:
        kind: ``resampled`` or ``source``, as the slide's attributes say.
        frame: Which part of the slide it is.
        levels: For the writer.
        glass: For the writer: the tissue, where the rest is to be left out, and its microns per pixel.
        bad_tiles: Tiles that could not be read.
        tiles: Tiles that were asked for.
    """

    kind: str
    frame: Frame
    levels: Sequence[StoredLevel]
    glass: tuple[Mask, float] | None
    bad_tiles: int
    tiles: int

    def write(self, writer: SlideWriter, tick: Tick) -> Quality:
        """Write pixels and tissue label; return what was found out on the way.

        Raises:
            SlideError: The slide cannot be read.
            OSError: The store cannot be written.
        """


def content_of(slide: SlideSource, mpp: SourceMpp, options: IngestOptions) -> SlideContent:
    """Return what is to be written of an open slide.

    Raises:
        SlideError: It does not have what is asked for.
    """
    return LosslessContent(slide, mpp, options) if options.lossless else ResampledContent(slide, mpp, options)


class ResampledContent:
    """A pyramid at the store's own microns per pixel, made in one pass over the source."""

    kind = "resampled"

    def __init__(self, slide: SlideSource, mpp: SourceMpp, options: IngestOptions) -> None:
        self._options = options
        self._to_srgb = ToSrgb(slide.icc) if options.icc == "apply" and slide.icc else None
        self.frame = find_frame(slide, mpp, options)
        self._reader = LevelReader(slide, self.frame.choice, options.max_bad)
        self._sizes = self.frame.sizes(options)
        self.levels = pyramid_levels(self._sizes, options.mpp, options.pixel_codec, options.sharded)
        masks = self.frame.masks
        self.glass = None if masks is None else (masks.tissue, self.frame.mask_mpp)

    @property
    def bad_tiles(self) -> int:
        """See `SlideContent`."""
        return self._reader.bad_tiles

    @property
    def tiles(self) -> int:
        """See `SlideContent`."""
        return self._reader.tiles

    def write(self, writer: SlideWriter, tick: Tick) -> Quality:
        """See `SlideContent`. Memory: one shard (48 MiB) of each level and the slide at about 8 µm per pixel."""
        survey = Survey(self._sizes, self._options.mpp, self._options.tissue)
        done_px, all_px = 0, self.frame.box.area

        def read(box: Box) -> Planes:
            nonlocal done_px
            tick(done_px / all_px)
            done_px += box.area
            # Shards of a run that was killed are read back, unless tiles may be bad: those must be counted again.
            kept = writer.read_back(0, box) if self._options.max_bad == 0 else None
            return self._read(box) if kept is None else kept

        def write(level: int, y0: int, x0: int, block: Planes) -> None:
            writer.write(level, y0, x0, block)
            survey.see(level, y0, x0, block)

        PyramidBuilder(self._sizes, read, write).build()
        quality = survey.result(self.frame.masks)
        writer.write_tissue(quality.masks.tissue, quality.mpp_um)
        return quality

    def _read(self, box: Box) -> Planes:
        pixels = self._reader.read(box.shift(self.frame.box.y0, self.frame.box.x0))
        return pixels if self._to_srgb is None else self._to_srgb.planes(pixels)


class LosslessContent:
    """The scanner's JPEG tiles and levels, copied."""

    kind = "source"

    def __init__(self, slide: SlideSource, mpp: SourceMpp, options: IngestOptions) -> None:
        self._slide, self._mpp, self._options = slide, mpp, options
        self._copy = LosslessSlide(slide)
        self._copy.check()
        self.frame = whole_frame(slide, mpp)
        self.levels = self._copy.stored_levels(mpp.um)
        self.glass: tuple[Mask, float] | None = None
        self._quality: Quality | None = None
        if options.glass == "blank":  # what is to be left out must be known before
            self._quality = self._survey()
            self.glass = (self._quality.masks.tissue, self._quality.mpp_um)
        self.bad_tiles = self.tiles = 0

    def _survey(self) -> Quality:
        return self._quality or survey_lossless(self._slide, self._mpp.um, self._options.tissue)

    def write(self, writer: SlideWriter, tick: Tick) -> Quality:
        """See `SlideContent`. Memory: the tiles of three shards, and what the survey needs, which goes on beside."""
        tick(0.0)
        with ThreadPoolExecutor(1, "survey") as beside:
            survey = beside.submit(self._survey)
            copied = self._copy.copy(writer, self._options.max_bad)
            quality = survey.result()
        self.bad_tiles, self.tiles = len(copied.bad), copied.tiles
        writer.write_tissue(quality.masks.tissue, quality.mpp_um)
        return quality
