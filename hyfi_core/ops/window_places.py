"""Positions of maxima relative to their windows: one byte each instead of eight.

wide        flat index in the map, as PyTorch returns it: y · width + x
narrow      index in the output's window: row · kernel_x + column
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MOST_PIXELS = 256
"""Largest number of pixels of a window whose indices fit into a byte."""


@dataclass(frozen=True)
class WindowPlaces:
    """The windows of a max pool.

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
        """Whether a byte is enough, and rows of a window do not overlap in the flat index."""
        (rows, columns), (dy, dx) = self.kernel, self.dilation
        # Otherwise an offset does not tell in which row of the window it is.
        return rows * columns <= MOST_PIXELS and (columns - 1) * dx < dy * self.width

    def narrow(self, indices: torch.Tensor) -> torch.Tensor:
        """Return flat indices ``(..., h, w)`` as indices in their windows, uint8."""
        # Offsets within a window are small: 32 bits take half the memory of 64.
        offset = (indices - self._first(indices)).int()
        (dy, dx), (_, columns) = self.dilation, self.kernel
        row = offset.div(dy * self.width, rounding_mode="floor")
        return offset.sub_(row * (dy * self.width)).div_(dx, rounding_mode="floor").add_(row * columns).to(torch.uint8)

    def wide(self, indices: torch.Tensor) -> torch.Tensor:
        """Return indices in windows as flat indices; the inverse of ``narrow``."""
        (dy, dx), (_, columns) = self.dilation, self.kernel
        flat = indices.long()
        row = flat.div(columns, rounding_mode="floor")
        return flat.sub_(row * columns).mul_(dx).add_(row.mul_(dy * self.width)).add_(self._first(indices))

    def _first(self, like: torch.Tensor) -> torch.Tensor:
        """Return the flat index of each window's first pixel, which may be in the padding."""
        height, width = like.shape[-2:]
        # Negative in the padding; only differences from it count.
        y = torch.arange(height, device=like.device) * self.stride[0] - self.padding[0]
        x = torch.arange(width, device=like.device) * self.stride[1] - self.padding[1]
        return y[:, None] * self.width + x
