"""Order of a tensor's elements in a message: its own, so that maps in channels-last are not rearranged on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def laid_out(tensor: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Return a contiguous tensor with the elements in the order of the message; a view where possible.

    Args:
        tensor: what is sent.
        channels_last: whether four-dimensional tensors are sent in this order.
    """
    return (tensor.permute(0, 2, 3, 1) if channels_last and tensor.dim() == 4 else tensor).contiguous()


def as_sent(flat: torch.Tensor, shape: Sequence[int], channels_last: bool) -> torch.Tensor:
    """Return the tensor of this shape whose elements are those of a message; a view.

    Args:
        flat: the elements, of one dim.
        shape: of the tensor.
        channels_last: as at the sender.
    """
    if channels_last and len(shape) == 4:
        count, channels, height, width = shape
        return flat.view(count, height, width, channels).permute(0, 3, 1, 2)
    return flat.view(tuple(shape))
