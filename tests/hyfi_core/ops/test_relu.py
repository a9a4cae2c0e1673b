"""relu with a backward of its own equals autograd's, in place or not, and writes over nothing that others hold."""

from __future__ import annotations

import pytest
import torch

from hyfi_core.ops.relu import Relu


@pytest.mark.parametrize("over", [True, False])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_it_equals_autograd(over: bool, kind: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, 4).to(kind)
    x[0, 0, 0, 0] = 0.0
    leaf = x.clone().requires_grad_()
    wanted = torch.relu(leaf)
    dy = torch.randn(2, 3, 5, 4).to(kind)
    wanted.backward(dy)
    given = x.clone()
    (found,), saved = Relu(over).forward((given,))
    assert torch.equal(found, wanted)
    assert (found.data_ptr() == given.data_ptr()) == over
    assert over or torch.equal(given, x)
    kept = dy.clone()
    (apart,) = Relu(over).backward(saved, (kept,))
    assert torch.equal(kept, dy)
    alone = (dy.clone(),)
    place = alone[0].data_ptr()
    (back,) = Relu(over, overwrites_cotangent=True).backward(saved, alone)
    assert apart is not None and back is not None and back.data_ptr() == place
    assert leaf.grad is not None and torch.equal(apart, leaf.grad) and torch.equal(back, leaf.grad)


def test_no_cotangent_is_zero() -> None:
    (found,), saved = Relu(False).forward((torch.randn(1, 2, 3, 3),))
    (back,) = Relu(False).backward(saved, (None,))
    assert back is not None and back.shape == found.shape and not back.any()
