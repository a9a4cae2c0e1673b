"""Which chunks of a slide are glass alone, so that they can be left out of its store."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from data.store.tissue_grid import TissueGrid
from hyfi_core.plan.box import Box

Mask = npt.NDArray[np.bool_]


class Glass:
    """The tissue mask laid under one level.

    Args:
        mask: Tissue ``(h, w)`` from the slide's corner.
        mask_mpp: Its microns per pixel.
        size_px: (height, width) of the level.
        mpp: The level's microns per pixel (y, x).
    """

    def __init__(self, mask: Mask, mask_mpp: float, size_px: tuple[int, int], mpp: tuple[float, float]) -> None:
        self._grid = TissueGrid.under(mask, (mask_mpp, mask_mpp), size_px, mpp)

    def covers(self, box: Box) -> bool:
        """Whether no pixel of ``box`` is tissue, nor any beside it in the mask."""
        rows = _around(self._grid.rows, box.y0, box.y1)
        columns = _around(self._grid.columns, box.x0, box.x1)
        return not bool(self._grid.mask[rows, columns].any())


def _around(firsts: npt.NDArray[np.int64], start: int, stop: int) -> slice:
    """Return the mask's rows (or columns) under pixels ``[start, stop)``, and one more on each side."""
    first = int(np.searchsorted(firsts, start, "right")) - 1
    end = int(np.searchsorted(firsts, stop, "left"))
    return slice(max(0, first - 1), end + 1)
