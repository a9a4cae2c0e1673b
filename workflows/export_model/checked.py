"""The check of an exported file: it is kept only if it computes the model's outputs, on random images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hyfi_core.errors import RequestError

TOLERANCE = 1e-3
"""Largest difference of an output from PyTorch's, relative to the largest output."""
_CHECKED_PX = 256
"""Height of the images that check a file for any size; about twice the smallest that networks take."""


def sample_images(align_px: int, size_px: tuple[int, int] | None) -> list[torch.Tensor]:
    """Return random images (1, 3, H, W) uint8: one of the given size, or two of different sizes and shapes.

    Args:
        align_px: Height and width are multiples of this.
        size_px: Height and width; None: any.
    """
    # Networks shrink an image by 32 or more: smaller steps would make sizes that do not fit.
    step = max(align_px, 32)
    rows = -(-_CHECKED_PX // step) * step
    # Two sizes and shapes, taller and wider: a file that works for one size only fails with the other.
    sizes = [size_px] if size_px is not None else [(rows, rows + step), (rows + 2 * step, rows)]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (1, 3, *size), dtype=torch.uint8, generator=generator) for size in sizes]


def largest_difference(
    model: nn.Module, images: Sequence[torch.Tensor], what: str, compute: Callable[[torch.Tensor], torch.Tensor]
) -> float:
    """Return the largest difference of a file's outputs from the model's, relative to the largest output.

    Args:
        model: The model; the first tensor that it returns is compared.
        images: The images to compare with.
        what: Name of the file, for messages.
        compute: Returns the file's outputs for an image.

    Raises:
        RequestError: The difference is larger than ``TOLERANCE``.
    """
    largest = 0.0
    for image in images:
        with torch.no_grad():
            outputs = model(image)[0]
        difference = float((compute(image) - outputs).abs().max() / outputs.abs().max().clamp_min(1e-6))
        if not difference <= TOLERANCE:  # NaN, too
            size = f"{image.shape[2]} × {image.shape[3]} px"
            raise RequestError(
                f"{what} computes other outputs than PyTorch on an image of {size} (relative difference "
                f"{difference:.2g}); no file is kept"
            )
        largest = max(largest, difference)
    return largest


def first_line(error: Exception) -> str:
    """Return the first line of an exporter's message that is not empty."""
    # Exporters wrap the error of the user's module.
    cause = error.__cause__ or error
    return next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
