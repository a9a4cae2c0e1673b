"""Small convolutions tap by tap, each tap one matrix product: for received strips, forward and backward.

    canvas   ·────────·   tap (1, 0) sees the pixels      output[p]    += canvas[p at tap] · weight[tap]ᵀ
             │▒▒▒▒▒▒▒▒│   of one shifted lattice          weight[tap]  += cotangentᵀ · canvas at tap
             ·────────·                                   canvas[p ..] += cotangent · weight[tap]

Strips are one or a few pixels wide while weights are large: a convolution call would reorder, copy and add whole
weights for few pixels. In channels-last format, a tap of the weight is a matrix in memory, so products read and add in
place.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

YX = tuple[int, int]


def in_place(kernel: torch.Tensor, groups: int) -> bool:
    """Whether every tap of a weight ``(O, I, h, w)`` is a matrix in memory."""
    return groups == 1 and kernel.is_contiguous(memory_format=torch.channels_last)


def add_outputs(outputs: torch.Tensor, canvas: torch.Tensor, kernel: torch.Tensor, stride: YX, dilation: YX) -> None:
    """Add the convolution of ``canvas`` ``(N, I, h, w)``, without padding, to ``outputs`` ``(N, O, h', w')``."""
    total: torch.Tensor | None = None
    for (y, x), pixels_read in _views_of_taps(canvas, kernel, outputs, stride, dilation):
        pixels, weight = _matrix(pixels_read), kernel[:, :, y, x].t()
        # One matrix collects all taps: ``outputs`` is a view with gaps, into which no product can write.
        total = torch.mm(pixels, weight) if total is None else total.addmm_(pixels, weight)
    if total is not None:
        outputs.add_(_map(total, outputs))


def add_to_weight(d_kernel: torch.Tensor, canvas: torch.Tensor, dy: torch.Tensor, stride: YX, dilation: YX) -> None:
    """Add the weight's cotangent to ``d_kernel``; ``dy``: the cotangent of the outputs."""
    pixels = _matrix(dy).t()
    for (y, x), pixels_read in _views_of_taps(canvas, d_kernel, dy, stride, dilation):
        # In place: in channels-last memory, a tap of the weight is a matrix with constant strides.
        d_kernel[:, :, y, x].addmm_(pixels, _matrix(pixels_read))


def back(canvas: torch.Tensor, kernel: torch.Tensor, dy: torch.Tensor, stride: YX, dilation: YX) -> torch.Tensor:
    """Return the cotangent of ``canvas``, whose values are not used."""
    d_canvas = torch.zeros_like(canvas)
    pixels = _matrix(dy)
    for (y, x), pixels_read in _views_of_taps(d_canvas, kernel, dy, stride, dilation):
        # The pixels of one tap differ from each other, so they can be added at once; those of different taps overlap.
        pixels_read.add_(_map(torch.mm(pixels, kernel[:, :, y, x]), pixels_read))
    return d_canvas


def _views_of_taps(
    canvas: torch.Tensor, kernel: torch.Tensor, outputs: torch.Tensor, stride: YX, dilation: YX
) -> Iterator[tuple[YX, torch.Tensor]]:
    """Yield (tap, the view of the pixels that the outputs read through it)."""
    # Sides of the canvas from the pixel of the first output to that of the last, both included.
    height, width = ((n - 1) * step + 1 for n, step in zip(outputs.shape[2:], stride, strict=True))
    for y in range(kernel.shape[2]):
        for x in range(kernel.shape[3]):
            top, left = y * dilation[0], x * dilation[1]
            yield (y, x), canvas[:, :, top : top + height : stride[0], left : left + width : stride[1]]


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``(N, C, h, w)`` as ``(N h w, C)``, a view where memory allows."""
    return tensor.permute(0, 2, 3, 1).reshape(-1, tensor.shape[1])


def _map(matrix: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``(N h w, C)`` as a view ``(N, C, h, w)`` of the shape of ``like``."""
    images, _, height, width = like.shape
    return matrix.view(images, height, width, -1).permute(0, 3, 1, 2)
