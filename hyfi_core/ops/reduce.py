"""Reductions over the ranks of a stage.

The cotangent of a *replicated* value is the sum over ranks. So the all-reduce of partial sums is its own adjoint, and
weight gradients are plain sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.ops.base import Cotangents, Tensors, Wanted


def least(dtype: torch.dtype) -> float:
    """Return the smallest value of a dtype, the maximum of an empty set."""
    if dtype.is_floating_point:
        return -torch.inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


@dataclass(frozen=True)
class SumOverRanks:
    """Sums the partial sums of ranks into one replicated sum."""

    own_cotangents: ClassVar[bool] = True

    def forward(self, comm: Communicator, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (sum,)."""
        total = inputs[0].clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total)
        return (total,), total

    def backward(self, comm: Communicator, saved: Any, cotangents: Cotangents, wanted: Wanted = ()) -> Cotangents:
        """Return (sum of all ranks' cotangents,)."""
        (cotangent,) = cotangents
        total = torch.zeros_like(saved) if cotangent is None else cotangent.to(saved.dtype).contiguous().clone()
        comm.all_reduce(total)
        return (total,)


@dataclass(frozen=True)
class MaxOverSpace:
    """The maximum over the whole map: ``amax`` over space and ranks.

    Tied pixels share the cotangent equally over all ranks, as in ``torch.amax``.

    Attributes:
        dims: the tensor dims of space.
        keepdim: whether they are kept with size 1.
        nan_ties: whether NaN pixels tie with a NaN maximum, as in a maximum norm; in ``torch.amax`` the gradient of
            every pixel is then NaN.
    """

    own_cotangents: ClassVar[bool] = True

    dims: tuple[int, ...]
    keepdim: bool
    nan_ties: bool = False

    def forward(self, comm: Communicator, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (maximum,); the map and the maximum are saved."""
        (own,) = inputs
        if own.numel():
            top = own.amax(self.dims, keepdim=True)
        else:
            shape = [1 if dim in self.dims else side for dim, side in enumerate(own.shape)]
            top = own.new_full(shape, least(own.dtype))
        top = top.contiguous()
        comm.all_reduce(top, "max")
        return (top if self.keepdim else self._squeeze(top),), (own, top)

    def backward(self, comm: Communicator, saved: Any, cotangents: Cotangents, wanted: Wanted = ()) -> Cotangents:
        """Return (cotangent of the map,): one all-reduce of cotangents and of the number of ties."""
        own, top = saved
        (cotangent,) = cotangents
        hits = own == top
        if self.nan_ties:
            hits |= own.isnan() & top.isnan()
        packed = top.new_zeros((2, *top.shape), dtype=torch.promote_types(top.dtype, torch.float32))
        packed[1] = hits.sum(self.dims, keepdim=True)
        if cotangent is not None:
            packed[0] = cotangent.reshape(top.shape)
        comm.all_reduce(packed)
        return (hits * (packed[0] / packed[1]).to(own.dtype),)

    def _squeeze(self, top: torch.Tensor) -> torch.Tensor:
        return top.squeeze(self.dims)


@dataclass(frozen=True)
class LargestOverRanks:
    """Maximum over ranks; used as a shift that does not change results, so it has no gradient."""

    def forward(self, comm: Communicator, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (maximum, or 0 where all are -inf,)."""
        top = inputs[0].clone(memory_format=torch.contiguous_format)
        comm.all_reduce(top, "max")
        return (top.masked_fill_(top == -torch.inf, 0.0),), None

    def backward(self, comm: Communicator, saved: Any, cotangents: Cotangents, wanted: Wanted = ()) -> Cotangents:
        """Return (None,)."""
        return (None,)
