"""Benchmark of tissue masks and pen marks: the same whatever the resolution of the store.

    python -m workflows.benchmarks.tissue [SLIDE...] [--mpp 0.25 0.5 1 2] [--drawn 1024 2048] [--slides 3]
                                          [--slide-mpp X]

Every slide is ingested with ``--pen mask`` at every resolution that it has. Prints one line for each slide: the area of
the tissue at the first resolution, by how much it differs at the others, and how much of the slide is pen. ``--drawn``
adds drawn slides of these sizes with pen, for which the fraction of the drawn ink in the pen mask is printed, too, and
drawn slides without pen.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MASK_UM = 8.0


@dataclass(frozen=True)
class TissueAndPen:
    """Tissue and pen of a slide in a store.

    Attributes:
        area_mm2: Area of the tissue.
        pen_fraction: Fraction of the slide that has pen on it.
        flags: Flags of the slide.
    """

    area_mm2: float
    pen_fraction: float
    flags: tuple[str, ...]


def main() -> None:
    """Print a line for each given and each drawn slide: tissue and pen at each resolution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slides_given", type=Path, nargs="*", metavar="SLIDE")
    parser.add_argument("--mpp", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0])
    parser.add_argument("--drawn", type=int, nargs="*", default=[1024, 2048])
    parser.add_argument("--slides", type=int, default=3, help="drawn slides of each kind")
    parser.add_argument("--slide-mpp", type=float, help="microns per pixel of slides that state none")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for path in args.slides_given:
            print(describe(path.name, measure(path, args.mpp, Path(folder), args.slide_mpp)), flush=True)
        for name, path, ink in _drawn(args.drawn, args.slides, Path(folder)):
            recall = "" if ink is None else f", {ink_recall(path, ink):.0%} of the ink found"
            print(describe(name, measure(path, args.mpp, Path(folder))) + recall, flush=True)


def measure(
    path: Path, mpps: list[float], folder: Path, slide_mpp: float | None = None
) -> dict[float, TissueAndPen | str]:
    """Return tissue and pen of a slide at each resolution, or why it cannot be ingested there."""
    import shutil

    from data.store.slide_store import SlideStore
    from pathology.ingest.options import IngestOptions
    from pathology.ingest.slide import ingest_slide
    from pathology.tissue.tissue import TissueParameters

    by_mpp: dict[float, TissueAndPen | str] = {}
    for mpp in mpps:
        store = folder / "store"
        options = IngestOptions(mpp=mpp, slide_mpp=slide_mpp, tissue=TissueParameters(pen="mask"))
        record = ingest_slide(path, store, options, slide_id="slide")
        if record.status == "done":
            level = SlideStore.open(store / "slide.zarr").levels[0]
            slide_mm2 = level.height_px * level.width_px * level.mpp[0] * level.mpp[1] / 1e6
            pen = float(record.pen_fraction or 0)
            by_mpp[mpp] = TissueAndPen(float(record.tissue_fraction or 0) * slide_mm2, pen, tuple(record.flags))
        else:
            by_mpp[mpp] = "too coarse" if "coarser" in record.reason else record.reason
        # Removed at once: the stores of all resolutions of a large slide might not fit on the disk.
        shutil.rmtree(store, ignore_errors=True)
    return by_mpp


def describe(name: str, by_mpp: dict[float, TissueAndPen | str]) -> str:
    """Return a slide's results as one line of text: areas as differences from that at the first resolution."""
    first = next((result.area_mm2 for result in by_mpp.values() if isinstance(result, TissueAndPen)), math.nan)
    parts = []
    for mpp, result in by_mpp.items():
        if isinstance(result, str):
            parts.append(f"{mpp:g}: {result}")
            continue
        pen = f", pen {result.pen_fraction:.2%}" + " flagged" * ("pen" in result.flags)
        parts.append(f"{mpp:g}: {result.area_mm2 / first - 1:+.2%}{pen}")
    return f"{name}: {first:.4f} mm² | " + " | ".join(parts)


def ink_recall(path: Path, ink: NDArray[np.bool_]) -> float:
    """Return the fraction of the drawn ink (its mask at 8 µm) that the pen mask of a drawn slide of 0.5 µm has."""
    from hyfi_core.plan.box import Box
    from pathology.readers.sources import open_source
    from pathology.tissue.tissue import find_tissue

    source = open_source(path)
    pixels = source.read(Box.of_size(source.levels[0].height_px, source.levels[0].width_px), 0)
    source.close()
    side = ink.shape[0]
    # 16 pixels of 0.5 µm: the resolution of tissue masks.
    small = pixels.reshape(side, 16, side, 16, 3).mean((1, 3)).round().astype(np.uint8)
    marks = find_tissue(np.ascontiguousarray(small.transpose(2, 0, 1)), MASK_UM).pen
    return float(marks[ink].mean())


def _drawn(sizes: list[int], slides: int, folder: Path) -> Iterator[tuple[str, Path, NDArray[np.bool_] | None]]:
    """Draw slides with and without pen; yield (name, path, mask of the ink at 8 µm or None)."""
    from pathology.synthetic.archive import lay_out_archive, write_archive_slide
    from pathology.synthetic.artefacts import Artefacts

    for size in sizes:
        for pen in (True, False):
            for planned in lay_out_archive(slides, size, seed=0, pen=pen):
                path = write_archive_slide(planned, folder)
                # Slides are drawn at 0.5 µm: a pixel of the mask at 8 µm has 16 × 16 of theirs.
                ink = Artefacts(planned.spec).inked(MASK_UM, planned.spec.mpp_um, size // 16) if pen else None
                yield f"drawn, {size} px, {'pen' if pen else 'no pen'} ({planned.spec.index})", path, ink
                path.unlink()


if __name__ == "__main__":
    main()
