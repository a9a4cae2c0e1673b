"""Strides of dims of size 1, which may be any number, and a batch norm whose gradient is right whatever they are.

``native_batch_norm_backward`` of torch 2.13 on a CPU takes one memory format for another where such strides are
not those of a new tensor, and then its sums and gradients are wrong: for a batch of one image, after
``x.flatten(2).transpose(1, 2)``, as tokens have it, or for maps of one row or column.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def with_usual_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view whose dims of size 1 have the strides that a new tensor of its memory format has.

    A tensor without such dims, or one that is in no memory format, is returned as it is. Not for autograd, which would
    differentiate the view by copies of the map: see ``_WithUsualStrides``.
    """
    if 1 not in tensor.shape:
        return tensor
    for memory_format in (torch.contiguous_format, _FORMATS.get(tensor.dim(), torch.contiguous_format)):
        if tensor.is_contiguous(memory_format=memory_format):
            strides = _strides(tensor.shape, memory_format)
            return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)
    return tensor


@lru_cache(maxsize=1024)
def _strides(shape: torch.Size, memory_format: torch.memory_format) -> tuple[int, ...]:
    """Return the strides of a new tensor."""
    return torch.empty(shape, device="meta", memory_format=memory_format).stride()


class _WithUsualStrides(torch.autograd.Function):
    """``with_usual_strides``, with a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view."""
        # Detached: autograd makes another view of an input that is returned, which may have other strides again.
        return with_usual_strides(tensor.detach())

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Return the cotangent: the values are the same."""
        return cotangents[0]


def batch_norm_for_all_strides(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Return PyTorch's batch norm, in any of its forms, with the right gradient whatever the strides of its map.

    The result is returned as by ``norm``: alone, or first of several.
    """

    @wraps(norm)
    def call(x: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
        """Return what the norm returns for a map of usual strides; its cotangent gets these, too."""
        # A trace for ``torch.compile`` has the norm itself: compiled code is arithmetic, right for all strides. Of the
        # view it would record a detached map, through which no gradient flows.
        if 1 not in x.shape or isinstance(x, FakeTensor):
            return norm(x, *arguments, **settings)
        if with_usual_strides(x) is not x:
            x = _WithUsualStrides.apply(x)  # type: ignore[no-untyped-call]
        returned = norm(x, *arguments, **settings)
        result = returned if isinstance(returned, torch.Tensor) else returned[0]
        if result.requires_grad:
            result.register_hook(with_usual_strides)
        return returned

    return call


def instance_norm(x: torch.Tensor, *arguments: Any, **settings: Any) -> torch.Tensor:
    """Return ``aten.instance_norm``, with the right gradient whatever the strides of its map.

    PyTorch computes it as the batch norm of one image, and chooses strides of its own when it makes that image of a
    cotangent that is not contiguous.
    """
    result: torch.Tensor = torch.ops.aten.instance_norm.default(x.contiguous(), *arguments, **settings)
    if result.requires_grad:
        result.register_hook(lambda cotangent: with_usual_strides(cotangent.contiguous()))
    return result
