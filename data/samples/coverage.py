"""How much of its tissue each training image holds, and what would hold all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data.csv_table import write_table
from data.samples.view import View
from hyfi_core.errors import RequestError

COVERAGE_COLUMNS = ("slide_id", "case_id", "coverage", "tissue_px", "flags", "pieces", "fits_size_px", "fits_mpp")
"""Columns of ``RUN/coverage.csv``; empty ``fits_…``: the image holds all (or there is no tissue at all)."""

STEPS = 8
"""Sizes and mpp are tried in steps of an eighth of those given."""
MOST_NAMED = 50


@dataclass(frozen=True)
class Coverage:
    """What one training image holds.

    Attributes:
        slide_id, case_id: the slide.
        share: tissue pixels shown / tissue pixels, 0.0 without tissue.
        tissue_px: tissue pixels of the slide at the training mpp.
        flags: of the view.
        pieces: rectangles of the slide in the image.
        fits_size_px: an image that would hold all tissue at this mpp; None where this one does.
        fits_mpp: micrometres per pixel at which an image of this size would.
    """

    slide_id: str
    case_id: str
    share: float
    tissue_px: int
    flags: tuple[str, ...]
    pieces: int
    fits_size_px: tuple[int, int] | None = None
    fits_mpp: float | None = None

    def row(self) -> dict[str, Any]:
        """Return the row of ``coverage.csv``; several flags are separated by ``;``, sizes are ``height x width``."""
        size = self.fits_size_px
        return {
            "slide_id": self.slide_id,
            "case_id": self.case_id,
            "coverage": self.share,
            "tissue_px": self.tissue_px,
            "flags": ";".join(self.flags),
            "pieces": self.pieces,
            "fits_size_px": f"{size[0]}x{size[1]}" if size else None,
            "fits_mpp": self.fits_mpp,
        }


class Covered(Protocol):
    """A dataset as far as coverage goes; :class:`data.samples.dataset.SlideDataset` is one."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def view(self, index: int) -> View:
        """Return a sample's view."""
        ...

    def coverage(self, index: int) -> Coverage:
        """Return a sample's coverage, with what would fit."""
        ...


def coverage_of(
    slide_id: str,
    case_id: str,
    view: View,
    mpp: float,
    align_px: int,
    holds_all: Callable[[tuple[int, int], float], bool],
) -> Coverage:
    """Return what an image holds; what would hold all is searched where it does not.

    Args:
        slide_id: the slide.
        case_id: its case.
        view: of the image.
        mpp: micrometres per pixel of the image.
        align_px: sizes proposed are multiples of it.
        holds_all: whether an image of a size (height, width), of the slide at so many times the mpp, holds all tissue.
    """
    known = Coverage(slide_id, case_id, view.coverage, view.tissue_px, view.flags, len(view.pieces))
    if "cropped" not in view.flags:
        return known

    def larger(k: int) -> tuple[int, int]:
        height, width = (math.ceil(side * (STEPS + k) / STEPS / align_px) * align_px for side in view.size_px)
        return height, width

    size = larger(_least(lambda k: holds_all(larger(k), 1.0)))
    coarser = _least(lambda k: holds_all(view.size_px, 1 + k / STEPS))
    fits_mpp = float(f"{mpp * (1 + coarser / STEPS):.6g}")
    return Coverage(slide_id, case_id, view.coverage, view.tissue_px, view.flags, known.pieces, size, fits_mpp)


def _least(fits: Callable[[int], bool]) -> int:
    """Return a k ≥ 1 that fits, the least where fitting at k means fitting beyond; found by doubling and halving."""
    fails, k = 0, 1
    while not fits(k):
        fails, k = k, 2 * k
    while k - fails > 1:
        middle = (fails + k) // 2
        if fits(middle):
            k = middle
        else:
            fails = middle
    return k


def check_coverage(dataset: Covered, min_coverage: float) -> None:
    """Check that every image holds enough of its slide's tissue.

    Raises:
        RequestError: names the slides below ``min_coverage``, and the size and the mpp that would fit them all.
    """
    low = [dataset.coverage(i) for i in range(len(dataset)) if dataset.view(i).coverage < min_coverage]
    if not low:
        return
    sizes = [c.fits_size_px for c in low if c.fits_size_px]
    named = [f"  {c.slide_id}: {c.share:.3f}{_remedy(c)}" for c in low[:MOST_NAMED]]
    if len(low) > MOST_NAMED:
        named.append(f"  … and {len(low) - MOST_NAMED} more")
    lines = [
        f"data.min_coverage: {min_coverage:g} of the tissue must be in each image; less is in {len(low)} slides:",
        *named,
    ]
    if sizes:
        height, width = max(s[0] for s in sizes), max(s[1] for s in sizes)
        mpp = max(c.fits_mpp for c in low if c.fits_mpp)
        lines.append(
            f"data.size_px=[{height},{width}] would fit all of it, or data.mpp={mpp:g} (`hyfi ingest --mpp {mpp:g}`)"
        )
    raise RequestError("\n".join(lines))


def _remedy(coverage: Coverage) -> str:
    if coverage.fits_size_px is None:
        return " (no tissue was found: leave the slide out of the splits)"
    height, width = coverage.fits_size_px
    return f" (fits {height} × {width} px, or {coverage.fits_mpp:g} µm per pixel)"


def write_coverage(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write ``RUN/coverage.csv`` from :meth:`data.samples.dataset.SlideDataset.coverage_table`, whole or not at all."""
    write_table(path, COVERAGE_COLUMNS, rows)
