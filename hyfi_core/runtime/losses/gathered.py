"""Tensors of several ranks, of any dtype, bit for bit the same on all ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hyfi_core.comm.base import Communicator


def gather_tensors(
    comm: Communicator,
    like: Sequence[torch.Tensor],
    own: Mapping[int, torch.Tensor],
    device: torch.device,
) -> list[torch.Tensor]:
    """Return tensors that have one owner each (collective over ``comm``).

    They are sent as one sum of bytes: those of the others are zero, so that nothing is rounded.

    Args:
        comm: all ranks that need them.
        like: tensors of the same shapes and dtypes, without values (on the meta device), the same on all ranks.
        own: number -> tensor, of those that this rank owns.
        device: of the message and of the result.

    Returns:
        New tensors, in the order of ``like``.
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in like]
    flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    parts = flat.split(sizes)
    for number, tensor in own.items():
        parts[number].copy_(tensor.detach().to(device).contiguous().flatten().view(torch.uint8))
    comm.all_reduce(flat)
    return [
        # A copy, because the memory of a dtype must begin at a multiple of its size.
        part.clone().view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]
