"""The effect of each block of a slide on the outputs of a model: measured by occlusion, or estimated by gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

BlockKind = Literal["occlusion", "gradient"]


@dataclass(frozen=True, eq=False)
class BlockEvidence:
    """The evidence of a slide.

    Attributes:
        kind: ``occlusion``: drops are measured; ``gradient``: they are estimated, see `gradient_evidence`.
        drops: (outputs, rows, columns) float32: the slide's output minus that with the block covered by white; mean
            over an ensemble; NaN for blocks without tissue that the model has seen. Block (i, j) is
            ``[i * block_px, (i + 1) * block_px) x [j * block_px, (j + 1) * block_px)`` of the slide at the model's
            resolution; the last row and column may extend beyond the slide.
        block_px: Side of a block in pixels of the slide at the model's resolution.
        mpp: (y, x) micrometres per pixel of the slide at the model's resolution.
        names: Names of the outputs.
        forwards: Number of forwards of each model: with ``occlusion`` those with a covered block; with ``gradient`` one
            for each image.
    """

    kind: BlockKind
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
        """How many blocks have evidence."""
        return int(np.isfinite(self.drops[0]).sum())

    @property
    def size_text(self) -> str:
        """Size of a block as text."""
        return f"{self.block_um[1]:.3g} × {self.block_um[0]:.3g} µm"

    def strongest(self, channel: int) -> float:
        """Return the largest drop or rise of an output by one block."""
        return float(np.nanmax(np.abs(self.drops[channel])))
