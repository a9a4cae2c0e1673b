"""Work that sleeps: a model whose forwards and backwards take time and no processor.

So eight ranks on two cores show what a schedule does, and not how they fight for cores.
``Rest`` stands behind a convolution; it sleeps in proportion to the pixels that a rank has, twice as long backward. To
the engine it is one more operator, with a rule like any other.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from hyfi_core.capture.program import Operator
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.table import RULES


@torch.library.custom_op("hyfi_benchmarks::rest", mutates_args=())
def rest(x: torch.Tensor, seconds_per_px: float) -> torch.Tensor:
    """Sleep for every pixel of every image; return a copy."""
    time.sleep(seconds_per_px * x.shape[0] * x.shape[2] * x.shape[3])
    return x.clone()


@rest.register_fake
def _(x: torch.Tensor, seconds_per_px: float) -> torch.Tensor:
    return torch.empty_like(x)


class _Resting(torch.autograd.Function):
    """The same with a backward that sleeps twice as long."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds_per_px: float) -> torch.Tensor:
        ctx.seconds_per_px = seconds_per_px
        result: torch.Tensor = rest(x, seconds_per_px)
        return result

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rest(cotangents[0], 2 * ctx.seconds_per_px), None


def _rule(builder: Builder, op: Operator) -> None:
    """Each rank rests for its part."""
    x, seconds_per_px = op.args
    split = builder.splits[x.name]
    part = builder.part(x.name, split)
    builder.compute(lambda tensor: _Resting.apply(tensor, seconds_per_px), (part,), op.outputs, split)  # type: ignore[no-untyped-call]


RULES["hyfi_benchmarks.rest.default"] = _rule


class Rest(nn.Module):
    """A module that takes time for every pixel."""

    def __init__(self, seconds_per_px: float) -> None:
        super().__init__()
        self.seconds_per_px = seconds_per_px

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the map, later."""
        result: torch.Tensor = rest(x, self.seconds_per_px)
        return result


class RestingNetwork(nn.Module):
    """Blocks of a small convolution and a rest, a mean, a linear layer.

    Args:
        blocks: how many.
        block_s: what one block's forward takes for one whole image.
        size_px: side of the image.
        channels: of every map.
    """

    def __init__(self, blocks: int, block_s: float, size_px: int, channels: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, channels, 1)
        pixels = size_px * size_px
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), Rest(block_s / pixels)) for _ in range(blocks))
        )
        self.fc = nn.Linear(channels, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.fc(self.blocks(self.enter(x)).mean((2, 3)))
        return logits
