"""Calls that do more than calculate are kept or refused with the line that makes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyfi_core.capture.export import capture
from hyfi_core.errors import RequestError
from tests.harness import assert_equal_to_one_process

pytestmark = pytest.mark.captures_each

SHAPE = (2, 3, 21, 30)
Middle = Callable[["Net", torch.Tensor], torch.Tensor]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * dy


doubled = Doubled.apply  # as PyTorch's tutorial has it


def inference(net: Net, y: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        z = torch.relu(net.conv(y))
    return y + z


def switched(net: Net, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        z = torch.relu(y)
        with torch.enable_grad():
            w = net.conv(y)
        u = w * 2
    return z + w + u


def overwritten(net: Net, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y[:, :2].mul_(3)
    return y


def clamped_weight(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.conv.weight.data.clamp_(-0.1, 0.1)
    return net.conv(y)


def clamped(net: Net, y: torch.Tensor) -> torch.Tensor:
    y.data.clamp_(min=0)
    return y


def set_data(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.conv.weight.data = net.conv.weight.data * 0.5
    return net.conv(y)


def detached(net: Net, y: torch.Tensor) -> torch.Tensor:
    z = torch.relu(y)
    z.detach_()
    return y + z


def frozen_for_a_while(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.conv.weight.requires_grad_(False)
    z = net.conv(y)
    net.conv.weight.requires_grad_(True)
    return z


def seeded(net: Net, y: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return y + torch.rand(())


def kept_statistics(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.mean.data.mul_(0.9).add_(y.detach().mean((0, 2, 3)))
    return y + net.mean[None, :, None, None]


KEPT: dict[str, Middle] = {
    "inference mode": inference,
    "gradients on and off": switched,
    "statistics through .data": kept_statistics,
    "checkpoint": lambda net, y: checkpoint(net.conv, y, use_reentrant=True),
    "checkpoint without reentrance": lambda net, y: checkpoint(net.conv, y, use_reentrant=False),
}
REFUSED: dict[str, tuple[Middle, str]] = {
    "function": (lambda net, y: doubled(y), r"Doubled, an autograd.Function"),
    "tensor in place": (clamped, r"in place and hidden from autograd.*clamped|y.data.clamp_\(min=0\)"),
    "weight in place": (clamped_weight, r"in place and hidden .*net.conv.weight.data.clamp_\(-0.1, 0.1\)"),
    "in place without gradient": (overwritten, r"in place and hidden .*y\[:, :2\].mul_\(3\)"),
    "data set": (set_data, r"sets .data of a tensor.*net.conv.weight.data = "),
    "detached in place": (detached, r"detaches a tensor in place.*z.detach_\(\)"),
    "frozen for a while": (frozen_for_a_while, r"changes requires_grad of a tensor.*requires_grad_\(False\)"),
    "Python's random numbers": (lambda net, y: y * random.random(), "draws random numbers from random,"),
    "NumPy's random numbers": (lambda net, y: y * float(np.random.rand()), "draws random numbers from np.random,"),
    "seed": (seeded, "seeds torch's generator"),
    "checkpoint with statistics": (
        lambda net, y: checkpoint(net.norm, y, use_reentrant=True),
        "updates running statistics inside torch.utils.checkpoint",
    ),
    "checkpoint without reentrance, with statistics": (
        lambda net, y: checkpoint(net.norm, y, use_reentrant=False),
        "updates running statistics inside torch.utils.checkpoint",
    ),
}


class Net(nn.Module):
    def __init__(self, middle: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.conv, self.norm = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 6, 3, 1, 1), nn.BatchNorm2d(6)
        self.head, self.middle = nn.Linear(6, 2), middle
        self.register_buffer("mean", torch.zeros(6))

    def extra_repr(self) -> str:
        return self.middle  # programs are shared between modules that look alike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = KEPT[self.middle] if self.middle in KEPT else REFUSED[self.middle][0]
        return self.head(self.conv(middle(self, self.first(x))).mean((2, 3)))


@pytest.mark.parametrize("middle", KEPT)
def test_what_is_kept_trains_as_in_one_process(middle: str) -> None:
    assert_equal_to_one_process(Net(middle).double(), SHAPE, (1, 2))


@pytest.mark.parametrize("middle", REFUSED)
def test_what_would_be_lost_is_refused_with_its_line(middle: str) -> None:
    net, state = Net(middle), random.getstate()
    with pytest.raises(RequestError, match=REFUSED[middle][1]) as refusal:
        capture(net, SHAPE, torch.float32)
    assert "test_watched_calls.py:" in str(refusal.value) and "\n" not in str(refusal.value)
    assert random.getstate() == state or middle == "Python's random numbers"


def test_a_checkpoint_with_norms_that_keep_nothing_is_a_plain_call() -> None:
    net = Net("checkpoint with statistics")
    net.norm.eval()
    assert any("batch_norm" in op.text for op in capture(net, SHAPE, torch.float32).operators)


@torch.library.custom_op("hyfi_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, cotangent: 2 * cotangent)


class WithLibraryOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return twice(self.conv(x)).mean((2, 3))


def test_an_operator_of_torch_library_keeps_its_backward() -> None:
    """PyTorch makes an autograd.Function of it, but capture keeps the operator itself."""
    assert_equal_to_one_process(WithLibraryOperator(), SHAPE, (1, 2))
