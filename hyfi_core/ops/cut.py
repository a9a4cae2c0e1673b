"""Cuts: a smaller or a padded box of a map that a rank already holds; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hyfi_core.plan.box import Box


def at(tensor: torch.Tensor, box: Box, origin: Box) -> torch.Tensor:
    """Return the pixels of ``box`` in a tensor whose first pixel is that of ``origin``; a view."""
    y, x = box.relative_to(origin).slices()
    return tensor[:, :, y, x]


def cut(held: Box, need: Box, whole: Box, dims: tuple[int, int], fill: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that takes what a rank holds to what it needs.

    It gives a view where the need lies within the map, and a padded copy where it hangs over the map's border.

    Args:
        held: box of the tensor.
        need: box wanted; within the map it must lie in ``held``.
        whole: the map.
        dims: which tensor dims are (y, x).
        fill: value outside the map.
    """
    inside = need.intersect(whole)
    if inside.empty:
        inside = Box(held.y0, held.y0, held.x0, held.x0)
        above = below = left = right = 0
    else:
        above, below = inside.y0 - need.y0, need.y1 - inside.y1
        left, right = inside.x0 - need.x0, need.x1 - inside.x1
    local = inside.relative_to(held)

    def call(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.narrow(dims[0], local.y0, local.height).narrow(dims[1], local.x0, local.width)
        if need.empty and tuple(result.shape[dim] for dim in dims) != need.shape:
            sides = list(result.shape)
            sides[dims[0]], sides[dims[1]] = need.shape
            return result.reshape(sides)  # nothing, of the shape that others of its layout have
        if not (above or below or left or right):
            return result
        around = {dims[0]: (above, below), dims[1]: (left, right)}
        widths = [width for dim in range(tensor.dim() - 1, min(dims) - 1, -1) for width in around.get(dim, (0, 0))]
        return F.pad(result, widths, value=fill)

    return call
