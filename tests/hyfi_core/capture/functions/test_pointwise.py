"""Functions with a backward of their own are exact on any plan if they are pointwise, and refused by name if not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.verify import verify_capture
from hyfi_core.errors import RequestError
from tests.harness import compare, identity, one_process, parallel

SHAPE = (2, 3, 21, 18)


class Swish(torch.autograd.Function):
    """As in efficientnet_pytorch: only the input is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return dy * (s * (1 + x * (1 - s)))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        return -dy * ctx.by, None


class Gated(torch.autograd.Function):
    """Of two tensors, with a setup_context; its gradients are not those of its forward."""

    @staticmethod
    def forward(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * gate.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        x, gate = ctx.saved_tensors
        return dy * gate, dy * x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6)
        self.last, self.fc = nn.Conv2d(6, 6, 3, 1, 1), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Swish.apply(self.norm(self.first(x)))
        y = F.relu(Reversed.apply(self.last(x), 0.5))
        return self.fc(Swish.apply(Gated.apply(y, x).mean((2, 3))))  # replicated values, too


@pytest.mark.parametrize(
    "plan",
    [
        hyfi_core.ParallelPlan(grids=((1, 2),)),
        hyfi_core.ParallelPlan(grids=((2, 2),), fused_halo=4),
        hyfi_core.ParallelPlan(grids=((2, 1), (1, 1)), cuts=("norm",), microbatches=2),
        hyfi_core.ParallelPlan(grids=((1, 1),), cells=(2, 2), spill="memory"),
    ],
    ids=["columns", "fused", "stages", "cells"],
)
def test_a_pointwise_function_is_exact_on_any_plan(plan: hyfi_core.ParallelPlan) -> None:
    torch.manual_seed(0)
    model, images, labels = Net().double(), torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1])
    found = parallel(model, images, labels, plan, F.cross_entropy, None)
    wanted = one_process(copy.deepcopy(model), images, labels, plan.microbatches, F.cross_entropy, identity)
    compare(found, wanted)


def test_the_capture_is_what_the_module_computes() -> None:
    assert verify_capture(Net(), SHAPE, torch.float32) is None


class OfKind(torch.autograd.Function):
    """Its factor is told by the type of a constant."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, one: float) -> torch.Tensor:
        ctx.factor = {bool: 2.0, int: 3.0, float: 5.0}[type(one)]
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        return dy * ctx.factor, None


def test_equal_constants_of_other_types_are_other_constants() -> None:
    class Uses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([OfKind.apply(x, one) for one in (1, 1.0, True)])

    assert verify_capture(Uses(), SHAPE, torch.float32) is None


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return dy


class LowBits(Plain):
    """Of integers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x & 3


def test_a_function_of_integers_is_tried_with_integers() -> None:
    class Uses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return LowBits.apply((9 * x).to(torch.int64)) * x

    assert verify_capture(Uses(), SHAPE, torch.float32) is None


class Centred(Plain):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean()


class CentredBackward(Plain):
    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return dy - dy.mean()


class Positions(Plain):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(x.shape[3])


class Noise(Plain):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Pooled(Plain):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, 2)


class InPlace(Plain):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.relu_()


class OfChannels(Plain):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * scale


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (Centred, "mixes values of different places"),
        (CentredBackward, "mixes values of different places"),
        (Positions, "depends on where values are"),
        (Noise, "returns something else when it is called again"),
        (Pooled, "returns another shape"),
        (InPlace, "changes its argument in place"),
        (OfChannels, "takes tensors of different shapes"),
    ],
)
def test_other_functions_are_refused_by_name_and_reason(function: Any, words: str) -> None:
    class Uses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function.apply(x, *([torch.ones(3, 1, 1)] if function is OfChannels else []))

    with pytest.raises(RequestError, match=rf"{function.__name__}, an autograd.Function that {words}.*pointwise\.py"):
        capture(Uses(), SHAPE, torch.float32)
