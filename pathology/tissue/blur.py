"""Out-of-focus tissue: a map of the sharpness of patches, measured while a slide is ingested."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from data.arrays import Mask
from pathology.arrays import Float, Planes

PATCH_PX = 128
OUT_OF_FOCUS = 0.075
"""Patches with a lower sharpness are out of focus. At 1 µm/px, sharp patches have 0.11 to 4, blurred ones a tenth."""
MEASURED_MPP_UM = 1.0
"""Resolution for which the threshold was chosen; the nearest level of the pyramid is measured."""
_MIN_PATCHES = 4
_MIN_VARIANCE = 60.0
_MAX_MEAN = 235.0
_GLASS = 215
"""Patches whose darkest sampled pixel is brighter than this are glass and are not measured."""
_SAMPLE_STEP_PX = 8


@dataclass(slots=True)
class BlurMap:
    """Sharpness of the patches of one level: variance of the Laplacian / variance, in the green channel.

    Blur removes fine detail, which the Laplacian measures, before coarse detail. Both variances scale with contrast,
    so pale and dark stains have comparable values.

    Attributes:
        height_px, width_px: Size of the level.
        values: ``(rows, columns)`` float32, one for each patch of ``PATCH_PX``; NaN if it cannot be measured: glass,
            low contrast, or a last row or column less than half a patch wide.
    """

    height_px: int
    width_px: int
    values: Float = field(init=False)

    def __post_init__(self) -> None:
        shape = (-(-self.height_px // PATCH_PX), -(-self.width_px // PATCH_PX))
        self.values = np.full(shape, np.nan, np.float32)

    def add(self, y0: int, x0: int, block: Planes) -> None:
        """Measure the patches of ``block`` ``(3, h, w)``, which starts at ``(y0, x0)``, multiples of ``PATCH_PX``."""
        green = block[1]
        for r, c in np.argwhere(_darkest(green) < _GLASS):
            patch = green[r * PATCH_PX : (r + 1) * PATCH_PX, c * PATCH_PX : (c + 1) * PATCH_PX]
            # Less than half a patch has too few pixels for two variances.
            if min(patch.shape) >= PATCH_PX // 2:
                self.values[y0 // PATCH_PX + r, x0 // PATCH_PX + c] = _sharpness(patch)

    def restrict_to(self, tissue: Mask, pen: Mask) -> None:
        """Set patches to NaN that are not mostly tissue, or that have ink on them.

        Args:
            tissue: Tissue mask ``(h, w)`` of the whole slide, at any resolution.
            pen: Pen mask ``(h, w)`` of the whole slide, at any resolution.
        """
        rows, columns = self.values.shape
        on_tissue = _patch_means(tissue, rows, columns, self.height_px / PATCH_PX, self.width_px / PATCH_PX)
        inked = _patch_means(pen, rows, columns, self.height_px / PATCH_PX, self.width_px / PATCH_PX)
        self.values[(on_tissue < 0.5) | (inked > 0.02)] = np.nan

    @property
    def blurred(self) -> Mask:
        """``(rows, columns)`` bool: patches that are out of focus."""
        with np.errstate(invalid="ignore"):
            result: Mask = self.values < OUT_OF_FOCUS
        return result

    @property
    def patches(self) -> int:
        """Number of measured patches."""
        return int(np.isfinite(self.values).sum())

    @property
    def median(self) -> float | None:
        """Median sharpness; None if fewer than four patches were measured."""
        return float(np.nanmedian(self.values)) if self.patches >= _MIN_PATCHES else None

    @property
    def share(self) -> float:
        """Fraction of the measured patches that are out of focus; 0 if there are fewer than four."""
        return float(self.blurred.sum() / self.patches) if self.patches >= _MIN_PATCHES else 0.0


def _darkest(green: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the darkest value of each patch among every eighth pixel: a quick test for glass."""
    sampled = green[::_SAMPLE_STEP_PX, ::_SAMPLE_STEP_PX]
    side = PATCH_PX // _SAMPLE_STEP_PX
    padded = np.pad(sampled, ((0, -sampled.shape[0] % side), (0, -sampled.shape[1] % side)), constant_values=255)
    result: npt.NDArray[np.uint8] = padded.reshape(padded.shape[0] // side, side, -1, side).min((1, 3))
    return result


def _sharpness(patch: npt.NDArray[np.uint8]) -> float:
    """Return variance of the Laplacian / variance; NaN for patches of low contrast."""
    # 16 bits hold the Laplacian of bytes, −1020 to 1020.
    values = patch.astype(np.int16)
    mean, variance = _moments(values)
    if variance < _MIN_VARIANCE or mean > _MAX_MEAN:
        return float("nan")
    # Along whole rows first: contiguous memory is faster.
    laplacian = 4 * values[1:-1]
    laplacian -= values[:-2]
    laplacian -= values[2:]
    laplacian = laplacian[:, 1:-1] - values[1:-1, :-2]
    laplacian -= values[1:-1, 2:]
    return _moments(laplacian)[1] / variance


def _moments(values: npt.NDArray[np.int16]) -> tuple[float, float]:
    """Return mean and variance, without a temporary array of squares."""
    # Centred first: the difference of two large sums of squares would lose the digits that matter.
    centred = values.astype(np.float32)
    mean = float(centred.sum()) / centred.size
    centred -= mean
    return mean, float(np.einsum("yx,yx->", centred, centred)) / centred.size


def _patch_means(mask: Mask, rows: int, columns: int, height: float, width: float) -> Float:
    """Return the fraction of each patch that ``mask`` covers.

    Args:
        mask: ``(h, w)`` of the whole slide, at any resolution.
        rows: Rows of patches.
        columns: Columns of patches.
        height: Height of the slide in patches; not whole if the last row is cut off.
        width: Width of the slide in patches.
    """
    if not mask.any():
        return np.zeros((rows, columns), np.float32)
    y_edges, x_edges = _edges(rows, height, mask.shape[0]), _edges(columns, width, mask.shape[1])
    # Sums of bytes are faster. A patch covers about twenty rows of a mask, so the sum of a column fits in a byte.
    dtype = np.uint8 if int(np.diff(y_edges).max()) < 256 else np.int32
    # One more row and column, of zeros: a narrow last patch may begin at the end of a coarse mask, where `reduceat`
    # accepts no start.
    padded = np.pad(mask, ((0, 1), (0, 1))).view(np.uint8)
    covered = np.add.reduceat(padded, y_edges[:-1], axis=0, dtype=dtype)
    covered = np.add.reduceat(covered, x_edges[:-1], axis=1, dtype=np.int32)
    # At least 1: a patch may be smaller than a pixel of a coarse mask; `reduceat` then takes the pixel at its start.
    area = np.maximum(np.diff(y_edges), 1)[:, None] * np.maximum(np.diff(x_edges), 1)
    result: Float = (covered / area).astype(np.float32)
    return result


def _edges(patches: int, length: float, side_px: int) -> npt.NDArray[np.int64]:
    """Return the ``patches + 1`` edges of patches along an axis of a mask with ``side_px`` pixels.

    Args:
        patches: Number of patches, the cut one at the end included.
        length: Length of the slide in patches.
        side_px: Length of the slide in pixels of the mask.
    """
    edges: npt.NDArray[np.int64] = np.round(np.arange(patches + 1) * side_px / length).astype(np.int64)
    return edges.clip(0, side_px)
