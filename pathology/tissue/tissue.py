"""Where the tissue is, at about 8 µm per pixel: pen, dust, coverslip edges and grey scanners notwithstanding.

All is decided in optical density relative to the slide's own glass, so a scanner's grey or yellowish background is
not tissue. Stained tissue absorbs differently in the three channels, and most in green (haematoxylin and eosin both
do). Dust, shadows and ink absorb otherwise (see `pathology.tissue.pen`). How far density and colour must
stand out is Otsu's threshold, held between a floor (an empty slide has no tissue) and a ceiling (dark nuclei do not
make pale stroma glass). Fat, which is nearly as clear as glass, is found by its walls (see `pathology.tissue.fat`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from skimage.filters import threshold_otsu

from data.components import fill_small_holes, without_small
from hyfi_core.errors import RequestError
from pathology.readers.threads import run_in_pool
from pathology.tissue.density import Float, density_of, glass_colour, strips_of
from pathology.tissue.fat import find_fat, wall_density
from pathology.tissue.morphology import closed
from pathology.tissue.pen import PALEST_INK, ink, pen_marks, smooth

Mask = npt.NDArray[np.bool_]
Planes = npt.NDArray[np.uint8]
Levels = npt.NDArray[np.uint16]

_MOST_VALUES = 1_000_000
"""About so many pixels decide a threshold."""
_DENSEST = 0.5
"""Denser pixels count as this for the thresholds, which lie far below."""
_STEP = np.float32(_DENSEST / 65_535)
"""What density and colour are kept in, 16 bits each."""
_CORE, _CERTAIN, _FAINT, _COLOURED, _EVEN = 1, 2, 4, 8, 16
PEN = ("flag", "mask", "off")


@dataclass(frozen=True, slots=True)
class TissueParameters:
    """What the mask depends on; kept with every slide.

    Attributes:
        mpp_um: Resolution aimed at; the pyramid's level nearest to it is used.
        smooth_um: Standard deviation of the smoothing, about the size of a cell.
        density: Floor and ceiling of the threshold on optical density.
        colour: Floor and ceiling of the threshold on the channels' difference in optical density.
        close_um: Gaps up to about twice this are bridged.
        smallest_um2: Smaller pieces are specks.
        hole_um2: Smaller holes are filled.
        fat: Whether areas of fat count as tissue.
        pen: ``flag`` finds pen marks and leaves the tissue mask as it is; ``mask`` takes them out of it; ``off`` does
            not look for them.
    """

    mpp_um: float = 8.0
    smooth_um: float = 8.0
    density: tuple[float, float] = (0.012, 0.02)
    colour: tuple[float, float] = (0.018, 0.025)
    close_um: float = 24.0
    smallest_um2: float = 30_000.0
    hole_um2: float = 120_000.0
    fat: bool = True
    pen: str = "flag"

    def changed(self, settings: Sequence[str]) -> TissueParameters:
        """Return these parameters with some of them changed.

        Args:
            settings: ``name=value`` each: a number, ``floor,ceiling`` for a pair, ``true`` or ``false`` for ``fat``.

        Raises:
            RequestError: There is no such parameter, or the value is none of its kind.
        """
        found: dict[str, Any] = {}
        for text in settings:
            name, _, value = text.partition("=")
            known = getattr(self, name, None) if name in _SETTABLE else None
            if known is None:
                raise RequestError(f"--tissue-set {text}: expected NAME=VALUE, with a name of {', '.join(_SETTABLE)}")
            try:
                found[name] = _parsed(value, known)
            except ValueError as error:
                example = ",".join(map(str, known)) if isinstance(known, tuple) else str(known).lower()
                raise RequestError(f"--tissue-set {text}: {error}; {name}={example} is the default") from error
        return replace(self, **found)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of the fields."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


_SETTABLE = ("density", "colour", "smooth_um", "close_um", "smallest_um2", "hole_um2", "fat")


def _parsed(text: str, like: Any) -> Any:
    """Return the value of a parameter, of the kind of ``like``.

    Raises:
        ValueError: It is none.
    """
    if isinstance(like, bool):
        if text not in ("true", "false"):
            raise ValueError("expected true or false")
        return text == "true"
    numbers = tuple(float(part) for part in text.split(","))
    if any(not math.isfinite(number) or number < 0 for number in numbers) or tuple(sorted(numbers)) != numbers:
        raise ValueError("expected numbers ≥ 0 in increasing order")
    if len(numbers) != (len(like) if isinstance(like, tuple) else 1):
        raise ValueError("expected two numbers" if isinstance(like, tuple) else "expected one number")
    return numbers if isinstance(like, tuple) else numbers[0]


@dataclass(frozen=True, slots=True)
class TissueMasks:
    """Tissue and pen marks of one slide, both ``(h, w)`` bool; they overlap unless pen marks were masked."""

    tissue: Mask
    pen: Mask


def find_tissue(image: Planes, mpp_um: float, parameters: TissueParameters | None = None) -> TissueMasks:
    """Find the tissue and the pen marks of a slide.

    Memory: about 11 bytes a pixel besides the image, and strips of half a million pixels as floats.

    Args:
        image: ``(3, h, w)`` uint8, the whole slide at a low resolution.
        mpp_um: Its microns per pixel.
        parameters: See `TissueParameters`; the default values suit H&E and immunostains.
    """
    p = parameters or TissueParameters()
    glass = glass_colour(image)
    seen = _Seen.of(image, glass, mpp_um, p)
    marks = seen.pen(mpp_um)
    pen = marks if p.pen == "mask" else np.zeros_like(marks)
    stained = _stained(seen, pen, p)
    gap_px, smallest_px = max(1, round(p.close_um / mpp_um)), _pixels(p.smallest_um2, mpp_um)
    tissue = closed(stained, gap_px) & ~pen
    if p.fat:
        known = without_small(tissue, smallest_px)
        fat = find_fat(image, glass, known | pen, mpp_um, wall_density(seen.median_density(known)))
        tissue = closed(tissue | fat, gap_px) & ~pen if fat.any() else tissue
    tissue = without_small(tissue, smallest_px)
    # What reaches the picture's border is no hole: a small slide without tissue would be one.
    fill_small_holes(tissue, _pixels(p.hole_um2, mpp_um))
    return TissueMasks(tissue & ~pen, marks)


def _stained(seen: _Seen, pen: Mask, p: TissueParameters) -> Mask:
    dense, coloured = (_threshold(v, pen, b) for v, b in ((seen.density, p.density), (seen.colour, p.colour)))
    stained: Mask = np.empty_like(pen)
    for rows in strips_of(*pen.shape):
        # What absorbs alike in all channels has no stain: shadows, dust, the coverslip's edge.
        stained[rows] = (seen.marks[rows] & np.uint8(_COLOURED)).astype(bool) & ~pen[rows]
        stained[rows] &= (seen.density[rows] > dense) & (seen.colour[rows] > coloured)
    return stained


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the decision is made from, five bytes a pixel.

    Attributes:
        density: ``(h, w)`` uint16, mean optical density in `_STEP`, smoothed.
        colour: ``(h, w)`` uint16, the channels' difference in it.
        marks: ``(h, w)`` uint8, one bit for each thing that ink is, one for what is not grey.
    """

    density: Levels
    colour: Levels
    marks: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, image: Planes, glass: Float, mpp_um: float, p: TissueParameters) -> _Seen:
        """Look at a slide; in strips, so that one of 25 × 75 mm needs no gigabytes of floats."""
        shape = image.shape[1:]
        seen = cls(np.empty(shape, np.uint16), np.empty(shape, np.uint16), np.zeros(shape, np.uint8))

        def look(rows: slice) -> None:
            density = density_of(image, glass, rows, p.smooth_um / mpp_um)
            mean: Float = (density[0] + density[1] + density[2]) * np.float32(1 / 3)
            colour: Float = density.max(0) - density.min(0)
            marks = (colour > 0.2 * mean).view(np.uint8) * np.uint8(_COLOURED)
            dark = np.flatnonzero(mean > PALEST_INK) if p.pen != "off" else np.empty(0, np.intp)
            core, certain, faint = ink(density.reshape(3, -1).take(dark, axis=1), mean.take(dark), colour.take(dark))
            bits = np.uint8(_CORE) * core | np.uint8(_CERTAIN) * certain | np.uint8(_FAINT) * faint
            if core.any():
                bits |= np.uint8(_EVEN) * (core & smooth(image, glass, rows, mpp_um).reshape(-1).take(dark))
            marks.reshape(-1)[dark] |= bits
            seen.marks[rows] = marks
            seen.density[rows], seen.colour[rows] = _levels(mean), _levels(colour)

        run_in_pool(look, strips_of(*shape))
        return seen

    def marked(self, mark: int) -> Mask:
        """Return where a bit is set, new."""
        result: Mask = (self.marks & np.uint8(mark)).astype(bool)
        return result

    def median_density(self, mask: Mask) -> float:
        """Return the median density within a mask; 0 where it is empty."""
        counts = np.bincount(self.density[mask] >> 4, minlength=4096)
        half = int(np.searchsorted(counts.cumsum(), counts.sum() / 2))
        return float((half << 4) * _STEP) if mask.any() else 0.0

    def pen(self, mpp_um: float) -> Mask:
        """Return the marks of a pen."""
        if not int(np.bitwise_or.reduce(self.marks, axis=None)) & (_CORE | _CERTAIN):
            return np.zeros(self.marks.shape, bool)
        core, even, certain, faint = (self.marked(mark) for mark in (_CORE, _EVEN, _CERTAIN, _FAINT))
        return pen_marks(core, even, certain, faint, mpp_um)


