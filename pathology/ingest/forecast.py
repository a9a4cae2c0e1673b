"""What an ingest would cost, from the slides' headers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from pathology.errors import SlideError
from pathology.ingest.discover import SlideJob
from pathology.ingest.disk import LEAST_BYTES_PER_PX
from pathology.ingest.identity import SourceStamp
from pathology.ingest.level_reader import choose_level
from pathology.ingest.lossless import LosslessSlide
from pathology.ingest.options import IngestOptions
from pathology.ingest.pseudonyms import scrubbed
from pathology.readers.mpp import resolve_mpp
from pathology.readers.sources import open_source

_BYTES_PER_PX = {"zstd": 1.2, "jpeg": 0.2}
"""Stained tissue and glass mixed, pyramid included; zstd: from 0.3 (glass) to 2.4 (tissue all over)."""
_PX_PER_CORE_S = 25e6


_SAMPLED = 8
"""Slides that are opened to tell whether all of them can fit."""


@dataclass(slots=True)
class Forecast:
    """Slides that would be ingested, those that would not and why, pixels to decode, bytes to write, hours."""

    slides: int = 0
    source_px: int = 0
    store_px: int = 0
    store_bytes: float = 0.0
    refused: list[tuple[SlideJob, str]] = field(default_factory=list)

    @property
    def core_hours(self) -> float:
        """Hours on one core of today."""
        return self.source_px / _PX_PER_CORE_S / 3600


def forecast(
    jobs: Sequence[SlideJob], options: IngestOptions, looked_at: Callable[[str], None] = lambda name: None
) -> Forecast:
    """Open every slide, decode nothing, and add up.

    Args:
        jobs: The slides.
        options: See there.
        looked_at: Called with each slide's name.
    """
    total = Forecast()
    for job in jobs:
        try:
            with closing(open_source(job.source)) as source:
                stated = resolve_mpp(source.mpp, job.row.get("source_mpp", ""), options.slide_mpp)
                if options.lossless:
                    LosslessSlide(source)
                    read_px, written_px, written_bytes = 0, 0, float(SourceStamp.of(job.source).size_bytes)
                else:
                    choice = choose_level(source, stated.um, options.mpp)
                    level = source.levels[choice.level]
                    read_px, written_px = level.height_px * level.width_px, choice.height_px * choice.width_px
                    written_bytes = written_px * _BYTES_PER_PX[options.pixel_codec.name]
        except SlideError as error:
            reason = scrubbed(str(error), job.source, job.slide_id) if job.secret else str(error)
            total.refused.append((job, reason))
        else:
            total.slides += 1
            total.source_px += read_px
            total.store_px += written_px
            total.store_bytes += written_bytes
        looked_at(job.slide_id)
    return total


def sampled_least_bytes(jobs: Sequence[SlideJob], options: IngestOptions) -> float:
    """Return what all slides take at the very least, judged from a few of them; 0 where parts may be left out."""
    may_be_less = options.crop_tissue or options.lossless or options.glass != "keep" or not options.pixel_codec.exact
    if not jobs or may_be_less:
        return 0.0
    step = max(1, len(jobs) // _SAMPLED)
    found = forecast(jobs[::step][:_SAMPLED], options)
    return found.store_px / min(len(jobs), _SAMPLED) * len(jobs) * LEAST_BYTES_PER_PX
