"""Residual networks of He et al. as plain PyTorch modules.

Three families, one head (global pooling over the map, then a linear layer ``fc``):

* ``resnet18``, ``resnet34``, ``resnet50``, the small ``resnet6`` and ``resnet10``: the ImageNet networks under
  torchvision's parameter names (``conv1``, ``layer1.0.conv1``, ``layer2.0.downsample.0``, ``fc``), so that its
  weight files load.
* ``resnet_v1(depth)``: the three-stage networks of "Deep residual learning" (2015), depth 6n + 2.
* ``resnet_v2(depth)``: the pre-activation networks of "Identity mappings" (2016), depth 9n + 2 or 6n + 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.models.blocks import BasicBlock, Block, Bottleneck, PreactBasicBlock, PreactBottleneck, conv3x3
from hyfi_core.models.norm import check_norm, make_norm

POOLS = ("avg", "max")


def pool_map(x: torch.Tensor, pool: str) -> torch.Tensor:
    """Reduce a map ``(B, C, H, W)`` to ``(B, C)``: its mean (``avg``) or its largest value (``max``)."""
    return x.mean((2, 3)) if pool == "avg" else x.amax((2, 3))


class Residual(nn.Module):
    """Base class of all families: stages of blocks, pooling, the linear head, initialisation.

    Subclasses add their stem, call ``_stage`` for each stage and finish with ``_head``.
    """

    def __init__(self, classes: int, pool: str, norm: str, width: int, in_channels: int) -> None:
        super().__init__()
        if pool not in POOLS:
            raise RequestError(f"model.pool is {pool!r}; use one of {', '.join(POOLS)}")
        check_norm(norm)
        for name, value in (("classes", classes), ("width", width), ("in_channels", in_channels)):
            if value < 1:
                raise RequestError(f"model.{name} is {value}; it must be at least 1")
        self.pool, self.norm = pool, norm
        self._channels = width

    def _stage(self, block: type[Block], planes: int, blocks: int, stride: int) -> nn.Sequential:
        """Return the next blocks, the first one with ``stride``; set ``_channels`` to their output channels."""
        layers: list[nn.Module] = []
        for index in range(blocks):
            layers.append(block(self._channels, planes, stride if index == 0 else 1, self.norm))
            self._channels = planes * block.expansion
        return nn.Sequential(*layers)

    def _head(self, classes: int) -> nn.Linear:
        """Return the linear head, after giving every convolution its initial values (He et al., 2015b)."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # As torchvision: gradients keep their size through the layers.
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        head = nn.Linear(self._channels, classes)
        nn.init.normal_(head.weight, std=0.01)  # the first loss is about ln(classes), regardless of the pooled values
        nn.init.zeros_(head.bias)
        return head