def _levels(values: Float) -> Levels:
    """Return values in `_STEP`; they are given up."""
    values *= 1 / _STEP
    np.minimum(values, 65_535, out=values)
    values += 0.5
    result: Levels = values.astype(np.uint16)
    return result


def _threshold(levels: Levels, pen: Mask, bounds: tuple[float, float]) -> np.uint16:
    """Return the greatest level that is not above the threshold."""
    values = _every_so_many(levels, pen) * _STEP
    flat = values.size == 0 or float(values.min()) == float(values.max())
    threshold = bounds[0] if flat else float(np.clip(threshold_otsu(values), *bounds))  # type: ignore[no-untyped-call]
    return np.uint16(min(threshold, _DENSEST) / _STEP)


def _every_so_many(levels: Levels, pen: Mask) -> Levels:
    """Return of the pixels without ink so many that there are about `_MOST_VALUES`, evenly spread."""
    if not pen.any():
        return levels.reshape(-1)[:: 1 + levels.size // _MOST_VALUES]
    per_row = np.count_nonzero(~pen, axis=1)
    step = 1 + int(per_row.sum()) // _MOST_VALUES
    before = np.cumsum(per_row) - per_row
    rows = [row[~inked][-skipped % step :: step] for row, inked, skipped in zip(levels, pen, before, strict=True)]
    return np.concatenate(rows)


def _pixels(area_um2: float, mpp_um: float) -> int:
    return max(1, round(area_um2 / mpp_um**2))
