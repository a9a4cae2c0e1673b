"""Cost estimate of an ingest from slide headers, and checks of disk space."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from data.errors import StoreError
from data.location import is_remote
from data.store.slide_store import SlideStore, slide_path
from hyfi_core.errors import RequestError
from hyfi_core.size_text import size_text
from pathology.errors import SlideError
from pathology.ingest.discover import SlideJob
from pathology.ingest.identity import SourceStamp
from pathology.ingest.level_reader import choose_level, stored_mpp
from pathology.ingest.lossless import LosslessSlide
from pathology.ingest.options import IngestOptions
from pathology.ingest.pseudonyms import scrubbed
from pathology.readers.sources import open_source

_BYTES_PER_PX = {"zstd": 1.2, "jpeg": 0.2}
"""Typical bytes per pixel of a slide with its pyramid; zstd: from 0.3 (only glass) to 2.4 (only tissue)."""
_PX_PER_CORE_S = 25e6
MIN_BYTES_PER_PX = 0.15
"""Lower bound of a slide's size, pyramid included: mostly glass, zstd."""
RESERVE_BYTES = 64 * 2**20
_MANY_TIMES, _MEASURED_SLIDES = 4, 50
"""`size_note` warns if stored slides are this many times larger than their files; it measures about 50 slides."""
_JPEG_SHARE = 1 / 7
"""Size with jpeg:85 relative to zstd:1; of four real and drawn slides, from 1/8 to 1/5.7."""
_SAMPLED = 8
"""Number of slides opened to estimate whether all fit."""


@dataclass(slots=True)
class Forecast:
    """Estimated cost of an ingest.

    Attributes:
        slides: Number of slides that would be ingested.
        source_px: Pixels to decode.
        store_px: Pixels of all slides in the store, without coarser levels.
        store_bytes: Bytes to write.
        refused: Slides that would fail, each with the reason.
    """

    slides: int = 0
    source_px: int = 0
    store_px: int = 0
    store_bytes: float = 0.0
    refused: list[tuple[SlideJob, str]] = field(default_factory=list)

    @property
    def core_hours(self) -> float:
        """Hours on one core."""
        return self.source_px / _PX_PER_CORE_S / 3600


def forecast(
    jobs: Sequence[SlideJob], options: IngestOptions, progress: Callable[[str], None] = lambda name: None
) -> Forecast:
    """Return the sum of the estimates of all slides, which are opened but not decoded.

    Args:
        jobs: The slides.
        options: How to ingest; see `IngestOptions`.
        progress: Called with each slide's name.
    """
    total = Forecast()
    for job in jobs:
        try:
            with closing(open_source(job.source, options.pick(job.row))) as source:
                stated = options.mpp_of(source, job.row)
                if options.lossless:
                    LosslessSlide(source)  # only to refuse a slide whose tiles cannot be copied
                    read_px, written_px, written_bytes = 0, 0, float(SourceStamp.of(job.source).size_bytes)
                else:
                    wanted_um = stored_mpp(source, stated.um, None if options.native else options.mpp)
                    choice = choose_level(source, stated.um, wanted_um)
                    level = source.levels[choice.level]
                    read_px, written_px = level.height_px * level.width_px, choice.height_px * choice.width_px
                    written_bytes = written_px * _BYTES_PER_PX[options.pixel_codec.name]
        except RequestError:
            raise
        except SlideError as error:
            reason = scrubbed(str(error), job.source, job.slide_id) if job.secret else str(error)
            total.refused.append((job, reason))
        except Exception as error:
            # An unexpected error in a reader: the ingest of this slide will fail, too; estimate the others.
            total.refused.append((job, type(error).__name__ if job.secret else f"{type(error).__name__}: {error}"))
        else:
            total.slides += 1
            total.source_px += read_px
            total.store_px += written_px
            total.store_bytes += written_bytes
        progress(job.slide_id)
    return total


def lower_bound_bytes(jobs: Sequence[SlideJob], options: IngestOptions) -> float:
    """Return a lower bound of the store's bytes, extrapolated from a few slides; 0 if options may omit parts."""
    may_omit_parts = options.crop_tissue or options.lossless or options.glass != "keep" or not options.pixel_codec.exact
    if not jobs or may_omit_parts:
        return 0.0
    # Spread over the list, because neighbours are often of one case or scanner.
    step = max(1, len(jobs) // _SAMPLED)
    sampled = forecast(jobs[::step][:_SAMPLED], options)
    return sampled.store_px / min(len(jobs), _SAMPLED) * len(jobs) * MIN_BYTES_PER_PX


def free_bytes(folder: Path) -> int | None:
    """Return the free bytes at ``folder``, or at its nearest existing parent; None on object storage, without limit."""
    if is_remote(folder):
        return None
    # The root is its own parent.
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def size_note(store: Path, slide_ids: Sequence[str], options: IngestOptions) -> str:
    """Return a note if stored slides are many times larger than their files, with options that need less; else ``""``.

    Args:
        store: The store.
        slide_ids: Slides of this ingest; a sample of them is opened.
        options: Options of this ingest.
    """
    if not options.pixel_codec.exact or options.lossless:
        return ""
    stored_bytes = source_bytes = 0
    sampled = slide_ids[:: max(1, len(slide_ids) // _MEASURED_SLIDES)]
    for slide_id in sampled:
        try:
            slide = SlideStore.open(slide_path(store, slide_id), check_files=False)
        except StoreError:
            continue
        # Shards that show only glass were not written, and are listed without a size.
        stored_bytes += sum(int(shard.get("size", 0)) for shard in slide.attributes.get("shards", {}).values())
        source_bytes += int(slide.attributes.get("size_bytes", 0))
    if not source_bytes or stored_bytes < _MANY_TIMES * source_bytes:
        return ""
    scale = len(slide_ids) / len(sampled)
    stored, jpeg, files = (
        size_text(value * scale) for value in (stored_bytes, stored_bytes * _JPEG_SHARE, source_bytes)
    )
    return (
        f"note: these slides take {stored} in the store, {stored_bytes / source_bytes:.0f} times their files, as their "
        f"pixels are kept exactly; --codec jpeg:85 would take about {jpeg}; --lossless, for files with JPEG tiles, "
        f"which it keeps at the scanner's resolution, about {files}"
    )


def require_room(store: Path, finest_px: int) -> None:
    """Check that a slide can fit before it is written.

    Args:
        store: The store's folder.
        finest_px: Pixels of the slide's finest level.

    Raises:
        OSError: It cannot (`errno.ENOSPC`); the message has the needed and the free bytes.
    """
    needed_bytes, free = int(finest_px * MIN_BYTES_PER_PX) + RESERVE_BYTES, free_bytes(store)
    if free is not None and needed_bytes > free:
        reason = f"disk full: the next slide needs at least {size_text(needed_bytes)}, {size_text(free)} are free"
        raise OSError(errno.ENOSPC, reason, str(store))
