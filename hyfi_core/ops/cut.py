"""Cuts: a smaller or padded box of a map that a rank already has; nothing is sent. And copies of such boxes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hyfi_core.plan.box import Box

_WORDS = (torch.complex128, torch.int64, torch.int32)
"""Dtypes of 16, 8 and 4 bytes."""


def at(tensor: torch.Tensor, box: Box, origin: Box) -> torch.Tensor:
    """Return the pixels of ``box`` in a tensor whose first pixel is that of ``origin``; a view."""
    y, x = box.relative_to(origin).slices()
    return tensor[:, :, y, x]


def cut(
    have: Box, need: Box, map_box: Box, dims: tuple[int, int], fill: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from the box that a rank has to the box that it needs.

    It returns a view if the needed box is within the map, and a padded copy otherwise.

    Args:
        have: box of the tensor.
        need: box to return; within the map it must be inside ``have``.
        map_box: the map.
        dims: which tensor dims are (y, x).
        fill: value outside the map.
    """
    inside = need.intersect(map_box)
    # Outside of the map: an empty view of the tensor, and all needed pixels are padding around it.
    if inside.empty:
        inside = Box(have.y0, have.y0, have.x0, have.x0)
        above, below, left, right = (0, 0, 0, 0) if need.empty else (need.height, 0, need.width, 0)  # all padding
    else:
        above, below = inside.y0 - need.y0, need.y1 - inside.y1
        left, right = inside.x0 - need.x0, need.x1 - inside.x1
    local = inside.relative_to(have)

    def call(tensor: torch.Tensor) -> torch.Tensor:
        """Return the needed box of a tensor whose box is ``have``."""
        result = tensor.narrow(dims[0], local.y0, local.height).narrow(dims[1], local.x0, local.width)
        if need.empty and tuple(result.shape[dim] for dim in dims) != need.shape:
            sides = list(result.shape)
            sides[dims[0]], sides[dims[1]] = need.shape
            return result.reshape(sides)  # empty, with the right sizes of other dims
        if not (above or below or left or right):
            return result
        around = {dims[0]: (above, below), dims[1]: (left, right)}
        # F.pad takes pairs from the last dim to the first.
        widths = [width for dim in range(tensor.dim() - 1, min(dims) - 1, -1) for width in around.get(dim, (0, 0))]
        return F.pad(result, widths, value=fill)

    return call


def copy_box(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy a box of a map into one of another, as ``target.copy_(source)`` does; return the target.

    CUDA's kernel copies a box with gaps between its rows element by element: in bfloat16, two bytes at a time. Here the
    elements are words of up to 16 bytes, where sizes and addresses allow.
    """
    differentiated = torch.is_grad_enabled() and (source.requires_grad or target.requires_grad)
    words = in_words(target, source) if target.is_cuda and not differentiated else None
    if words is None:
        return target.copy_(source)
    words[0].copy_(words[1])
    return target


def in_words(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return views of two maps as rows of the largest words that fit, so that a copy moves fewer elements.

    A word is 16, 8 or 4 bytes, several elements of a map. None if no word fits, if the tensors differ in shape, dtype
    or device, are no maps of four dims, have no elements or are conjugated or negated lazily, or if both have no gaps
    and the same strides: ``copy_`` copies such memory at once.
    """
    are_alike = target.shape == source.shape and target.dtype == source.dtype and target.device == source.device
    # Views that PyTorch conjugates or negates only when they are read have other bits in memory.
    is_lazy = any(tensor.is_conj() or tensor.is_neg() for tensor in (target, source))
    if not are_alike or is_lazy or target.dim() != 4 or not target.numel():
        return None
    # Both without gaps: one copy of memory.
    if target.stride() == source.stride() and (
        target.is_contiguous() or target.is_contiguous(memory_format=torch.channels_last)
    ):
        return None
    target_rows, source_rows = _rows(target), _rows(source)
    if target_rows is None or source_rows is None or target_rows.shape != source_rows.shape:
        return None
    for word in _WORDS:
        is_larger = word.itemsize > target.element_size()
        if is_larger and _consists_of(word, target_rows) and _consists_of(word, source_rows):
            return target_rows.view(word), source_rows.view(word)
    return None


def _rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a map as a view with dense rows of values in the last dim; None if it has none."""
    if tensor.stride(3) == 1:
        return tensor
    # In channels-last, a row has the channels of its pixels one after the other; of a box, rows may have gaps.
    if tensor.stride(1) != 1 or (tensor.stride(3) != tensor.shape[1] and tensor.shape[3] > 1):
        return None
    count, channels, height, width = tensor.shape
    steps = (tensor.stride(0), tensor.stride(2), 1)
    return tensor.as_strided((count, height, width * channels), steps, tensor.storage_offset())


def _consists_of(word: torch.dtype, rows: torch.Tensor) -> bool:
    """Whether the rows are words, each at a multiple of its size."""
    places = (rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1])
    each = word.itemsize // rows.element_size()
    return rows.data_ptr() % word.itemsize == 0 and all(place % each == 0 for place in places)
