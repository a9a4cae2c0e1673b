"""A relu that can work in place: over its input in forward, over the incoming cotangent in backward.

Whether it may is decided by ``lowering.in_place`` and ``lowering.reuse``, before the run. Autograd would allocate
memory for the cotangent, which on a CPU takes many times as long as the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hyfi_core.comm.base import Tensors
from hyfi_core.ops.base import Cotangents, NeedsGrad, Recomputable, is_expanded


@dataclass(frozen=True)
class Relu(Recomputable):
    """``relu``, pixel by pixel.

    Attributes:
        overwrites_input: whether the result is written over the input.
        overwrites_cotangent: whether the input's cotangent is written over the output's.
    """

    own_cotangents: ClassVar[bool] = True

    overwrites_input: bool
    overwrites_cotangent: bool = False

    def forward(self, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (rectified map,); saves this result."""
        result = self.recompute(inputs, None)
        return (result,), result

    def recompute(self, inputs: Tensors, saved: Any) -> torch.Tensor:
        """Return the rectified map."""
        return inputs[0].relu_() if self.overwrites_input else inputs[0].relu()

    def backward(self, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()) -> Cotangents:
        """Return (cotangent of the map,)."""
        dy = torch.zeros_like(saved) if cotangents[0] is None else cotangents[0].to(saved.dtype)
        # The saved result is above 0 where the input is, so the input need not be kept.
        if not self.overwrites_cotangent or is_expanded(dy):
            return (torch.ops.aten.threshold_backward.default(dy, saved, 0),)
        torch.ops.aten.threshold_backward.grad_input(dy, saved, 0, grad_input=dy)
        return (dy,)
