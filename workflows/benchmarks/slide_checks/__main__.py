"""Measures the processor time of the checks of a slide's file against an ingest of the slide, and prints their ratio.

    python -m workflows.benchmarks.slide_checks SLIDE... [--mpp 1.0]

The checks are: pixel sizes, the levels' sizes and patches, and the colours of a sample of tiles.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import tifffile

from pathology.ingest.options import IngestOptions
from pathology.ingest.slide import ingest_slide
from pathology.readers.facts.levels import unlike_levels
from pathology.readers.facts.pixel_size import checked_mpp
from pathology.readers.sources import open_source
from pathology.readers.tiff_source import TiffSource
from pathology.readers.tile_decoders import believed_colour

_REPEATS = 5


def main() -> None:
    """Print, for each slide, the seconds of its checks and of its ingest, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slides", nargs="+", type=Path)
    parser.add_argument("--mpp", type=float, default=1.0)
    arguments = parser.parse_args()
    for path in arguments.slides:
        checks_s = min(_seconds(lambda path=path: _check(path)) for _ in range(_REPEATS))  # type: ignore[misc]
        with tempfile.TemporaryDirectory() as folder:
            # 0.5 only for files that state no plausible pixel size: an ingest refuses these otherwise.
            options = IngestOptions(mpp=arguments.mpp, slide_mpp=0.5)
            ingest_s = _seconds(lambda path=path: ingest_slide(path, Path(folder), options))  # type: ignore[misc] # noqa: B023
        ratio = checks_s / ingest_s
        print(f"{path.name}: checks {checks_s * 1e3:.1f} ms, ingest {ingest_s:.2f} s, ratio {ratio:.2%}")


def _check(path: Path) -> float:
    """Repeat the checks that opening a slide and its ingest make; return their seconds of processor."""
    with closing(open_source(path)) as slide, tifffile.TiffFile(path) as tiff:
        page = tiff.pages[0].aspage()
        start = time.process_time()
        if isinstance(slide, TiffSource):
            unlike_levels(slide.levels, slide.read)
            for level in slide.tiff_levels:
                believed_colour(page, level.tile_height_px, level.tile_width_px)
        size = (slide.levels[0].height_px, slide.levels[0].width_px)
        checked_mpp(slide.facts.mpp, slide.objective_power, size)
        return time.process_time() - start


def _seconds(work: Callable[[], object]) -> float:
    """Return the processor seconds of ``work``; if it returns a number, these are its own measurement."""
    start = time.process_time()
    returned = work()
    # `_check` measures itself, to leave out the opening of the file, which an ingest needs anyway.
    return returned if isinstance(returned, float) else time.process_time() - start


if __name__ == "__main__":
    main()
