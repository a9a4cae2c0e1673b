"""AmoebaNet-D of Real et al. (2019, arXiv:1802.01548), in the size family that GPipe and torchgpipe report.

There are two kinds of cells, N and R, of five pairwise sums each; a cell takes the outputs of the two cells before it::

    stem ── R ── R ── N × n ── R ── N × n ── R ── N × n ── mean ── linear        R halves height and width
      └─────┴────┴──── … each cell also takes the input of the cell before it

The genotype follows the released TensorFlow code, as torchgpipe's does (normal cells there concatenate states 0, 3, 4
and 6, which gives the published parameter counts). Unlike in torchgpipe's, 3×3 max pools are max pools, and sizes may
be odd: every reduction rounds up, so the sizes of its branches always match.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Operation = Callable[[int, int], nn.Module]
Wiring = tuple[tuple[int, Operation], ...]


def _relu_conv_norm(
    inputs: int,
    outputs: int,
    kernel: tuple[int, int] = (1, 1),
    stride: tuple[int, int] = (1, 1),
) -> list[nn.Module]:
    """Return ReLU, convolution and norm, which keep a map's height and width, or divide them by the stride."""
    # For odd kernels, such as 1 x 7, the map keeps its size.
    padding = (kernel[0] // 2, kernel[1] // 2)
    return [
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class FactorizedReduction(nn.Module):
    """Halve a map with two branches: one reads pixels of even row and column, the other those of odd row and column.

    ``(B, inputs, H, W) -> (B, outputs, ceil(H / 2), ceil(W / 2))``; with zeros after the last pixel.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, stride=2, bias=False)
        self.shift = nn.ZeroPad2d((0, 1, 0, 1))
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the halved map, a new tensor."""
        x = self.relu(x)
        # Without the map's first row and column, its odd pixels are at even places; zeros at the end make both results
        # equal in size.
        both = torch.cat([self.even(x), self.odd(self.shift(x[:, :, 1:, 1:]))], dim=1)
        return self.norm(both)  # type: ignore[no-any-return]


def _identity(channels: int, stride: int) -> nn.Module:
    """Return the identity, or for a stride of 2 an operation that halves the map."""
    return nn.Identity() if stride == 1 else FactorizedReduction(channels, channels)


def _average_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def _maximum_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def _maximum_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride, ceil_mode=True)  # "same" padding for stride 2, the only one that the cells use


def _conv_1x1(channels: int, stride: int) -> nn.Module:
    return nn.Sequential(*_relu_conv_norm(channels, channels, stride=(stride, stride)))


def _conv_3x3(channels: int, stride: int) -> nn.Module:
    """Return a 3 x 3 convolution on a quarter of the channels."""
    narrow = channels // 4
    return nn.Sequential(
        *_relu_conv_norm(channels, narrow),
        *_relu_conv_norm(narrow, narrow, (3, 3), (stride, stride)),
        *_relu_conv_norm(narrow, channels),
    )


def _conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    """Return a 7 x 7 convolution in two, 1 x 7 and 7 x 1, on a quarter of the channels."""
    narrow = channels // 4
    return nn.Sequential(
        *_relu_conv_norm(channels, narrow),
        *_relu_conv_norm(narrow, narrow, (1, 7), (1, stride)),
        *_relu_conv_norm(narrow, narrow, (7, 1), (stride, 1)),
        *_relu_conv_norm(narrow, channels),
    )


# Pairs: the results of entries 2k and 2k + 1 are added and become state 2 + k; states 0 and 1 are the cell's inputs.
_NORMAL: Wiring = (
    (1, _conv_1x1),
    (1, _maximum_3x3),
    (1, _identity),
    (0, _conv_1x7_7x1),
    (0, _conv_1x1),
    (0, _conv_1x7_7x1),
    (2, _maximum_3x3),
    (2, _identity),
    (1, _average_3x3),
    (5, _conv_1x1),
)
_NORMAL_CONCAT = (0, 3, 4, 6)
_REDUCTION: Wiring = (
    (0, _maximum_2x2),
    (0, _maximum_3x3),
    (2, _identity),
    (1, _conv_3x3),
    (2, _conv_1x7_7x1),
    (2, _maximum_3x3),
    (3, _identity),
    (1, _maximum_2x2),
    (2, _average_3x3),
    (3, _conv_1x1),
)
_REDUCTION_CONCAT = (4, 5, 6)


class AmoebaCell(nn.Module):
    """One cell: takes the maps of the two cells before it.

    Args:
        older_channels: channels of the older input.
        newer_channels: channels of the newer input.
        channels: channels of every state inside the cell.
        reduction: whether the cell halves height and width.
        older_is_larger: whether the cell before has halved them, so that the older input is twice as large.
    """

    def __init__(
        self, older_channels: int, newer_channels: int, channels: int, reduction: bool, older_is_larger: bool
    ) -> None:
        super().__init__()
        # Both inputs get the size and the channels of the newer one's states.
        self.newer = nn.Sequential(*_relu_conv_norm(newer_channels, channels))
        self.older: nn.Module = nn.Identity()
        if older_is_larger:
            self.older = FactorizedReduction(older_channels, channels)
        elif older_channels != channels:
            self.older = nn.Sequential(*_relu_conv_norm(older_channels, channels))
        wiring = _REDUCTION if reduction else _NORMAL
        self._sources = tuple(source for source, _ in wiring)
        self._concat = _REDUCTION_CONCAT if reduction else _NORMAL_CONCAT
        self.outputs = channels * len(self._concat)
        # Only operations on the cell's inputs have a stride of 2: all later states are halved already.
        self.operations = nn.ModuleList(
            operation(channels, 2 if reduction and source < 2 else 1) for source, operation in wiring
        )

    def forward(self, newer: torch.Tensor, older: torch.Tensor) -> torch.Tensor:
        """Return the concatenated states ``(B, outputs, h, w)``, a new tensor."""
        states = [self.newer(newer), self.older(older)]
        for first in range(0, len(self._sources), 2):
            terms = [self.operations[at](states[self._sources[at]]) for at in (first, first + 1)]
            states.append(terms[0] + terms[1])
        return torch.cat([states[index] for index in self._concat], dim=1)


class AmoebaNetD(nn.Module):
    """The classifier ``(B, in_channels, H, W) -> (B, classes)``, without an auxiliary head; any height and width.

    Args:
        classes: outputs of the linear head.
        layers: normal cells, a multiple of 3.
        filters: width of the network, a multiple of 16; cells start with a quarter of it.
        in_channels: number of channels of the image.

    Raises:
        ValueError: ``layers`` is no multiple of 3, or ``filters`` no multiple of 16.
    """

    def __init__(self, classes: int, layers: int = 18, filters: int = 208, in_channels: int = 3) -> None:
        super().__init__()
        if layers < 3 or layers % 3:
            raise ValueError(f"layers is {layers}; use a multiple of 3, such as 18")
        if filters < 16 or filters % 16:
            raise ValueError(f"filters is {filters}; use a multiple of 16, such as 208, 256 or 416")
        channels = filters // 4
        self.stem = nn.Sequential(
            nn.ReLU(), nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(channels)
        )
        normal = [False] * (layers // 3)
        self.cells = nn.ModuleList()
        older_channels = newer_channels = channels
        older_is_larger = False
        for reduction in (True, True, *normal, True, *normal, True, *normal):
            channels = channels * 2 if reduction else channels
            cell = AmoebaCell(older_channels, newer_channels, channels, reduction, older_is_larger)
            self.cells.append(cell)
            # For the next cell: the map that this one halves is its older input.
            older_channels, newer_channels, older_is_larger = newer_channels, cell.outputs, reduction
        self.fc = nn.Linear(newer_channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits ``(B, classes)``."""
        newer = older = self.stem(images)
        for cell in self.cells:
            # Python evaluates the right side first, so the previous ``newer`` becomes ``older``.
            newer, older = cell(newer, older), newer
        return self.fc(newer.mean((2, 3)))  # type: ignore[no-any-return]


def amoebanet_d(classes: int, layers: int = 18, filters: int = 208, in_channels: int = 3) -> AmoebaNetD:
    """Return AmoebaNet-D ``(layers, filters)``; published sizes are (18, 208), (18, 256) and (18, 416)."""
    return AmoebaNetD(classes, layers, filters, in_channels)
