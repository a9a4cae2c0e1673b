"""Residual blocks of He et al.: post-activation (2015, v1) and pre-activation (2016, v2).

::

    v1   x ── conv norm relu conv norm ──(+)── relu        v2   x ── norm relu ─┬─ conv norm relu conv ──(+)──
         └──────── downsample ────────────┘                     └── (shortcut of ┴ the activated map) ────┘

A bottleneck replaces the two 3×3 convolutions by 1×1, 3×3, 1×1. The stride sits on the 3×3 convolution of a bottleneck
(as in torchvision, whose weights therefore fit), on the first convolution of a basic block.
"""

from __future__ import annotations

import torch
from torch import nn

from hyfi_core.models.norm import make_norm


def conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """Return a 3×3 convolution without bias whose output has the input's size divided by ``stride``, rounded up."""
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """Return a 1×1 convolution without bias."""
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


class Block(nn.Module):
    """One residual block ``(B, inputs, H, W) -> (B, planes * expansion, ceil(H / stride), ceil(W / stride))``."""

    expansion: int = 1

    def __init__(self, inputs: int, planes: int, stride: int, norm: str) -> None:
        super().__init__()
        self.outputs = planes * self.expansion
        self.projects = stride != 1 or inputs != self.outputs


class BasicBlock(Block):
    """Two 3×3 convolutions, activation after the sum (v1)."""

    def __init__(self, inputs: int, planes: int, stride: int, norm: str) -> None:
        super().__init__(inputs, planes, stride, norm)
        self.conv1 = conv3x3(inputs, planes, stride)
        self.bn1 = make_norm(norm, planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(planes, planes)
        self.bn2 = make_norm(norm, planes)
        self.downsample = projection(inputs, self.outputs, stride, norm) if self.projects else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, a new tensor."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + shortcut)  # type: ignore[no-any-return]


class Bottleneck(Block):
    """1×1, 3×3, 1×1 convolutions, activation after the sum (v1)."""

    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int, norm: str) -> None:
        super().__init__(inputs, planes, stride, norm)
        self.conv1 = conv1x1(inputs, planes)
        self.bn1 = make_norm(norm, planes)
        self.conv2 = conv3x3(planes, planes, stride)
        self.bn2 = make_norm(norm, planes)
        self.conv3 = conv1x1(planes, self.outputs)
        self.bn3 = make_norm(norm, self.outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = projection(inputs, self.outputs, stride, norm) if self.projects else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, a new tensor."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + shortcut)  # type: ignore[no-any-return]


class PreactBasicBlock(Block):
    """Norm and activation before each of two 3×3 convolutions (v2)."""

    def __init__(self, inputs: int, planes: int, stride: int, norm: str) -> None:
        super().__init__(inputs, planes, stride, norm)
        self.bn1 = make_norm(norm, inputs)
        self.conv1 = conv3x3(inputs, planes, stride)
        self.bn2 = make_norm(norm, planes)
        self.conv2 = conv3x3(planes, planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = conv1x1(inputs, self.outputs, stride) if self.projects else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, a new tensor; it is not activated."""
        # The ReLU changes the norm's result in place, and not x, which the shortcut reads.
        active = self.relu(self.bn1(x))
        shortcut = x if self.downsample is None else self.downsample(active)
        out = self.conv1(active)
        return self.conv2(self.relu(self.bn2(out))) + shortcut  # type: ignore[no-any-return]


class PreactBottleneck(Block):
    """Norm and activation before each of 1×1, 3×3, 1×1 convolutions (v2)."""

    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int, norm: str) -> None:
        super().__init__(inputs, planes, stride, norm)
        self.bn1 = make_norm(norm, inputs)
        self.conv1 = conv1x1(inputs, planes)
        self.bn2 = make_norm(norm, planes)
        self.conv2 = conv3x3(planes, planes, stride)
        self.bn3 = make_norm(norm, planes)
        self.conv3 = conv1x1(planes, self.outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = conv1x1(inputs, self.outputs, stride) if self.projects else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, a new tensor; it is not activated."""
        # As in the basic block, the ReLU does not change x.
        active = self.relu(self.bn1(x))
        shortcut = x if self.downsample is None else self.downsample(active)
        out = self.conv1(active)
        out = self.conv2(self.relu(self.bn2(out)))
        return self.conv3(self.relu(self.bn3(out))) + shortcut  # type: ignore[no-any-return]


def projection(inputs: int, outputs: int, stride: int, norm: str) -> nn.Sequential:
    """Return the shortcut of a v1 block that changes shape: a strided 1×1 convolution and its norm."""
    return nn.Sequential(conv1x1(inputs, outputs, stride), make_norm(norm, outputs))
