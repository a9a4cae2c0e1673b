"""A model that sleeps instead of computing, to measure schedules with more ranks than cores.

`Sleep` follows a convolution and sleeps in proportion to the pixels of a rank's part, in backward twice as long. To the
engine it is an operator with a rule like any other.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from hyfi_core.capture.program import Operator
from hyfi_core.rules.builder import Builder
from hyfi_core.rules.table import RULES


@torch.library.custom_op("hyfi_benchmarks::sleep", mutates_args=())
def sleep(x: torch.Tensor, seconds_per_px: float) -> torch.Tensor:
    """Sleep ``seconds_per_px`` for every pixel of every image; return a copy of ``x``."""
    time.sleep(seconds_per_px * x.shape[0] * x.shape[2] * x.shape[3])
    return x.clone()


@sleep.register_fake
def _(x: torch.Tensor, seconds_per_px: float) -> torch.Tensor:
    return torch.empty_like(x)


class _SleepFunction(torch.autograd.Function):
    """`sleep` with a backward that sleeps twice as long."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds_per_px: float) -> torch.Tensor:
        ctx.seconds_per_px = seconds_per_px
        result: torch.Tensor = sleep(x, seconds_per_px)
        return result

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sleep(cotangents[0], 2 * ctx.seconds_per_px), None


def _rule(builder: Builder, op: Operator) -> None:
    """Each rank sleeps for its part."""
    x, seconds_per_px = op.args
    split = builder.splits[x.name]
    part = builder.part(x.name, split)
    builder.compute(lambda tensor: _SleepFunction.apply(tensor, seconds_per_px), (part,), op.outputs, split)  # type: ignore[no-untyped-call]


RULES["hyfi_benchmarks.sleep.default"] = _rule


class Sleep(nn.Module):
    """A module that sleeps for every pixel and returns its input."""

    def __init__(self, seconds_per_px: float) -> None:
        super().__init__()
        self.seconds_per_px = seconds_per_px

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``x`` after sleeping."""
        result: torch.Tensor = sleep(x, self.seconds_per_px)
        return result


class SleepingNetwork(nn.Module):
    """Blocks of a small convolution and a `Sleep`, then a mean over pixels and a linear layer.

    Args:
        blocks: Number of blocks.
        block_s: Seconds of one block's forward for one whole image.
        size_px: Height and width of the image.
        channels: Channels of every feature map.
    """

    def __init__(self, blocks: int, block_s: float, size_px: int, channels: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, channels, 1)
        pixels = size_px * size_px
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), Sleep(block_s / pixels))
                for _ in range(blocks)
            )
        )
        self.fc = nn.Linear(channels, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits ``(B, 2)``."""
        logits: torch.Tensor = self.fc(self.blocks(self.enter(x)).mean((2, 3)))
        return logits
