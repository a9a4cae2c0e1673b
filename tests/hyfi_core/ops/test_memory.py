"""Writing over memory that nobody else holds: found out when somebody does, and the same numbers either way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.ops.batch_norm import BatchNorm
from hyfi_core.ops.memory import ours_alone


def test_a_tensor_that_only_the_tuple_holds() -> None:
    assert ours_alone((torch.ones(3, 4),), 0)
    assert not ours_alone((None,), 0)


@pytest.mark.parametrize("other", [lambda t: t, lambda t: t.detach(), lambda t: t[1:], lambda t: t.view(-1)])
def test_a_tensor_that_another_holds_too(other: Any) -> None:
    given = (torch.ones(3, 4),)
    held = other(given[0])
    assert not ours_alone(given, 0)
    del held
    assert ours_alone(given, 0)


def test_a_tensor_that_autograd_holds() -> None:
    leaf = torch.ones(3, requires_grad=True)
    kept = (leaf * 2.0).exp()  # saves its result
    assert not ours_alone((kept.detach(),), 0)


def test_a_part_of_a_larger_tensor_and_one_that_repeats_itself() -> None:
    assert not ours_alone((torch.ones(3, 4)[1:],), 0)
    assert not ours_alone((torch.ones(3, 1).expand(3, 4),), 0)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_batch_norm_gives_the_same_numbers_in_place(kind: torch.dtype) -> None:
    op = BatchNorm(2 * 5 * 6, 1e-5)
    x, dy = torch.randn(2, 3, 5, 6).to(kind), torch.randn(2, 3, 5, 6).to(kind)
    weight = torch.rand(3).to(torch.promote_types(kind, torch.float32))
    _, saved = op.forward(AloneCommunicator(), (x, weight, weight))
    apart = op.backward(AloneCommunicator(), saved, (dy,))
    given = (dy.clone(),)
    place = given[0].data_ptr()
    over = op.backward(AloneCommunicator(), saved, given)
    assert over[0] is not None and over[0].data_ptr() == place
    for ours, theirs in zip(over, apart, strict=True):
        assert torch.equal(ours, theirs)
