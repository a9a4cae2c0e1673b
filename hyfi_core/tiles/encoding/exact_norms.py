"""Batch norms of an encoder with statistics over all tiles of a slide, on all ranks that share it.

Each rank encodes its tiles of the slide in one call, and each norm waits for the sums of all ranks, forward and
backward; `hyfi_core.ops.norms.batch_norm` has the arithmetic. Ranks without tiles of the slide take part with none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.waits import waited
from hyfi_core.errors import RequestError
from hyfi_core.ops.norms.batch_norm import BatchNorm


@contextmanager
def exact_norms(encoder: nn.Module, comm: Communicator, tiles: int, own: int) -> Iterator[None]:
    """Context in which batch norms in training mode normalise over all tiles of a slide (collective).

    Args:
        encoder: the context replaces the ``forward`` of its norms.
        comm: the ranks that share the slide.
        tiles: number of tiles of the slide.
        own: number of them on this rank.
    """
    norms = [(n, m) for n, m in encoder.named_modules() if isinstance(m, _BatchNorm) and m.training]
    for name, module in norms:
        # An attribute of the instance hides the class's forward until it is deleted.
        module.forward = _Normalised(name, module, comm, tiles, own)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for _, module in norms:
            del module.forward


class _Normalised:
    """The forward of a batch norm over all tiles of a slide."""

    def __init__(self, name: str, module: _BatchNorm, comm: Communicator, tiles: int, own: int) -> None:
        if type(module).forward is not _BatchNorm.forward:
            raise RequestError(
                f"batch_norm is 'exact', but {name!r} of the encoder is a {type(module).__name__} with a forward of "
                f"its own; use nn.BatchNorm2d, or batch_norm='frozen'"
            )
        self._name, self._module, self._comm, self._tiles, self._own = name, module, comm, tiles, own

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` normalised over all tiles of the slide, and update the running statistics."""
        module, pixels = self._module, prod(x.shape[2:])
        if len(x) != self._own:
            raise RequestError(
                f"batch_norm is 'exact', but {self._name!r} of the encoder normalises {len(x)} samples of "
                f"{self._own} tiles; use batch_norm='frozen'"
            )
        count = self._tiles * pixels
        if count == 1:
            raise RequestError(
                f"batch_norm is 'exact', but {self._name!r} of the encoder has one value for each channel in a slide "
                f"of one tile, which has no variance; use batch_norm='frozen', or leave the slide out"
            )
        y: torch.Tensor
        y, mean, variance = _over_tiles(BatchNorm(count, module.eps), self._comm, x, module.weight, module.bias)
        if module.running_mean is not None and module.running_var is not None:
            # Like PyTorch, running statistics take the unbiased variance.
            self._fold(mean, variance * (count / (count - 1)))
        return y

    @torch.no_grad()
    def _fold(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Fold statistics of a slide into the running ones, as PyTorch does after a batch."""
        module = self._module
        assert module.running_mean is not None and module.running_var is not None
        share = module.momentum
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            # Without momentum, PyTorch keeps a cumulative average.
            share = 1.0 / float(module.num_batches_tracked) if share is None else share
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), share or 0.0)
        module.running_var.lerp_(variance.to(module.running_var.dtype), share or 0.0)


class _OverTiles(torch.autograd.Function):
    """``ops.norms.batch_norm.BatchNorm`` for autograd; ranks have equal graphs, and so the same order of messages."""

    @staticmethod
    def forward(ctx: Any, norm: BatchNorm, comm: Communicator, x: torch.Tensor, weight: Any, bias: Any) -> Any:
        # `waited` blocks until the messages have arrived: autograd needs the result at once.
        outputs, ctx.of_forward = waited(norm.forward(comm, (x, weight, bias)))
        ctx.norm, ctx.comm, ctx.affine = norm, comm, (weight is not None, bias is not None)
        # Mean and variance are for running statistics only.
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        dx, weight, bias = waited(ctx.norm.backward(ctx.comm, ctx.of_forward, cotangents))
        ctx.of_forward = None
        return None, None, dx, weight if ctx.affine[0] else None, bias if ctx.affine[1] else None


def _over_tiles(norm: BatchNorm, comm: Communicator, *inputs: Any) -> Any:
    return _OverTiles.apply(norm, comm, *inputs)  # type: ignore[no-untyped-call]
