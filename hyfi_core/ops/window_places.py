"""Places of maxima as numbers in their windows: a byte each instead of eight.

native      flat index in the map: y · width + x
narrow      which pixel of the output's own window: row · kernel_x + column
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_PIXELS = 256
"""Of a window whose pixels have numbers of one byte."""


@dataclass(frozen=True)
class WindowPlaces:
    """How windows of a map lie.

    Attributes:
        width: of the map.
        kernel: (y, x).
        stride: (y, x).
        padding: (y, x).
        dilation: (y, x).
    """

    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def fits(self) -> bool:
        """Whether a byte is enough, and no row of a window is longer than what lies between two of its rows."""
        (rows, columns), (dy, dx) = self.kernel, self.dilation
        return rows * columns <= MOST_PIXELS and (columns - 1) * dx < dy * self.width

    def narrow(self, indices: torch.Tensor) -> torch.Tensor:
        """Return flat indices ``(..., h, w)`` as numbers in their windows."""
        away = (indices - self._first(indices)).int()
        (dy, dx), (_, columns) = self.dilation, self.kernel
        row = away.div(dy * self.width, rounding_mode="floor")
        return away.sub_(row * (dy * self.width)).div_(dx, rounding_mode="floor").add_(row * columns).to(torch.uint8)

    def wide(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the flat indices again."""
        (dy, dx), (_, columns) = self.dilation, self.kernel
        found = numbers.long()
        row = found.div(columns, rounding_mode="floor")
        return found.sub_(row * columns).mul_(dx).add_(row.mul_(dy * self.width)).add_(self._first(numbers))

    def _first(self, like: torch.Tensor) -> torch.Tensor:
        """Return the flat index of each window's first pixel, which may lie in the padding."""
        height, width = like.shape[-2:]
        y = torch.arange(height, device=like.device) * self.stride[0] - self.padding[0]
        x = torch.arange(width, device=like.device) * self.stride[1] - self.padding[1]
        return y[:, None] * self.width + x
