"""What an ingest would cost, from the slides' headers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pathology.discover import SlideJob
from pathology.errors import SlideError
from pathology.level_reader import choose_level
from pathology.mpp import resolve_mpp
from pathology.sources import open_source

_BYTES_PER_PX = 1.2
"""zstd:1 on stained tissue and glass mixed, pyramid included; from none of it (glass) to 2.4 (tissue all over)."""
_PX_PER_CORE_S = 25e6


@dataclass(slots=True)
class Forecast:
    """Slides that would be ingested, those that would not and why, pixels to decode, bytes to write, hours."""

    slides: int = 0
    source_px: int = 0
    store_bytes: float = 0.0
    refused: list[tuple[Path, str]] = field(default_factory=list)

    @property
    def core_hours(self) -> float:
        """Hours on one core of today."""
        return self.source_px / _PX_PER_CORE_S / 3600


def forecast(
    jobs: Sequence[SlideJob], mpp: float, slide_mpp: float | None, looked_at: Callable[[str], None]
) -> Forecast:
    """Open every slide, decode nothing, and add up.

    Args:
        jobs: The slides.
        mpp: Microns per pixel of the store.
        slide_mpp: ``--slide-mpp``.
        looked_at: Called with each slide's name.
    """
    total = Forecast()
    for job in jobs:
        try:
            source = open_source(job.source)
            try:
                stated = resolve_mpp(source.mpp, job.row.get("source_mpp", ""), slide_mpp)
                choice = choose_level(source, stated.um, mpp)
                level = source.levels[choice.level]
            finally:
                source.close()
        except SlideError as error:
            total.refused.append((job.source, str(error)))
        else:
            total.slides += 1
            total.source_px += level.height_px * level.width_px
            total.store_bytes += choice.height_px * choice.width_px * _BYTES_PER_PX
        looked_at(job.slide_id)
    return total
