"""Coverage: the fraction of tissue that each training image shows, and the size that would show all."""

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
    """Coverage of one training image.

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

    @property
    def size_px(self) -> tuple[int, int]:
        """(height, width) of every image."""
        ...

    @property
    def align_px(self) -> int:
        """Grid on which pieces of tissue are moved."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def coverage_at(self, index: int, size_px: tuple[int, int]) -> float:
        """Return what share of a slide's tissue an image of another size would hold."""
        ...

    def view(self, index: int) -> View:
        """Return a sample's view."""
        ...

    def coverage(self, index: int) -> Coverage:
        """Return a sample's coverage, with the sizes that would fit."""
        ...


def coverage_of(
    slide_id: str,
    case_id: str,
    view: View,
    mpp: float,
    align_px: int,
    holds_all: Callable[[tuple[int, int], float], bool],
) -> Coverage:
    """Return the coverage of an image, and search the size that shows all if it does not.

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
        RequestError: names the slides below ``min_coverage``, the least size of the same shape at which all of them
            show enough, and the size and the mpp at which they show everything.
    """
    low = [i for i in range(len(dataset)) if dataset.view(i).coverage < min_coverage]
    if not low:
        return
    found = {i: dataset.coverage(i) for i in low}
    named = [f"  {c.slide_id}: {c.share:.3f}{_NO_TISSUE * (not c.tissue_px)}" for c in found.values()]
    if len(named) > MOST_NAMED:
        named[MOST_NAMED:] = [f"  … and {len(named) - MOST_NAMED} more"]
    lines = [
        f"data.min_coverage: each image must show {min_coverage:g} of its slide's tissue; these {len(low)} slides "
        f"show less:",
        *named,
    ]
    with_tissue = [i for i in low if found[i].tissue_px]
    if with_tissue:
        height, width = _least_size(dataset, with_tissue, min_coverage)
        lines.append(
            f"data.size_px=[{height},{width}] is the smallest size of this shape that shows enough of every slide"
        )
        sizes = [size for i in with_tissue if (size := found[i].fits_size_px)]
        height, width = max(h for h, _ in sizes), max(w for _, w in sizes)
        mpp = max(found[i].fits_mpp or 0.0 for i in with_tissue)
        lines.append(
            f"data.size_px=[{height},{width}] would show all tissue, and so would data.mpp={mpp:g} (`hyfi ingest "
            f"--mpp {mpp:g}`)"
        )
    raise RequestError("\n".join(lines))


_NO_TISSUE = " (no tissue was found: leave the slide out of the splits)"


def _least_size(dataset: Covered, slides: list[int], min_coverage: float) -> tuple[int, int]:
    """Return the least size, in steps of the grid and of the dataset's shape, at which each slide shows enough."""
    height, width = dataset.size_px
    align = dataset.align_px

    def size(k: int) -> tuple[int, int]:
        factor = 1 + k * align / min(height, width)
        return math.ceil(height * factor / align) * align, math.ceil(width * factor / align) * align

    def enough(slide: int, k: int) -> bool:
        return dataset.coverage_at(slide, size(k)) >= min_coverage

    least = max(_least(lambda k, slide=slide: enough(slide, k)) for slide in slides)  # type: ignore[misc]
    while not all(enough(slide, least) for slide in slides):  # a larger image may be packed worse
        least += 1
    return size(least)


def write_coverage(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write ``RUN/coverage.csv`` from :meth:`data.samples.dataset.SlideDataset.coverage_table`, whole or not at all."""
    write_table(path, COVERAGE_COLUMNS, rows)
