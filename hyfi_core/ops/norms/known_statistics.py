"""Batch norm by statistics of its map that are known from a first run, for a second one."""

from __future__ import annotations

from typing import Any

import torch

from hyfi_core.ops.norms.strides import with_usual_strides


class KnownStatistics(torch.autograd.Function):
    """Batch normalisation in training mode of a whole map, by mean and 1/σ that were computed from it before.

    Autograd differentiates it as ``torch.batch_norm`` in training mode: mean and 1/σ depend on the map. The result has
    the same bits as that of the first run if that was the native kernel of a dense map.
    """

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
    ) -> torch.Tensor:
        """Return the normalised map."""
        ctx.save_for_backward(own, weight, mean, inverse)
        if own.is_cuda:
            # As the native kernel does after computing statistics; epsilon is not read, since 1/σ is passed.
            return torch.batch_norm_elemt(own, weight, bias, mean, inverse, 0.0)
        if own.element_size() <= 2:
            # As the native kernel for such maps, which computes in float32 and rounds once, at the end.
            weight, bias = (None if item is None else item.float() for item in (weight, bias))
            mean, inverse = mean.float(), inverse.float()
        # In training and in evaluation mode, the native kernel computes x · (w · 1/σ) + (b - m · (w · 1/σ)). For the
        # bits of the first run, it gets w · 1/σ as the weight and 1 as the deviation.
        scale = inverse if weight is None else weight * inverse
        statistics = mean, torch.ones_like(mean)
        result: torch.Tensor = torch.native_batch_norm(own, scale, bias, *statistics, False, 0.0, 0.0)[0]
        return result

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Return the cotangents of map, weight and bias."""
        saved_map, weight, mean, inverse = ctx.saved_tensors
        own, dy = with_usual_strides(saved_map), with_usual_strides(cotangents[0])
        needed = list(ctx.needs_input_grad[:3])
        # CUDA's kernel returns no sum for a bias without a weight.
        scale = torch.ones_like(mean) if weight is None and needed[2] else weight
        statistics = None, None, mean, inverse  # in training mode it reads no running statistics
        results = torch.ops.aten.native_batch_norm_backward(dy, own, scale, *statistics, True, 0.0, needed)
        gradients = (result if is_needed else None for result, is_needed in zip(results, needed, strict=True))
        return *gradients, None, None  # mean and 1/σ follow from the map
