"""Tissue masks at about 8 µm per pixel, robust to pen marks, dust, coverslip edges and grey backgrounds.

All thresholds apply to optical density relative to the slide's own glass, so a grey or yellowish background is not
tissue. Stained tissue absorbs differently in the three channels, and most in green (both haematoxylin and eosin do);
dust, shadows and ink do not (see `pathology.tissue.pen`). The thresholds on density and colour are Otsu's, limited by a
lower bound (so that an empty slide has no tissue) and an upper bound (so that dark nuclei do not raise the threshold
above pale stroma). Fat, nearly as clear as glass, is detected by its cell walls (see `pathology.tissue.fat`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.ndimage import find_objects
from skimage.filters import threshold_otsu

from data.arrays import Mask
from data.components import fill_small_holes, label, without_small
from data.samples.colours.slide_colours import glass_colour
from hyfi_core.errors import RequestError
from pathology.arrays import Float, Planes
from pathology.readers.threads import run_in_pool
from pathology.tissue.density import density_of, row_strips
from pathology.tissue.fat import find_fat, wall_contrast
from pathology.tissue.morphology import closed, dilated
from pathology.tissue.pen import MIN_INK_DENSITY, classify_ink, pen_marks, without_texture
from pathology.tissue.strokes import MIN_STROKE_DENSITY, thin_strokes

Levels = npt.NDArray[np.uint16]

_THRESHOLD_PX = 1_000_000
"""A threshold is computed from about this many pixels."""
_MAX_DENSITY = 0.5
"""Higher densities are stored as this; all thresholds are far lower."""
_STEP = np.float32(_MAX_DENSITY / 65_535)
"""Unit in which density and colour are stored as 16-bit integers."""
_CORE, _CERTAIN, _FAINT, _COLOURED, _SMOOTH = 1, 2, 4, 8, 16
"""Bits of `_PixelFeatures.bits`."""
PEN_MODES = ("flag", "mask", "off")


@dataclass(frozen=True, slots=True)
class TissueParameters:
    """Parameters of the tissue mask; stored with every slide.

    Attributes:
        mpp_um: Resolution of the mask; the nearest level of the pyramid is used.
        smooth_um: Standard deviation of the smoothing, about the size of a cell.
        density: Lower and upper bound of the threshold on optical density.
        colour: Lower and upper bound of the threshold on the difference between its channels.
        close_um: Gaps of up to about twice this are closed.
        smallest_um2: Smaller components are removed.
        hole_um2: Smaller holes are filled.
        fat: Whether fat counts as tissue.
        pen: ``flag`` detects pen marks but leaves them in the tissue mask; ``mask`` also removes them from the tissue
            mask; ``off`` does not detect them.
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

    def with_settings(self, settings: Sequence[str]) -> TissueParameters:
        """Return a copy with some parameters replaced.

        Args:
            settings: ``name=value`` each: a number, ``lower,upper`` for a pair, ``true`` or ``false`` for ``fat``.

        Raises:
            RequestError: A parameter does not exist, or a value cannot be parsed.
        """
        values: dict[str, Any] = {}
        for text in settings:
            name, _, value = text.partition("=")
            current = getattr(self, name, None) if name in _SETTABLE else None
            if current is None:
                raise RequestError(f"--tissue-set {text}: expected NAME=VALUE, with a name of {', '.join(_SETTABLE)}")
            try:
                values[name] = _parsed(value, current)
            except ValueError as error:
                example = ",".join(map(str, current)) if isinstance(current, tuple) else str(current).lower()
                raise RequestError(f"--tissue-set {text}: {error}; {name}={example} is the default") from error
        return replace(self, **values)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object of the fields."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


_UNSCANNED_SHARE = 1e-3
_RECTANGULAR = 0.95
_SETTABLE = ("density", "colour", "smooth_um", "close_um", "smallest_um2", "hole_um2", "fat")


