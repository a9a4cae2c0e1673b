"""Coverage: the fraction of a slide's tissue that its training image shows, and the image size that would show all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from data.csv_table import write_table
from data.samples.view import View
from hyfi_core.errors import RequestError

COVERAGE_COLUMNS = ("slide_id", "case_id", "coverage", "tissue_px", "flags", "pieces", "fits_size_px", "fits_mpp")
"""Columns of ``RUN/coverage.csv``; ``fits_…`` are empty if the image shows all tissue, or if the slide has none."""

STEPS = 8
"""A search for a size or an mpp goes in steps of 1/8 of the present one."""
MAX_LISTED = 50
"""Most slides that a message lists."""


@dataclass(frozen=True)
class Coverage:
    """Coverage of one training image.

    Attributes:
        slide_id, case_id: The slide and its case.
        share: Tissue pixels shown / tissue pixels of the slide; 0.0 without tissue.
        tissue_px: Tissue pixels of the slide at the training mpp.
        flags: Flags of the view.
        pieces: Number of rectangles of the slide in the image.
        fits_size_px: (height, width) of an image that would show all tissue at this mpp; None if this one does.
        fits_mpp: Microns per pixel at which an image of this size would show all tissue; None if this one does.
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
        """Return the row of ``coverage.csv``; flags are joined by ``;``, a size is ``<height>x<width>``."""
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


class CoverageSource(Protocol):
    """A dataset whose coverage is measured; :class:`data.samples.dataset.SlideDataset` implements it."""

    @property
    def size_px(self) -> tuple[int, int]:
        """(height, width) of every image."""
        ...

    @property
    def align_px(self) -> int:
        """Grid to which pieces of tissue are aligned."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def coverage_at(self, index: int, size_px: tuple[int, int]) -> float:
        """Return the coverage of an image of another size (height, width)."""
        ...

    def view(self, index: int) -> View:
        """Return a sample's view."""
        ...

    def coverage(self, index: int) -> Coverage:
        """Return a sample's coverage, with a size and an mpp that would show all tissue."""
        ...


def coverage_of(
    slide_id: str,
    case_id: str,
    view: View,
    mpp: float,
    align_px: int,
    holds_all: Callable[[tuple[int, int], float], bool],
) -> Coverage:
    """Return the coverage of an image; if it does not show all tissue, search for a size and an mpp that would.

    Args:
        slide_id: The slide.
        case_id: Its case.
        view: The image's view.
        mpp: Microns per pixel of the image.
        align_px: The proposed size is a multiple of this.
        holds_all: Called with a size (height, width) and a factor of the mpp; returns whether an image of that size and
            mpp shows all tissue.
    """
    coverage = Coverage(slide_id, case_id, view.coverage, view.tissue_px, view.flags, len(view.pieces))
    if "cropped" not in view.flags:
        return coverage

    def enlarged(k: int) -> tuple[int, int]:
        height, width = (math.ceil(side * (STEPS + k) / STEPS / align_px) * align_px for side in view.size_px)
        return height, width

    # Sides and mpp grow in steps of 1 / STEPS of the present ones: by the fewest steps k at which all tissue is shown.
    fits_size_px = enlarged(_smallest(lambda k: holds_all(enlarged(k), 1.0)))
    mpp_steps = _smallest(lambda k: holds_all(view.size_px, 1 + k / STEPS))
    fits_mpp = float(f"{mpp * (1 + mpp_steps / STEPS):.6g}")
    return replace(coverage, fits_size_px=fits_size_px, fits_mpp=fits_mpp)


def _smallest(fits: Callable[[int], bool]) -> int:
    """Return a k ≥ 1 for which ``fits(k)``, by doubling and bisection; the smallest k if ``fits`` is monotone."""
    # 0 stands for the present image, which does not fit.
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


def check_coverage(dataset: CoverageSource, min_coverage: float) -> None:
    """Check that every image holds enough of its slide's tissue.

    Raises:
        RequestError: Some do not. The message names these slides, a size with the same ratio of height to width at
            which all show enough, and a size and an mpp at which they show all tissue.
    """
    low = [i for i in range(len(dataset)) if dataset.view(i).coverage < min_coverage]
    if not low:
        return
    too_low = {i: dataset.coverage(i) for i in low}
    named = [f"  {c.slide_id}: {c.share:.3f}{'' if c.tissue_px else _NO_TISSUE}" for c in too_low.values()]
    if len(named) > MAX_LISTED:
        named[MAX_LISTED:] = [f"  … and {len(named) - MAX_LISTED} more"]
    lines = [
        f"data.min_coverage: each image must show {min_coverage:g} of its slide's tissue; "
        f"{f'these {len(low)} slides show' if len(low) > 1 else 'this slide shows'} less:",
        *named,
    ]
    with_tissue = [i for i in low if too_low[i].tissue_px]
    if with_tissue:
        height, width = _smallest_size(dataset, with_tissue, min_coverage)
        lines.append(f"data.size_px=[{height},{width}] shows enough of every slide")
        sizes = [size for i in with_tissue if (size := too_low[i].fits_size_px)]
        height, width = max(h for h, _ in sizes), max(w for _, w in sizes)
        mpp = max(too_low[i].fits_mpp or 0.0 for i in with_tissue)
        lines.append(
            f"data.size_px=[{height},{width}] would show all tissue, and so would data.mpp={mpp:g} (`hyfi ingest "
            f"--mpp {mpp:g}`)"
        )
    raise RequestError("\n".join(lines))


_NO_TISSUE = " (no tissue was found: leave the slide out of the splits)"


def _smallest_size(dataset: CoverageSource, slides: list[int], min_coverage: float) -> tuple[int, int]:
    """Return a small (height, width) at which the images of all ``slides`` show enough tissue.

    It has about the ratio of height to width of the dataset, and is a multiple of ``align_px``.
    """
    height, width = dataset.size_px
    align, short = dataset.align_px, min(height, width)

    def size(k: int) -> tuple[int, int]:
        # In whole numbers: as a float, 48 * (1 + 160 / 48) is a little more than 208, and would be rounded up.
        rows, columns = (-(-side * (short + k * align) // (short * align)) for side in (height, width))
        return rows * align, columns * align

    def enough(slide: int, k: int) -> bool:
        return dataset.coverage_at(slide, size(k)) >= min_coverage

    k = max(_smallest(lambda k, slide=slide: enough(slide, k)) for slide in slides)  # type: ignore[misc]
    while not all(enough(slide, k) for slide in slides):  # packing is not monotone: a larger image may show less
        k += 1
    return size(k)


def write_coverage(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write ``RUN/coverage.csv`` from :meth:`data.samples.dataset.SlideDataset.coverage_table`, atomically."""
    write_table(path, COVERAGE_COLUMNS, rows)
