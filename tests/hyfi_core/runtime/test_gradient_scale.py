from __future__ import annotations

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from hyfi_core.runtime.calls.gradient_scale import GradientScale


def test_a_gradient_is_in_memory_no_longer_than_its_parameter_has_it() -> None:
    """Stages of a pipeline had the largest gradient twice while they made the next one."""
    parameter = nn.Parameter(torch.ones(8, 8))
    scale = GradientScale([parameter])
    parameter.grad = torch.full((8, 8), 3.0)
    held = TensorWeakRef(parameter.grad)
    scale.remember_gradients()
    assert scale.factor() == 1
    parameter.grad.mul_(0.5)
    assert scale.factor() == 0.5
    parameter.grad = None
    assert held() is None and scale.factor() is None
    parameter.grad = torch.full((8, 8), 6.0)
    assert scale.factor() == 2, "another tensor is compared by its values"
