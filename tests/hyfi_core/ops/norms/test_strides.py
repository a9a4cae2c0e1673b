"""Batch norm and instance norm have the right gradient for every order of dims in memory and any stride of size 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations, product

import pytest
import torch
import torch.nn.functional as F

from hyfi_core.ops.norms.known_statistics import KnownStatistics
from hyfi_core.ops.norms.strides import batch_norm_for_all_strides, instance_norm, with_usual_strides

SHAPES = ((1, 4, 3, 2), (2, 4, 1, 3), (2, 4, 3, 1), (1, 4, 1, 3), (1, 1, 2, 3))
Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

batch_norm = batch_norm_for_all_strides(F.batch_norm)


def _strided(values: torch.Tensor, order: Sequence[int], of_size_1: int) -> torch.Tensor:
    """Return a copy with the dims in memory in this order, innermost first; dims of size 1 have the stride given."""
    strides, elements = [of_size_1] * values.dim(), 1
    for dim in order:
        if values.shape[dim] > 1:
            strides[dim] = elements
            elements *= values.shape[dim]
    return torch.empty(elements, dtype=values.dtype).as_strided(values.shape, strides).copy_(values)


def _known(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    values = x.detach()
    mean, inverse = values.mean((0, 2, 3)), (values.var((0, 2, 3), unbiased=False) + 1e-5).rsqrt()
    result: torch.Tensor = KnownStatistics.apply(x, weight, weight, mean, inverse)  # type: ignore[no-untyped-call]
    return result


NORMS: dict[str, Norm] = {
    "training": lambda x, weight: batch_norm(x, None, None, weight, weight, True),
    "evaluation": lambda x, weight: batch_norm(x, weight.detach(), weight.detach() + 1, weight, weight),
    "known statistics": _known,
    "instance": lambda x, weight: instance_norm(x, weight, weight, None, None, True, 0.1, 1e-5, False),
}


def _differentiated(norm: Norm, x: torch.Tensor, cotangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, weight = x.detach().requires_grad_(), torch.arange(1.0, x.shape[1] + 1, dtype=x.dtype, requires_grad=True)
    result = norm(x, weight)
    return result, *torch.autograd.grad(result, (x, weight), cotangent)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_is_that_of_contiguous_tensors(name: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, cotangent = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
    # Of contiguous tensors, PyTorch's gradients are right.
    expected = _differentiated(NORMS[name], x.contiguous(), cotangent.contiguous())
    orders = list(permutations(range(4)))
    for map_order, cotangent_order, stride in product(orders[::3], orders, (1, 4, 50)):
        strided = _strided(x, map_order, stride), _strided(cotangent, cotangent_order, stride)
        for tensor, right in zip(_differentiated(NORMS[name], *strided), expected, strict=True):
            torch.testing.assert_close(tensor, right, rtol=0, atol=1e-9, msg=f"{map_order} {cotangent_order} {stride}")


def test_pytorch_still_takes_one_format_for_another() -> None:
    """Once this fails, ``ops.norms.strides`` is not needed any more."""
    x, cotangent = torch.randn(2, 1, 8, 4, 4, dtype=torch.float64)
    x.requires_grad_()
    result = F.batch_norm(x, None, None, training=True)
    (right,) = torch.autograd.grad(result, x, cotangent, retain_graph=True)
    (other,) = torch.autograd.grad(result, x, _strided(cotangent, (1, 3, 2, 0), 8))
    assert (right - other).abs().max() > 1e-3


@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 4, 5), (1, 5), (3, 1, 2), (1, 3, 2, 2, 1)])
def test_usual_strides_are_those_of_new_tensors(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    for order in permutations(range(len(shape))):
        usual = with_usual_strides(strided := _strided(values, order, 7))
        assert torch.equal(usual, values) and usual.data_ptr() == strided.data_ptr()
        copies = [values.clone(memory_format=torch.contiguous_format)]
        if len(shape) == 4:
            copies.append(values.clone(memory_format=torch.channels_last))
        if strided.is_contiguous() or (len(shape) == 4 and strided.is_contiguous(memory_format=torch.channels_last)):
            assert usual.stride() in [copy.stride() for copy in copies]
        if 1 not in shape:
            assert usual is strided
