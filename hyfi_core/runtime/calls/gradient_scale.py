"""The factor by which a rank's gradients changed between ``accumulate`` and ``update``: equal on ranks of a pipeline.

::

    rank 0    ‖g of stage 0‖ = 3   clip_grad_norm_(model.parameters(), 1)   × 1/3      one process: ‖g‖ = 5, × 1/5
    rank 1    ‖g of stage 1‖ = 4   clip_grad_norm_(model.parameters(), 1)   × 1/4

A rank has the gradients of its own stages only, so a norm over them is not that of the model. A gradient's version
counter shows that it was changed; a few of its values, copied before, then give the factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

_VALUES = 64
"""Largest number of values of a gradient that are copied and compared."""
_TOLERANCE = 2e-2
"""Largest relative difference of factors of single values: those of bfloat16 are rounded to 0.4 %."""


class GradientScale:
    """Measures the factor by which gradients have been multiplied, in the largest of them.

    Args:
        parameters: parameters of this rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = sorted(parameters, key=lambda parameter: -parameter.numel())
        self._sample: nn.Parameter | None = None  # the parameter whose gradient is compared
        # That gradient, by a weak reference: it is in memory no longer than the parameter has it.
        self._noted_gradient: TensorWeakRef | None = None
        self._noted_version = 0
        self._noted_values = torch.empty(0)

    def remember_gradients(self) -> None:
        """Remember the gradients as they are now."""
        self._sample = next((p for p in self._parameters if p.grad is not None and p.numel()), None)
        if self._sample is not None and self._sample.grad is not None:
            gradient = self._sample.grad
            self._noted_gradient = TensorWeakRef(gradient)
            self._noted_version, self._noted_values = gradient._version, _few(gradient).clone()

    def factor(self) -> float | None:
        """Return the number by which gradients were multiplied since they were remembered; None if there is none.

        There is none without gradients other than 0, or if values were multiplied by different numbers, or by 0.

        On a GPU the host waits for the values if they were changed.
        """
        gradient = None if self._sample is None else self._sample.grad
        if gradient is None:
            return None
        # The same tensor, which nothing has written to since.
        if (
            self._noted_gradient is not None
            and self._noted_gradient() is gradient
            and gradient._version == self._noted_version
        ):
            return 1.0
        # Zeros, as in gradients of dead units, have no ratio.
        has_ratio = self._noted_values != 0
        ratios = (_few(gradient)[has_ratio] / self._noted_values[has_ratio]).double()
        if not len(ratios):
            return None
        middle = ratios.median()
        same = bool(((ratios - middle).abs() <= _TOLERANCE * middle.abs()).all())
        return float(middle) if same and middle else None


def _few(gradient: torch.Tensor) -> torch.Tensor:
    """Return at most ``_VALUES`` values of a gradient, evenly spaced, in one dim."""
    flat = gradient.detach().flatten()
    return flat[:: -(-len(flat) // _VALUES)]
