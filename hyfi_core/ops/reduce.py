"""Reductions over the ranks of a stage.

The cotangent of a *replicated* value is the sum over ranks. So the all-reduce of partial sums is its own adjoint, and
weight gradients are plain sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hyfi_core.comm.base import Communicator, Tensors
from hyfi_core.comm.waits import Waits
from hyfi_core.ops.base import Cotangents, NeedsGrad
from hyfi_core.plan.box import Box

_NOWHERE = torch.iinfo(torch.int64).max


def least(dtype: torch.dtype) -> float:
    """Return the smallest value of a dtype, the maximum of an empty set."""
    if dtype.is_floating_point:
        return -torch.inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


@dataclass(frozen=True)
class SumOverRanks:
    """Sums the partial sums of ranks into one replicated sum."""

    own_cotangents: ClassVar[bool] = True

    def forward(self, comm: Communicator, inputs: Tensors) -> Waits[tuple[Tensors, Any]]:
        """Return (sum,)."""
        # The reduction writes in place, and other operators may read the input.
        total = inputs[0].clone(memory_format=torch.contiguous_format)
        yield comm.start_all_reduce(_real(total))
        return (total,), total

    def backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> Waits[Cotangents]:
        """Return (sum of all ranks' cotangents,)."""
        (cotangent,) = cotangents
        total = torch.zeros_like(saved) if cotangent is None else cotangent.to(saved.dtype).contiguous().clone()
        yield comm.start_all_reduce(_real(total))
        return (total,)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as real numbers, in which complex ones are summed."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


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

    def forward(self, comm: Communicator, inputs: Tensors) -> Waits[tuple[Tensors, Any]]:
        """Return (maximum,); the map and the maximum are saved."""
        (own,) = inputs
        if own.numel():
            top = own.amax(self.dims, keepdim=True)
        else:
            shape = [1 if dim in self.dims else side for dim, side in enumerate(own.shape)]
            # A rank without pixels takes part with the smallest value.
            top = own.new_full(shape, least(own.dtype))
        top = top.contiguous()
        yield comm.start_all_reduce(top, "max")
        return (top if self.keepdim else self._squeeze(top),), (own, top)

    def backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> Waits[Cotangents]:
        """Return (cotangent of the map,): one all-reduce of cotangents and of the number of ties."""
        own, top = saved
        (cotangent,) = cotangents
        # NaN equals nothing, not even itself, hence the second test.
        hits = own == top
        if self.nan_ties:
            hits |= own.isnan() & top.isnan()
        # In float32 for 16-bit maps: float16 cannot count more than 2,048 ties.
        packed = top.new_zeros((2, *top.shape), dtype=torch.promote_types(top.dtype, torch.float32))
        packed[1] = hits.sum(self.dims, keepdim=True)
        if cotangent is not None:
            packed[0] = cotangent.reshape(top.shape)
        yield comm.start_all_reduce(packed)
        return (hits * (packed[0] / packed[1]).to(own.dtype),)

    def _squeeze(self, top: torch.Tensor) -> torch.Tensor:
        return top.squeeze(self.dims)


@dataclass(frozen=True)
class LargestOverRanks:
    """Maximum over ranks; used as a shift that does not change results, so it has no gradient."""

    def forward(self, comm: Communicator, inputs: Tensors) -> Waits[tuple[Tensors, Any]]:
        """Return (maximum, or 0 where all are -inf,)."""
        top = inputs[0].clone(memory_format=torch.contiguous_format)
        yield comm.start_all_reduce(top, "max")
        # A shift of -inf would turn exp(x - shift) into exp(-inf + inf), which is NaN.
        return (top.masked_fill_(top == -torch.inf, 0.0),), None

    def backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> Waits[Cotangents]:
        """Return (None,)."""
        yield from ()
        return (None,)


@dataclass(frozen=True)
class FirstMaximum:
    """Maximum over dims 2 and 3 of ``(B, C, H, W)``, as ``adaptive_max_pool2d`` to 1 × 1.

    Attributes:
        box: this rank's part of the map; may be empty.
        width: width of the whole map, for positions in row-major order.
        last_nan: which of several NaN counts: the last, as in that pool, or the first, as in ``torch.max``.
    """

    own_cotangents: ClassVar[bool] = True

    box: Box
    width: int
    last_nan: bool = True

    def forward(self, comm: Communicator, inputs: Tensors) -> Waits[tuple[Tensors, Any]]:
        """Return (maximum ``(B, C, 1, 1)``, its position in the flattened map): two small all-reduces."""
        (own,) = inputs
        batch, channels = own.shape[:2]
        flat = own.reshape(batch, channels, -1)
        where = torch.full((batch, channels), _NOWHERE, dtype=torch.int64, device=own.device)
        own_top = own.new_full((batch, channels), -torch.inf)
        local = torch.zeros_like(where)
        if flat.numel():
            own_top, local = flat.max(2)  # of equal values PyTorch takes the first
            if self.last_nan:
                # Of several NaN the last counts: the largest index among them.
                last = (flat.isnan() * torch.arange(flat.shape[2], device=own.device)).amax(2)
                local = torch.where(own_top.isnan(), last, local)
        top = own_top.clone()
        yield comm.start_all_reduce(top, "max")
        if flat.numel():
            # From positions in this part to positions in the whole map.
            position = (self.box.y0 + local // self.box.width) * self.width + self.box.x0 + local % self.box.width
            if self.last_nan:
                # Negated, so that the minimum below is the last position.
                position = torch.where(own_top.isnan(), -position, position)
            where = torch.where((own_top == top) | (own_top.isnan() & top.isnan()), position, where)
        own_where = where.clone()
        # Of ranks with equal maxima, the one with the first position gets the gradient, as in one process.
        yield comm.start_all_reduce(where, "min")
        is_here = (own_where == where) & (where != _NOWHERE)
        position_in_map = where.abs()  # some were negated
        return (top[:, :, None, None], position_in_map[:, :, None, None]), (own.shape, top, local, is_here)

    def backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> Waits[Cotangents]:
        """Return (cotangent of the map,): zero except at the first maximum."""
        shape, top, local, is_here = saved  # ``local``: the maximum's index in this rank's part, if it ``is_here``
        cotangent = cotangents[0]
        # The output is replicated, so each rank has a share of its cotangent.
        total = torch.zeros_like(top) if cotangent is None else cotangent.reshape(top.shape).clone()
        yield comm.start_all_reduce(total)
        result = top.new_zeros((shape[0], shape[1], shape[2] * shape[3]))
        if result.numel():
            result.scatter_(2, local[:, :, None], torch.where(is_here, total, 0.0)[:, :, None])
        return (result.view(shape),)
