"""Gradients: every rank has a share of each, and all of them go through one reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hyfi_core.comm.base import Communicator


def set_aside(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
    """Return the gradients accumulated so far and leave none, so that only the new ones are reduced."""
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return kept


def reduce_shares(parameters: Sequence[torch.Tensor], comm: Communicator, scale: float) -> None:
    """Replace every gradient by ``scale`` times its sum over ranks: one all-reduce for each type.

    A parameter of which this rank has no share gives zeros; all ranks pass the same parameters in the same order.
    """
    for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
        group = [parameter for parameter in parameters if parameter.dtype == dtype]
        shares = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
        flat = torch.cat([share.reshape(-1) for share in shares])
        comm.all_reduce(flat)
        if scale != 1.0:
            flat *= scale
        for parameter, piece in zip(group, flat.split([p.numel() for p in group]), strict=True):
            parameter.grad = piece.view(parameter.shape).clone(memory_format=torch.preserve_format)


def add_back(parameters: Sequence[nn.Parameter], kept: Sequence[torch.Tensor | None]) -> None:
    """Add what was set aside to the new gradients."""
    for parameter, old in zip(parameters, kept, strict=True):
        if old is not None:
            parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)
