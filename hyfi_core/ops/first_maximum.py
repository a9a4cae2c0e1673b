"""Global max pooling, whose gradient goes to the first maximal pixel in the order of the whole map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.ops.base import Cotangents, Tensors, Wanted
from hyfi_core.plan.box import Box

_NOWHERE = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class FirstMaximum:
    """Maximum over dims 2 and 3 of ``(B, C, H, W)``, as ``adaptive_max_pool2d`` to 1 × 1.

    Attributes:
        box: this rank's part of the map; may be empty.
        width: of the whole map, for positions in row-major order.
    """

    own_cotangents: ClassVar[bool] = True

    box: Box
    width: int

    def forward(self, comm: Communicator, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (maximum ``(B, C, 1, 1)``, its position in the flattened map): two small all-reduces."""
        (own,) = inputs
        batch, channels = own.shape[:2]
        flat = own.reshape(batch, channels, -1)
        where = torch.full((batch, channels), _NOWHERE, dtype=torch.int64, device=own.device)
        mine = own.new_full((batch, channels), -torch.inf)
        local = torch.zeros_like(where)
        if flat.numel():
            mine, local = flat.max(2)  # of equal values PyTorch takes the first, of several NaN the last
            last_nan = (flat.isnan() * torch.arange(flat.shape[2], device=own.device)).amax(2)
            local = torch.where(mine.isnan(), last_nan, local)
        top = mine.clone()
        comm.all_reduce(top, "max")
        if flat.numel():
            place = (self.box.y0 + local // self.box.width) * self.width + self.box.x0 + local % self.box.width
            place = torch.where(mine.isnan(), -place, place)  # so that the minimum is the last
            where = torch.where((mine == top) | (mine.isnan() & top.isnan()), place, where)
        mine_at = where.clone()
        comm.all_reduce(where, "min")
        hits = (mine_at == where) & (where != _NOWHERE)
        return (top[:, :, None, None], where.abs()[:, :, None, None]), (own.shape, top, local, hits)

    def backward(self, comm: Communicator, saved: Any, cotangents: Cotangents, wanted: Wanted = ()) -> Cotangents:
        """Return (cotangent of the map,): zero except at the first maximum."""
        shape, top, local, hits = saved
        cotangent = cotangents[0]
        total = torch.zeros_like(top) if cotangent is None else cotangent.reshape(top.shape).clone()
        comm.all_reduce(total)
        result = top.new_zeros((shape[0], shape[1], shape[2] * shape[3]))
        if result.numel():
            result.scatter_(2, local[:, :, None], torch.where(hits, total, 0.0)[:, :, None])
        return (result.view(shape),)
