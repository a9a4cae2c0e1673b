"""In-place relu: overwrites its input in forward and the cotangent in backward, where allowed.

Autograd would allocate memory for the cotangent. On a CPU this costs many times the arithmetic, and the maps of a
network's first layers are the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hyfi_core.ops.base import Cotangents, Recomputable, Tensors, Wanted


@dataclass(frozen=True)
class Relu(Recomputable):
    """``relu``, pixel by pixel.

    Attributes:
        over: whether the input may be overwritten.
        over_cotangent: the same for the output's cotangent.
    """

    own_cotangents: ClassVar[bool] = True

    over: bool
    over_cotangent: bool = False

    def forward(self, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (rectified map,), which is also saved."""
        result = self.again(inputs, None)
        return (result,), result

    def again(self, inputs: Tensors, saved: Any) -> torch.Tensor:
        """Return the rectified map."""
        return inputs[0].relu_() if self.over else inputs[0].relu()

    def backward(self, saved: Any, cotangents: Cotangents, wanted: Wanted = ()) -> Cotangents:
        """Return (cotangent of the map,), in place where allowed."""
        dy = torch.zeros_like(saved) if cotangents[0] is None else cotangents[0].to(saved.dtype)
        if not self.over_cotangent:
            return (torch.ops.aten.threshold_backward.default(dy, saved, 0),)
        torch.ops.aten.threshold_backward.grad_input(dy, saved, 0, grad_input=dy)
        return (dy,)
