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
        width: width of the map.
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
        """Whether indices in windows fit into a byte and can be computed from flat indices."""
        (rows, columns), (dy, dx) = self.kernel, self.dilation
        # If rows of a window overlapped in the flat index, an offset would not determine its row.
        return rows * columns <= MOST_PIXELS and (columns - 1) * dx < dy * self.width

    def narrow(self, indices: torch.Tensor) -> torch.Tensor:
        """Return flat indices ``(..., h, w)`` as indices in their windows, uint8; requires ``fits``."""
        (dy, dx), (_, columns), first = self.dilation, self.kernel, self._first_pixels(indices)
        rows_apart = dy * self.width
        # 32 bits take half the memory of 64: enough for offsets in a window, and for flat indices of most maps.
        if (indices.shape[-2] * self.stride[0] + self.kernel[0] * dy) * self.width < 1 << 31:
            offset = indices.int().sub_(first.int())
        else:
            offset = (indices - first).int()
        row = offset.div(rows_apart, rounding_mode="floor")
        if dx > 1:
            offset = offset.sub_(row, alpha=rows_apart).div_(dx, rounding_mode="floor")
            return offset.add_(row, alpha=columns).to(torch.uint8)
        # offset = row · rows_apart + column becomes row · columns + column.
        return offset.add_(row, alpha=columns - rows_apart).to(torch.uint8)

    def wide(self, indices: torch.Tensor) -> torch.Tensor:
        """Return indices in windows as flat indices; the inverse of ``narrow``."""
        (dy, dx), (rows, columns) = self.dilation, self.kernel
        # Few passes over eight bytes: first + dx · (index − row · columns) + dy · width · row.
        flat = torch.empty_like(indices, dtype=torch.int64)
        torch.add(self._first_pixels(indices), indices, alpha=dx, out=flat)
        if rows == 1:  # then there may be 256 columns, and dividing a byte by 256 would divide by 0
            return flat
        row = indices.div(columns, rounding_mode="floor")
        return flat.add_(row, alpha=dy * self.width - columns * dx)

    def _first_pixels(self, like: torch.Tensor) -> torch.Tensor:
        """Return the flat index of each window's first pixel, which may be in the padding."""
        height, width = like.shape[-2:]
        # Negative in the padding; only differences from it count.
        y = torch.arange(height, device=like.device) * self.stride[0] - self.padding[0]
        x = torch.arange(width, device=like.device) * self.stride[1] - self.padding[1]
        return y[:, None] * self.width + x
