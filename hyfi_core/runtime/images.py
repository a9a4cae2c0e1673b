"""What a rank reads of the batch: a box for each first stage that it holds, for the micro-batches that begin there.

two directions, four micro-batches     stage 0, direction 0: its box of samples of micro-batches 0, 1
                                       stage 0, direction 1: its box of samples of micro-batches 2, 3
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from hyfi_core.errors import RequestError
from hyfi_core.plan.box import Box


@dataclass(frozen=True, slots=True)
class InputPart:
    """A box of some samples of the batch.

    Attributes:
        box: of the image, halo included, within the image.
        first: the first sample.
        stop: the sample behind the last.
    """

    box: Box
    first: int
    stop: int


@runtime_checkable
class ImageParts(Protocol):
    """A batch that gives any box of any of its samples."""

    def read(self, box: Box, first: int, stop: int) -> torch.Tensor:
        """Return ``(stop - first, C, h, w)``."""
        ...


Images = torch.Tensor | Callable[[Box], torch.Tensor] | ImageParts
Shape = tuple[int, int, int, int]


def batch_shape(images: Images, expected: Shape) -> Shape:
    """Return the shape of a batch; of one that is read by boxes its ``samples``, else what is expected.

    Raises:
        RequestError: a tensor of it is not (B, C, H, W), or it is in none of the forms of ``Images``.
    """
    if not isinstance(images, (torch.Tensor, ImageParts)) and not callable(images):
        raise RequestError(
            f"images are a {_type_name(images)}; give a tensor ({expected[0]}, {expected[1]}, H, W), "
            "or a function Box -> tensor that returns any box of them"
        )
    if not isinstance(images, torch.Tensor):
        return getattr(images, "samples", expected[0]), *expected[1:]
    if images.dim() != 4:
        raise RequestError(f"images have shape {tuple(images.shape)}; give the whole batch as (B, C, H, W)")
    batch, channels, height, width = images.shape
    return batch, channels, height, width


def read_part(images: Images, part: InputPart) -> torch.Tensor:
    """Return ``(samples, C, h, w)`` of a batch, whatever form it is given in.

    Raises:
        RequestError: what was returned is no tensor of the shape asked for.
    """
    box = part.box
    if isinstance(images, torch.Tensor):
        last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
        order = torch.channels_last if last else torch.contiguous_format
        cut = images[part.first : part.stop, :, box.y0 : box.y1, box.x0 : box.x1]
        return cut.contiguous(memory_format=order)
    if isinstance(images, ImageParts):
        local, name = images.read(box, part.first, part.stop), f"images.read({box}, {part.first}, {part.stop})"
    else:
        local, name = images(box)[part.first : part.stop], f"images({box})"
    if not isinstance(local, torch.Tensor):
        raise RequestError(f"{name} returned a {_type_name(local)}; return a tensor (B, C, h, w)")
    if local.shape[-2:] != box.shape or local.shape[0] != part.stop - part.first:
        raise RequestError(
            f"{name} returned {tuple(local.shape)}; {part.stop - part.first} samples of {box.shape} were asked for"
        )
    return local


def _type_name(given: object) -> str:
    """Return ``list``, ``numpy.ndarray``: what a user calls it."""
    kind = type(given)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
