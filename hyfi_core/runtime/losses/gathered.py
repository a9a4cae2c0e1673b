"""Tensors of several ranks, of any dtype, bit for bit the same on all ranks of a group."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch

from hyfi_core.comm.base import Communicator

Key = TypeVar("Key", bound=Hashable)


def gather_tensors(
    comm: Communicator,
    like: Mapping[Key, torch.Tensor],
    own: Mapping[Key, torch.Tensor],
    device: torch.device,
) -> dict[Key, torch.Tensor]:
    """Return the tensors of all ranks on every rank; each tensor has one owner (collective over ``comm``).

    One all-reduce sums their bytes: each byte is zero on all ranks except its owner, so that nothing is rounded.

    Args:
        comm: all ranks that need them.
        like: key -> tensor of the same shape and dtype, without values (on the meta device), in an order that is the
            same on all ranks.
        own: key -> tensor, of those that this rank owns.
        device: device of the message and of the result.

    Returns:
        Key -> new tensor, of all keys of ``like``.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in like.values()]
    flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    parts = dict(zip(like, flat.split(sizes), strict=True))
    for key, tensor in own.items():
        flat_tensor = tensor.detach().to(device).contiguous().flatten()
        # A tensor of one number counts as contiguous with any stride, but only stride 1 can be viewed as bytes.
        parts[key].copy_(flat_tensor.as_strided(flat_tensor.shape, (1,)).view(torch.uint8))
    comm.all_reduce(flat)
    # Copies, because the memory of a dtype must begin at a multiple of its size.
    return {key: parts[key].clone().view(tensor.dtype).view(tensor.shape) for key, tensor in like.items()}
