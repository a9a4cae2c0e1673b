"""Where the tissue is out of focus: a map of sharpness over patches, measured while a slide is ingested."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Planes = npt.NDArray[np.uint8]
Float = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

PATCH_PX = 128
OUT_OF_FOCUS = 0.075
"""A patch below this is out of focus: at about 1 µm/px sharp ones have 0.11 to 4, blurred ones a tenth."""
MEASURED_MPP_UM = 1.0
"""Resolution at which this holds; the level of the pyramid nearest to it is looked at."""
_FEWEST = 4
_LEAST_VARIANCE = 60.0
_PALEST_MEAN = 235.0
_GLASS = 215
_LOOK_PX = 8


@dataclass(slots=True)
class BlurMap:
    """Sharpness of the patches of one level: variance of the Laplacian over variance, in green.

    Both variances scale with contrast, so pale and dark stains compare; blur takes the fine detail, which is what the
    Laplacian sees, before the coarse.

    Attributes:
        height_px, width_px: Size of the level.
        values: ``(rows, columns)`` float32 of patches of ``PATCH_PX``; NaN where nothing can be said: glass, too little
            contrast, or a last row or column less than half a patch wide.
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
            if min(patch.shape) >= PATCH_PX // 2:
                self.values[y0 // PATCH_PX + r, x0 // PATCH_PX + c] = _sharpness(patch)

    def keep(self, tissue: Mask, pen: Mask) -> None:
        """Forget the patches that are not mostly tissue, or that have ink on them.

        Args:
            tissue: ``(h, w)`` of the whole slide, of any resolution.
            pen: Alike.
        """
        rows, columns = self.values.shape
        share = _patch_means(tissue, rows, columns, self.height_px / PATCH_PX, self.width_px / PATCH_PX)
        inked = _patch_means(pen, rows, columns, self.height_px / PATCH_PX, self.width_px / PATCH_PX)
        self.values[(share < 0.5) | (inked > 0.02)] = np.nan

    @property
    def blurred(self) -> Mask:
        """``(rows, columns)``: patches that are out of focus."""
        with np.errstate(invalid="ignore"):
            result: Mask = self.values < OUT_OF_FOCUS
        return result

    @property
    def patches(self) -> int:
        """Patches of which something can be said."""
        return int(np.isfinite(self.values).sum())

    @property
    def median(self) -> float | None:
        """The median sharpness; None when there are fewer than four patches."""
        return float(np.nanmedian(self.values)) if self.patches >= _FEWEST else None

    @property
    def share(self) -> float:
        """Share of the patches that are out of focus; 0 when there are fewer than four."""
        return float(self.blurred.sum() / self.patches) if self.patches >= _FEWEST else 0.0


def _darkest(green: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the darkest of every eighth pixel of each patch: glass need not be measured."""
    few = green[::_LOOK_PX, ::_LOOK_PX]
    side = PATCH_PX // _LOOK_PX
    padded = np.pad(few, ((0, -few.shape[0] % side), (0, -few.shape[1] % side)), constant_values=255)
    result: npt.NDArray[np.uint8] = padded.reshape(padded.shape[0] // side, side, -1, side).min((1, 3))
    return result


def _sharpness(patch: npt.NDArray[np.uint8]) -> float:
    values = patch.astype(np.int16)
    mean, variance = _moments(values)
    if variance < _LEAST_VARIANCE or mean > _PALEST_MEAN:
        return float("nan")
    # Whole rows first: what lies together is quick to add.
    laplacian = 4 * values[1:-1]
    laplacian -= values[:-2]
    laplacian -= values[2:]
    laplacian = laplacian[:, 1:-1] - values[1:-1, :-2]
    laplacian -= values[1:-1, 2:]
    return _moments(laplacian)[1] / variance


def _moments(values: npt.NDArray[np.int16]) -> tuple[float, float]:
    """Return mean and variance, without a picture of the squares."""
    apart = values.astype(np.float32)
    mean = float(apart.sum()) / apart.size
    apart -= mean
    return mean, float(np.einsum("yx,yx->", apart, apart)) / apart.size


def _patch_means(mask: Mask, rows: int, columns: int, height: float, width: float) -> Float:
    """Return the share of ``mask`` in each of rows × columns patches; the slide is ``height`` × ``width`` patches."""
    down = np.clip(np.round(np.arange(rows + 1) * mask.shape[0] / height).astype(int), 0, mask.shape[0])
    across = np.clip(np.round(np.arange(columns + 1) * mask.shape[1] / width).astype(int), 0, mask.shape[1])
    if not mask.any():
        return np.zeros((rows, columns), np.float32)
    # A patch is some twenty rows of a mask: their sum fits a byte, and bytes are added many at a time.
    kind = np.uint8 if int(np.diff(down).max()) < 256 else np.int32
    total = np.add.reduceat(np.pad(mask, ((0, 1), (0, 1))).view(np.uint8), down[:-1], axis=0, dtype=kind)
    total = np.add.reduceat(total, across[:-1], axis=1, dtype=np.int32)
    area = np.maximum(np.diff(down), 1)[:, None] * np.maximum(np.diff(across), 1)
    result: Float = (total / area).astype(np.float32)
    return result