class ResNet(Residual):
    """Stages after a 7×7 stem and a max-pool: ``(B, in_channels, H, W) -> (B, classes)``.

    Its stride is 4, doubled by each stage after the first: 32 for the usual four stages.

    Args:
        block: the block of all stages.
        blocks: number of blocks in each stage, one entry a stage.
        classes: number of logits.
        pool: ``avg`` or ``max`` over the last map.
        norm: ``train``, ``frozen`` or ``group``, see ``make_norm``.
        width: channels of the stem and planes of the first stage; each further stage has twice as many.
        in_channels: channels of the image.

    Raises:
        RequestError: an argument has a value that is not allowed.
    """

    def __init__(
        self,
        block: type[Block],
        blocks: Sequence[int],
        classes: int,
        pool: str = "avg",
        norm: str = "train",
        width: int = 64,
        in_channels: int = 3,
    ) -> None:
        super().__init__(classes, pool, norm, width, in_channels)
        self.conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = make_norm(norm, width)
        # In place: the norm's backward reads its input, not its result.
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self._layers = [f"layer{number}" for number in range(1, len(blocks) + 1)]
        for stage, (name, count) in enumerate(zip(self._layers, blocks, strict=True)):
            self.add_module(name, self._stage(block, width * 2**stage, count, 1 if stage == 0 else 2))
        self.fc = self._head(classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits ``(B, classes)`` of images ``(B, in_channels, H, W)``, any H and W."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name in self._layers:
            # By name: torchvision's weights know ``layer1`` and so on.
            x = self.get_submodule(name)(x)
        return self.fc(pool_map(x, self.pool))  # type: ignore[no-any-return]


class CifarResNet(Residual):
    """Three stages of basic blocks after a 3×3 stem: ``(B, in_channels, H, W) -> (B, classes)``, stride 4."""

    def __init__(
        self,
        blocks: int,
        classes: int,
        pool: str = "avg",
        norm: str = "train",
        width: int = 16,
        in_channels: int = 3,
    ) -> None:
        super().__init__(classes, pool, norm, width, in_channels)
        self.conv1 = conv3x3(in_channels, width)
        self.bn1 = make_norm(norm, width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = self._stage(BasicBlock, width, blocks, 1)
        self.layer2 = self._stage(BasicBlock, width * 2, blocks, 2)
        self.layer3 = self._stage(BasicBlock, width * 4, blocks, 2)
        self.fc = self._head(classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits ``(B, classes)`` of images ``(B, in_channels, H, W)``, any H and W."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(pool_map(x, self.pool))  # type: ignore[no-any-return]


class PreActivationResNet(Residual):
    """Three pre-activation stages after a bare 3×3 stem: ``(B, in_channels, H, W) -> (B, classes)``, stride 4."""

    def __init__(
        self,
        block: type[Block],
        blocks: int,
        classes: int,
        pool: str = "avg",
        norm: str = "train",
        width: int = 16,
        in_channels: int = 3,
    ) -> None:
        super().__init__(classes, pool, norm, width, in_channels)
        self.conv1 = conv3x3(in_channels, width)
        self.layer1 = self._stage(block, width, blocks, 1)
        self.layer2 = self._stage(block, width * 2, blocks, 2)
        self.layer3 = self._stage(block, width * 4, blocks, 2)
        # Norm and ReLU come before convolutions, so the last block's sum does not have them yet.
        self.bn = make_norm(norm, self._channels)
        self.relu = nn.ReLU(inplace=True)
        self.fc = self._head(classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits ``(B, classes)`` of images ``(B, in_channels, H, W)``, any H and W."""
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        return self.fc(pool_map(self.relu(self.bn(x)), self.pool))  # type: ignore[no-any-return]


def resnet6(
    classes: int = 1000, pool: str = "avg", norm: str = "train", width: int = 64, in_channels: int = 3
) -> ResNet:
    """Return the first two stages of ResNet-18 with one block each: stride 8, for structures of a few cells."""
    return ResNet(BasicBlock, (1, 1), classes, pool, norm, width, in_channels)


def resnet10(
    classes: int = 1000, pool: str = "avg", norm: str = "train", width: int = 64, in_channels: int = 3
) -> ResNet:
    """Return ResNet-18 with one block a stage; narrow (``width=16``) it trains on two CPU cores."""
    return ResNet(BasicBlock, (1, 1, 1, 1), classes, pool, norm, width, in_channels)


def resnet18(
    classes: int = 1000, pool: str = "avg", norm: str = "train", width: int = 64, in_channels: int = 3
) -> ResNet:
    """Return ResNet-18 (11,689,512 parameters for 1000 classes)."""
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, pool, norm, width, in_channels)


def resnet34(
    classes: int = 1000, pool: str = "avg", norm: str = "train", width: int = 64, in_channels: int = 3
) -> ResNet:
    """Return ResNet-34 (21,797,672 parameters for 1000 classes)."""
    return ResNet(BasicBlock, (3, 4, 6, 3), classes, pool, norm, width, in_channels)


def resnet50(
    classes: int = 1000, pool: str = "avg", norm: str = "train", width: int = 64, in_channels: int = 3
) -> ResNet:
    """Return ResNet-50 with the stride on the 3×3 convolution (25,557,032 parameters for 1000 classes)."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, pool, norm, width, in_channels)


def resnet_v1(
    depth: int, classes: int = 10, pool: str = "avg", norm: str = "train", width: int = 16, in_channels: int = 3
) -> CifarResNet:
    """Return the v1 network of ``depth`` = 6n + 2 layers (20: 0.27 million parameters, 110: 1.7 million).

    Shortcuts that change shape are projections (option B of the paper).

    Raises:
        RequestError: there is no such depth; the message names the nearest ones.
    """
    return CifarResNet(_blocks(depth, 6, "resnet_v1"), classes, pool, norm, width, in_channels)


def resnet_v2(
    depth: int,
    classes: int = 10,
    pool: str = "avg",
    norm: str = "train",
    width: int = 16,
    in_channels: int = 3,
    block: str = "auto",
) -> PreActivationResNet:
    """Return the v2 network of ``depth`` layers (164: 1.7 million parameters, 1001: 10.3 million).

    Depth 9n + 2 is made of bottlenecks, 6n + 2 of basic blocks. A depth that is both (110, 164) is made of bottlenecks
    unless ``block`` is ``"basic"``.

    Raises:
        RequestError: there is no such depth for that block; the message names the nearest ones.
    """
    if block not in ("auto", "basic", "bottleneck"):
        raise RequestError(f"model.options.block is {block!r}; use one of auto, basic, bottleneck")
    bottleneck = block == "bottleneck" or (block == "auto" and (_legal(depth, 9) or not _legal(depth, 6)))
    kind: type[Block] = PreactBottleneck if bottleneck else PreactBasicBlock
    blocks = _blocks(depth, 9 if bottleneck else 6, "resnet_v2")
    return PreActivationResNet(kind, blocks, classes, pool, norm, width, in_channels)


def _legal(depth: int, step: int) -> bool:
    """Whether a depth is step · n + 2 with n of at least 1."""
    return depth > 2 and (depth - 2) % step == 0


def _blocks(depth: int, step: int, name: str) -> int:
    """Return the blocks of each stage, n of step · n + 2 = depth; refuse other depths."""
    if not _legal(depth, step):
        below = max(1, (depth - 2) // step) * step + 2
        raise RequestError(f"{name} has no depth {depth}; depths are {step}n + 2: use {below} or {below + step}")
    return (depth - 2) // step
