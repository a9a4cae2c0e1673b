"""Sharpness of the tissue, measured while a slide is ingested."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Planes = npt.NDArray[np.uint8]

PATCH_PX = 128
OUT_OF_FOCUS = 0.075
"""A patch below this is out of focus: at about 1 µm/px sharp ones have 0.11 to 4, blurred ones a tenth."""
BLURRED_SHARE = 0.08
"""Slides with more than this share of such patches are flagged ``blur``."""


@dataclass(slots=True)
class SharpnessMeter:
    """Collects the sharpness of patches: variance of the Laplacian over variance, in green, where there is tissue.

    Both variances scale with contrast, so pale and dark stains compare; blur takes the fine detail, which is what
    the Laplacian sees, before the coarse.
    """

    _values: list[float] = field(default_factory=list)

    def add(self, block: Planes) -> None:
        """Look at the patches of ``(3, h, w)`` uint8 pixels of the finest level."""
        green = block[1]
        for y in range(0, green.shape[0] - PATCH_PX + 1, PATCH_PX):
            for x in range(0, green.shape[1] - PATCH_PX + 1, PATCH_PX):
                patch = green[y : y + PATCH_PX, x : x + PATCH_PX]
                if int(patch[::8, ::8].min()) < 215:
                    self._measure(patch.astype(np.float32))

    def _measure(self, patch: npt.NDArray[np.float32]) -> None:
        variance = float(patch.var())
        if variance < 60 or float(patch.mean()) > 235:
            return
        laplacian = 4 * patch[1:-1, 1:-1] - patch[:-2, 1:-1] - patch[2:, 1:-1] - patch[1:-1, :-2] - patch[1:-1, 2:]
        self._values.append(float(laplacian.var()) / variance)

    @property
    def median(self) -> float | None:
        """The median over the patches with tissue; None when there are fewer than four."""
        return float(np.median(self._values)) if len(self._values) >= 4 else None

    @property
    def blurred_share(self) -> float:
        """Share of the patches with tissue that are out of focus; 0 when there are fewer than four."""
        return float(np.mean(np.array(self._values) < OUT_OF_FOCUS)) if len(self._values) >= 4 else 0.0