def _parsed(text: str, like: Any) -> Any:
    """Parse the value of a parameter, which must have the type of ``like``.

    Raises:
        ValueError: The text is not a value of this type.
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
    """Tissue and pen marks of one slide, both ``(h, w)`` bool; they may overlap unless ``pen`` is ``mask``."""

    tissue: Mask
    pen: Mask


def find_tissue(image: Planes, mpp_um: float, parameters: TissueParameters | None = None) -> TissueMasks:
    """Find the tissue and the pen marks of a slide.

    Memory: about 11 bytes a pixel besides the image, and floats for strips of half a million pixels.

    Args:
        image: ``(3, h, w)`` uint8, the whole slide at a low resolution.
        mpp_um: Microns per pixel of the image.
        parameters: See `TissueParameters`; the defaults suit H&E and immunostains.
    """
    parameters = parameters or TissueParameters()
    glass = glass_colour(image)
    image = _without_unscanned(image, glass)
    features = _PixelFeatures.of(image, glass, mpp_um, parameters)
    marks = features.pen(image, glass, mpp_um)
    excluded = marks if parameters.pen == "mask" else np.zeros_like(marks)
    stained = _stained(features, excluded, parameters)
    gap_px, smallest_px = max(1, round(parameters.close_um / mpp_um)), _pixels(parameters.smallest_um2, mpp_um)
    tissue = closed(stained, gap_px) & ~excluded
    if parameters.fat:
        # Without specks, because the median density of the mask determines the contrast of walls.
        solid = without_small(tissue, smallest_px)
        fat = find_fat(image, glass, solid | excluded, mpp_um, wall_contrast(features.median_density(solid)))
        tissue = closed(tissue | fat, gap_px) & ~excluded if fat.any() else tissue
    tissue = without_small(tissue, smallest_px)
    # Areas at the image's border do not count as holes: a small slide without tissue would be one.
    fill_small_holes(tissue, _pixels(parameters.hole_um2, mpp_um))
    return TissueMasks(tissue & ~excluded, marks)


def _without_unscanned(image: Planes, glass: Float) -> Planes:
    """Return the image with glass where scanners leave exact black: beside and between the parts that they scanned.

    Such areas reach the border of the image or are rectangles, unlike ink. Two more pixels around them are replaced,
    too: they are mixtures of black and tissue.
    """
    black: Mask = ~(image[0] | image[1] | image[2]).astype(bool)
    if np.count_nonzero(black) < _UNSCANNED_SHARE * black.size:
        return image
    labels = label(black)
    sizes = np.bincount(labels.reshape(-1))
    unscanned = np.zeros(len(sizes), bool)
    border = (labels[0], labels[-1], labels[:, 0], labels[:, -1])
    unscanned[np.unique(np.concatenate(border))] = True
    for number, window in enumerate(find_objects(labels), 1):
        height, width = (part.stop - part.start for part in window)
        unscanned[number] |= min(height, width) > 2 and sizes[number] > _RECTANGULAR * height * width
    # Label 0 stands for all pixels that are not black.
    unscanned[0] = False
    outside = dilated(unscanned[labels], 2)
    return np.where(outside, glass.astype(np.uint8)[:, None, None], image) if outside.any() else image


def _stained(features: _PixelFeatures, excluded: Mask, parameters: TissueParameters) -> Mask:
    """Return the mask of pixels above both thresholds, without grey and excluded ones."""
    min_density = _threshold(features.density, excluded, parameters.density)
    min_colour = _threshold(features.colour, excluded, parameters.colour)
    stained: Mask = np.empty_like(excluded)
    for rows in row_strips(*excluded.shape):
        # Pixels that absorb equally in all channels are not stained: shadows, dust, the coverslip's edge.
        stained[rows] = (features.bits[rows] & np.uint8(_COLOURED)).astype(bool) & ~excluded[rows]
        stained[rows] &= (features.density[rows] > min_density) & (features.colour[rows] > min_colour)
    return stained


@dataclass(frozen=True, slots=True)
class _PixelFeatures:
    """Features by which pixels are classified, five bytes a pixel.

    Attributes:
        density: ``(h, w)`` uint16, smoothed optical density, mean of the channels, in units of `_STEP`.
        colour: ``(h, w)`` uint16, largest difference between its channels, in units of `_STEP`.
        bits: ``(h, w)`` uint8: `_CORE`, `_CERTAIN` and `_FAINT` of `classify_ink`, `_SMOOTH` for core pixels without
            texture, `_COLOURED` for pixels that are not grey.
    """

    density: Levels
    colour: Levels
    bits: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, image: Planes, glass: Float, mpp_um: float, parameters: TissueParameters) -> _PixelFeatures:
        """Compute the features of a slide, in strips, so that the floats of a large slide do not need gigabytes."""
        shape = image.shape[1:]
        features = cls(np.empty(shape, np.uint16), np.empty(shape, np.uint16), np.zeros(shape, np.uint8))

        def fill(rows: slice) -> None:
            """Set the features of a strip of rows."""
            density = density_of(image, glass, rows, parameters.smooth_um / mpp_um)
            mean: Float = (density[0] + density[1] + density[2]) * np.float32(1 / 3)
            colour: Float = density.max(0) - density.min(0)
            # What each pixel may be, a bit for each kind.
            bits = (colour > 0.2 * mean).view(np.uint8) * np.uint8(_COLOURED)
            # Most pixels are glass, so only the others are classified.
            dark = np.flatnonzero(mean > MIN_INK_DENSITY) if parameters.pen != "off" else np.empty(0, np.intp)
            core, certain, faint = classify_ink(
                density.reshape(3, -1).take(dark, axis=1), mean.take(dark), colour.take(dark)
            )
            ink_bits = np.uint8(_CORE) * core | np.uint8(_CERTAIN) * certain | np.uint8(_FAINT) * faint
            if core.any():
                smooth = without_texture(image, glass, rows, mpp_um).reshape(-1).take(dark)
                ink_bits |= np.uint8(_SMOOTH) * (core & smooth)
            bits.reshape(-1)[dark] |= ink_bits
            features.bits[rows] = bits
            features.density[rows], features.colour[rows] = _levels(mean), _levels(colour)

        run_in_pool(fill, row_strips(*shape))
        return features

    def has(self, bit: int) -> Mask:
        """Return a new mask of the pixels with a bit set."""
        result: Mask = (self.bits & np.uint8(bit)).astype(bool)
        return result

    def median_density(self, mask: Mask) -> float:
        """Return the median optical density within a mask; 0 if it is empty."""
        # A histogram in steps of 16 is precise enough, and needs neither sorting nor floats of all pixels.
        counts = np.bincount(self.density[mask] >> 4, minlength=4096)
        half = int(np.searchsorted(counts.cumsum(), counts.sum() / 2))
        return float((half << 4) * _STEP) if mask.any() else 0.0

    def pen(self, image: Planes, glass: Float, mpp_um: float) -> Mask:
        """Return the mask of pen marks of the image."""
        if not int(np.bitwise_or.reduce(self.bits, axis=None)) & (_CORE | _CERTAIN):
            return np.zeros(self.bits.shape, bool)
        core, smooth, certain, faint = (self.has(bit) for bit in (_CORE, _SMOOTH, _CERTAIN, _FAINT))
        thin = thin_strokes(image, glass, core & (self.density > MIN_STROKE_DENSITY / _STEP), mpp_um)
        return pen_marks(core, smooth, certain, faint, thin, mpp_um)


def _levels(values: Float) -> Levels:
    """Return values in units of `_STEP`, rounded; ``values`` is overwritten."""
    values *= 1 / _STEP
    np.minimum(values, 65_535, out=values)
    values += 0.5
    result: Levels = values.astype(np.uint16)
    return result


def _threshold(levels: Levels, excluded: Mask, bounds: tuple[float, float]) -> np.uint16:
    """Return Otsu's threshold within bounds, in units of `_STEP`, rounded down."""
    values = _sampled(levels, excluded) * _STEP
    flat = values.size == 0 or float(values.min()) == float(values.max())
    threshold = bounds[0] if flat else float(np.clip(threshold_otsu(values), *bounds))  # type: ignore[no-untyped-call]
    return np.uint16(min(threshold, _MAX_DENSITY) / _STEP)


def _sampled(levels: Levels, excluded: Mask) -> Levels:
    """Return every n-th of the pixels that are not excluded, n such that there are about `_THRESHOLD_PX`."""
    if not excluded.any():
        return levels.reshape(-1)[:: 1 + levels.size // _THRESHOLD_PX]
    per_row = np.count_nonzero(~excluded, axis=1)
    step = 1 + int(per_row.sum()) // _THRESHOLD_PX
    before = np.cumsum(per_row) - per_row  # usable pixels in the rows above
    # Every step-th of all usable pixels, as if they were in one array: `count` of them come before this row.
    rows = [row[~out][-count % step :: step] for row, out, count in zip(levels, excluded, before, strict=True)]
    return np.concatenate(rows)


def _pixels(area_um2: float, mpp_um: float) -> int:
    """Return an area in pixels, at least 1."""
    return max(1, round(area_um2 / mpp_um**2))
