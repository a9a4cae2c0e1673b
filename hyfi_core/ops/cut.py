"""Cuts: a smaller or padded box of a map that a rank already has; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hyfi_core.plan.box import Box


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
    # Nothing of the map: an empty view, at a place that exists in the tensor, with all that is needed around it.
    if inside.empty:
        inside = Box(have.y0, have.y0, have.x0, have.x0)
        above, below, left, right = (0, 0, 0, 0) if need.empty else (need.height, 0, need.width, 0)
    else:
        above, below = inside.y0 - need.y0, need.y1 - inside.y1
        left, right = inside.x0 - need.x0, need.x1 - inside.x1
    local = inside.relative_to(have)

    def call(tensor: torch.Tensor) -> torch.Tensor:
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
