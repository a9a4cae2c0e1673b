"""How much the outputs of a model drop when a block of the slide is covered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Occlusion:
    """The occlusion of a slide.

    Attributes:
        drops: (outputs, rows, columns) float32: the slide's output minus that with the block covered; mean over an
            ensemble; NaN for blocks that were not covered, as they have no tissue. Block (i, j) covers
            ``[i * block_px, (i + 1) * block_px) x [j * block_px, (j + 1) * block_px)`` of the slide at the model's
            resolution; the last row and column may extend beyond the slide.
        block_px: Side of a block in pixels of the slide at the model's resolution.
        mpp: (y, x) micrometres per pixel of the slide at the model's resolution.
        names: Names of the outputs.
        forwards: By each model, the whole images not counted.
    """

    drops: NDArray[np.float32]
    block_px: int
    mpp: tuple[float, float]
    names: tuple[str, ...]
    forwards: int

    @property
    def block_um(self) -> tuple[float, float]:
        """Micrometres per block as (y, x)."""
        return self.mpp[0] * self.block_px, self.mpp[1] * self.block_px

    @property
    def blocks(self) -> int:
        """How many blocks were covered."""
        return int(np.isfinite(self.drops[0]).sum())

    @property
    def size_text(self) -> str:
        """Size of a block as text."""
        return f"{self.block_um[1]:.3g} × {self.block_um[0]:.3g} µm"

    def strongest(self, channel: int) -> float:
        """Return the largest drop or rise of an output by one block."""
        return float(np.nanmax(np.abs(self.drops[channel])))
