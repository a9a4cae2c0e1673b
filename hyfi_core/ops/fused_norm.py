"""Batch normalisation inside a fused run, where neighbours compute some pixels twice.

Each rank r holds a *computed* box, its own part and a margin that others own. Let x_r(p) be its copy of pixel p, o(p)
the owner of p, N the pixels of the map times images. Forward, every pixel counts once:

    m = 1/N Σ_p x_o(p)(p)        v = 1/N Σ_p (x_o(p)(p) - m)²        y_r(p) = w · x̂_r(p) + b,  x̂ = (x - m) / σ

Backward, the copies are different variables, and the loss depends on each of them by its own y. With g_r(p) the
cotangent of y_r(p), and m and v functions of the owners' copies alone:

    dL/dm = -w/σ · Σ_r Σ_p g_r(p)            dL/dv = -w/(2σ²) · Σ_r Σ_p g_r(p) · x̂_r(p)      all computed copies
    dL/dx_r(p) = w/σ · g_r(p)                                                                every copy
               + [r owns p] · (1/N dL/dm + 2 (x_r(p) - m)/N dL/dv)
               = w/σ · ( g_r(p) - [r owns p] · (1/N ΣΣ g + x̂_r(p) · 1/N ΣΣ g·x̂) )

and dL/dw = ΣΣ g·x̂, dL/db = ΣΣ g over all copies. Sums over owned pixels alone would leave out what the margins' y owe
to m and v. The margins' dL/dx then flow back to their owners through the run and the adjoint of its wide exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hyfi_core.ops.reduce import BatchNorm
from hyfi_core.plan.box import Box


@dataclass(frozen=True)
class FusedBatchNorm(BatchNorm):
    """``BatchNorm`` of a computed box: statistics of what is owned, applied to all that is computed and saved.

    Attributes:
        owned: what this rank owns, counted from the first pixel of what it computes; may be empty.
    """

    owned: Box

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of what this rank owns: the margins are others' pixels, counted there."""
        return tensor.narrow(2, self.owned.y0, self.owned.height).narrow(3, self.owned.x0, self.owned.width)
