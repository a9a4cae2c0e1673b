"""The gradients of a product's map, and later those of its weights, are those of autograd."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from hyfi_core.ops.product import LocalProduct

F64 = torch.float64


def call(x: torch.Tensor, weight: torch.Tensor, index: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.tanh() @ weight)[:, index] * y


@pytest.mark.parametrize("needs_grad", [(), *product((True, False), repeat=4)], ids=str)
def test_both_halves_are_those_of_autograd(needs_grad: tuple[bool, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, y, dy = (torch.randn(3, 3, dtype=F64, generator=generator) for _ in range(4))
    inputs = (x, weight.requires_grad_(), torch.tensor([2, 0, 1]), y)
    exact = [x.clone().requires_grad_(), weight, y.clone().requires_grad_()]
    wanted = torch.autograd.grad(call(exact[0], exact[1], inputs[2], exact[2]), exact, dy)
    of = dict(zip((0, 1, 3), wanted, strict=True))
    asked = needs_grad or (True,) * 4
    operator = LocalProduct(call, (False, True, False, False), own_cotangents=True, fresh=True)
    (result,), saved = operator.forward(inputs)
    assert not result.requires_grad and torch.equal(result, call(*inputs))
    first, rest = operator.backward_of_map(saved, (dy,), needs_grad)
    second = rest()
    (_,), saved = operator.forward(inputs)
    whole = operator.backward(saved, (dy,), needs_grad)
    for at in range(4):
        half = second if at == 1 else first
        other = first if at == 1 else second
        assert other[at] is None
        for found in (half[at], whole[at]):
            assert (found is None) == (at == 2 or not asked[at])
            assert found is None or torch.allclose(found, of[at], atol=1e-14)
    (_,), saved = operator.forward(inputs)
    assert operator.backward(saved, (None,), needs_grad) == (None,) * 4


def test_a_product_without_gradients_has_none() -> None:
    weight = torch.eye(3, dtype=F64)
    operator = LocalProduct(lambda index, w: w[index], (False, True), own_cotangents=True, fresh=True)
    (_,), saved = operator.forward((torch.tensor([1, 0]), weight))
    assert operator.backward(saved, (torch.ones(2, 3, dtype=F64),)) == (None, None)


def test_a_weight_that_is_not_used_has_no_gradient() -> None:
    x, unused = torch.ones(2, dtype=F64), torch.ones(3, dtype=F64).requires_grad_()
    operator = LocalProduct(lambda x, w: 2 * x, (False, True), own_cotangents=True, fresh=True)
    (_,), saved = operator.forward((x, unused))
    found = operator.backward(saved, (torch.ones(2, dtype=F64),))
    assert found[1] is None and found[0] is not None and found[0].tolist() == [2.0, 2.0]
