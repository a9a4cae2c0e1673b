"""Batch normalisation in training mode, with statistics over all ranks.

Inside a fused run neighbours compute some pixels twice. Each rank r holds a *computed* box, its own part and a margin
that others own. Let x_r(p) be its copy of pixel p, o(p) the owner of p, N the pixels of the map times images. Forward,
every pixel counts once:

    m = 1/N Σ_p x_o(p)(p)        v = 1/N Σ_p (x_o(p)(p) - m)²        y_r(p) = w · x̂_r(p) + b,  x̂ = (x - m) / σ

Backward, the copies are different variables, and the loss depends on each of them by its own y. With g_r(p) the
cotangent of y_r(p), and m and v functions of the owners' copies alone:

    dL/dm = -w/σ · Σ_r Σ_p g_r(p)            dL/dv = -w/(2σ²) · Σ_r Σ_p g_r(p) · x̂_r(p)      all computed copies
    dL/dx_r(p) = w/σ · g_r(p)                                                                every copy
               + [r owns p] · (1/N dL/dm + 2 (x_r(p) - m)/N dL/dv)
               = w/σ · ( g_r(p) - [r owns p] · (1/N ΣΣ g + x̂_r(p) · 1/N ΣΣ g·x̂) )

and dL/dw = ΣΣ g·x̂, dL/db = ΣΣ g over all copies. Sums over owned pixels alone would omit the dependence of the
margins' y on m and v. The margins' dL/dx flow back to their owners through the fused run and the adjoint of its wide
exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

import torch

from hyfi_core.comm.base import Communicator, Pending, Tensors
from hyfi_core.comm.combined import Combination, start_combined
from hyfi_core.comm.waits import Waits
from hyfi_core.ops.base import AsyncBackward, Cotangents, NeedsGrad, Recomputable, Rest, is_expanded
from hyfi_core.ops.norms.moments import Moments, moments_of, packed_rows, packed_totals
from hyfi_core.ops.norms.strides import with_usual_strides
from hyfi_core.plan.box import Box

MOST_ROWS = 64
"""Largest number of ranks for which each sends its statistics in a separate row."""
_BLOCK_VALUES = 1 << 16  # a block and its copies fit in the cache of a core
_MOST_PIXELS = 1 << 30  # in one number of 32 bits
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_DEVICE_BLOCK_VALUES = 1 << 25  # 128 MiB: enough to keep a GPU busy


@dataclass(frozen=True)
class BatchNorm(AsyncBackward, Recomputable):
    """Batch normalisation in training mode, over all pixels of the map, each counted once.

    One all-reduce of sums forward and one backward, both in float64. Each rank sends its mean and its variance around
    *its* mean (Chan et al., 1983): sums of squares around zero would suffer cancellation if the mean is large.

    Inputs: map, weight or None, bias or None.
    Outputs: normalised map, mean and biased variance of the whole map (for running statistics).

    Attributes:
        count: pixels of the whole map times images.
        eps: added to the variance.
        overwrites_cotangent: whether the output's cotangent may be overwritten.
    """

    own_cotangents: ClassVar[bool] = True

    count: int
    eps: float
    overwrites_cotangent: bool = field(default=False, kw_only=True)

    def forward(self, comm: Communicator, inputs: Tensors) -> Waits[tuple[Tensors, Any]]:
        """Return (normalised, mean, variance)."""
        own, weight, bias = with_usual_strides(inputs[0]), *inputs[1:]
        mean, variance, inverse = yield from self._statistics(comm, self._counted(own))
        normalised = self._normalised(own, weight, bias, mean, variance, inverse)
        return (normalised, mean, variance), (own, weight, mean, variance, inverse)

    def recompute(self, inputs: Tensors, saved: Any) -> torch.Tensor:
        """Recompute the normalised map from its known statistics."""
        own, weight, *statistics = saved
        return self._normalised(own, weight, inputs[2], *statistics)

    def _normalised(
        self,
        own: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        inverse: torch.Tensor,
    ) -> torch.Tensor:
        """Return the map, normalised by known statistics; ``inverse``: 1/σ = 1/sqrt(variance + eps)."""
        if not own.numel():
            return torch.empty_like(own)
        # The native kernel takes a 16-bit map with all other inputs in float32, or all inputs in one dtype.
        scale, offset = (None if item is None else item.to(mean.dtype) for item in (weight, bias))
        if own.is_cuda:
            # One kernel instead of three: evaluation mode copies the mean and computes 1/σ first.
            return torch.batch_norm_elemt(own, scale, offset, mean, inverse, self.eps)
        result: torch.Tensor = torch.native_batch_norm(own, scale, offset, mean, variance, False, 0.0, self.eps)[0]
        return result

    def _counted(self, tensor: torch.Tensor, top: int = 0) -> torch.Tensor:
        """Return the pixels of a block of rows that count in the statistics, here all; ``top``: its first row."""
        return tensor

    def _statistics(self, comm: Communicator, own: torch.Tensor) -> Waits[tuple[torch.Tensor, ...]]:
        """Return mean, biased variance and 1/σ over all ranks, in float32 for a 16-bit map: one message.

        Few ranks send their mean and variance in separate rows, which avoids cancellation for any mean. For many ranks
        this message would be too long: they sum Σ x and Σ x².
        """
        channels = own.shape[1]
        separate_rows = comm.size <= MOST_ROWS
        # As PyTorch's own norms: statistics of 16-bit maps stay in float32.
        dtype = torch.promote_types(own.dtype, torch.float32)
        shape = (comm.size if separate_rows else 1, 3, channels)  # 3: pixels and two moments

        def pack(moments: Mapping[int, Moments]) -> torch.Tensor:
            return packed_rows(moments, comm.size) if separate_rows else packed_totals(moments)

        def combine(rows: torch.Tensor) -> Tensors:
            mean, variance = (statistic.to(dtype) for statistic in self._of_all(rows, separate_rows))
            # One tensor, as a cell that spills has a copy of it.
            return (torch.stack((mean, variance, (variance + self.eps).rsqrt())),)

        combination = Combination(pack, combine, sent_bytes=prod(shape) * torch.float64.itemsize)
        combined = start_combined(comm, lambda: moments_of(own), combination, kept=True)
        yield combined.pending
        (statistics,) = combined.result()
        return statistics.unbind()

    def _of_all(self, rows: torch.Tensor, separate_rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and biased variance of all; ``rows``: (pixels, mean, variance) of each, or Σ 1, Σ x, Σ x²."""
        counts, means, variances = rows.unbind(1)
        if not separate_rows:
            mean = means[0] / self.count
            # Rounding can make the difference of two near numbers negative, and rsqrt of it NaN.
            return mean, (variances[0] / self.count - mean * mean).clamp_(min=0.0)
        first = means[0]  # means are averaged as differences from one of them
        mean = first + ((means - first) * counts).sum(0) / self.count
        # Chan's formula: variance within each rank, and that of the ranks' means around the mean of all.
        return mean, ((variances + (means - mean).square()) * counts).sum(0) / self.count

    def backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> Waits[Cotangents]:
        """Return the cotangents of map, weight and bias; the latter two as this rank's partial sums.

        With x̂ the normalised map: dx = w/σ · (dy - mean(dy) - x̂ · mean(dy · x̂)), which is gain · dy + slope · x + shift
        with numbers for each channel. It overwrites dy where allowed: allocating a map costs more than the arithmetic.
        """
        pending, finish = self.start_backward(comm, saved, cotangents, needs_grad)
        yield pending
        return finish()

    def start_backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> tuple[Pending, Rest]:
        """Start ``backward``: return the pending sums, and a function that computes the cotangents."""
        own, weight, mean, variance, inverse = saved
        # A rank without a cotangent still takes part in the sum: the others wait for it.
        dy = torch.zeros_like(own) if cotangents[0] is None else with_usual_strides(cotangents[0])
        d_weight, d_bias = self._affine_cotangents(dy, own, weight, mean, variance, inverse)
        dtype = mean.dtype if weight is None else weight.dtype

        def combine(sums: torch.Tensor) -> Tensors:
            if self._uses_kernel(own):
                return self._kernel_inputs(mean, variance, sums)
            return self._terms(weight, mean, variance, sums / self.count, own.dim())

        combination = Combination(_added, combine, sent_bytes=2 * mean.numel() * torch.float64.itemsize)
        combined = start_combined(comm, lambda: (d_bias, d_weight), combination)
        # This rank's sums only: gradients of all parameters are summed over ranks later.
        d_affine = d_weight.to(dtype), d_bias.to(dtype)

        def finish() -> Cotangents:
            """Return the cotangents, once the sums over ranks have arrived."""
            if needs_grad and not needs_grad[0]:
                return None, *d_affine
            if self._uses_kernel(own):
                return self._by_kernel(dy, own, mean, weight, combined.result()), *d_affine
            gain, slope, shift = combined.result()
            # In an expanded cotangent, many pixels share one value in memory.
            in_place = self.overwrites_cotangent and not is_expanded(dy)
            dx = dy if in_place else torch.empty_like(dy)
            if mean.dtype == dx.dtype:
                # In place this overwrites dy, so what else reads dy, the sums above, has to come first.
                torch.mul(dy, gain, out=dx)
                # The terms of mean and variance on owned pixels alone: see the formula at the top of this file.
                self._counted(dx).addcmul_(self._centred(own, mean), slope).add_(shift)
            else:
                self._in_blocks(dx, dy, own, (gain, slope, shift))
            return dx, *d_affine

        return combined.pending, finish

    def _uses_kernel(self, own: torch.Tensor) -> bool:
        """Whether CUDA's kernel computes the map's cotangent; the same for all cells of a process, which share sums."""
        return own.is_cuda

    def _by_kernel(
        self,
        dy: torch.Tensor,
        own: torch.Tensor,
        mean: torch.Tensor,
        weight: torch.Tensor | None,
        numbers: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Return the map's cotangent by CUDA's kernel; ``numbers``: from ``_kernel_inputs``."""
        if not own.numel():
            return torch.empty_like(own)
        inverse, *sums_and_count = numbers
        scale = None if weight is None else weight.to(mean.dtype)
        dy, own = _in_one_format(dy, own)
        return torch.batch_norm_backward_elemt(dy, own, mean, inverse, scale, *sums_and_count)

    def _kernel_inputs(self, mean: torch.Tensor, variance: torch.Tensor, sums: torch.Tensor) -> Tensors:
        """Return what CUDA's kernel for dx takes: 1/σ, Σ dy, Σ dy · (x - m), and counts that add up to the pixels.

        It reads dy and x once and writes dx once; the formula takes three passes. ``sums``: Σ dy and Σ dy · x̂.
        """
        deviation = (variance.double() + self.eps).sqrt()
        entries = -(-self.count // _MOST_PIXELS)  # the pixels of a large map do not fit into one count of 32 bits
        counts = torch.full((entries,), _MOST_PIXELS, dtype=torch.int32, device=mean.device)
        counts[-1:].fill_(self.count - (entries - 1) * _MOST_PIXELS)
        # Ours is Σ dy · x̂, the kernel's Σ dy · (x - m): they differ by the factor σ.
        per_channel = torch.stack((deviation.reciprocal(), sums[0], sums[1] * deviation)).to(mean.dtype)
        return *per_channel.unbind(), counts

    def _in_blocks(
        self, dx: torch.Tensor, dy: torch.Tensor, own: torch.Tensor, terms: tuple[torch.Tensor, ...]
    ) -> None:
        """Write the cotangent of a 16-bit map to ``dx``, computed in float32 and rounded once.

        It is gain · dy + slope · x + shift for pixels that count in the statistics, gain · dy for those of margins. If
        each term were rounded, small shifts would be lost, and sums over the map that should be zero would not be.
        """
        gain, slope, shift = terms
        # Block by block: whole copies of the three maps in float32 would take six times the memory of one.
        for top, height in _blocks(dx):
            dy_rows, x_rows, dx_rows = (tensor.narrow(2, top, height) if height else tensor for tensor in (dy, own, dx))
            wide = torch.mul(dy_rows, gain)  # float32, as gain is
            self._counted(wide, top).addcmul_(self._counted(x_rows, top), slope).add_(shift)
            dx_rows.copy_(wide)

    def _centred(self, own: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return the pixels that count in the statistics, those of a float64 map minus their mean.

        Far from zero, slope · x and a shift with the mean in it cancel: rounding errors remain. Float64 is for exact
        results, so the mean is subtracted first, in a new map; in other dtypes ``_terms`` puts it into the shift.
        """
        counted = self._counted(own)
        if mean.dtype != torch.float64:
            return counted
        return counted - mean.view(1, -1, *[1] * (own.dim() - 2))

    def _affine_cotangents(
        self,
        dy: torch.Tensor,
        own: torch.Tensor,
        weight: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        inverse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's Σ dy · x̂ and Σ dy, in the dtype of the mean: the cotangents of weight and bias."""
        if not own.numel():
            return torch.zeros_like(mean), torch.zeros_like(mean)
        # The sums do not depend on the weight, but without a weight the kernel returns none. In evaluation mode the
        # CPU's kernel reads the running statistics; CUDA's reads the saved ones, and fails without them.
        scale = torch.ones_like(mean) if weight is None else weight.detach().to(mean.dtype)
        statistics = mean, variance, mean, inverse
        _, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
            dy, own, scale, *statistics, False, self.eps, [False, True, True]
        )
        return d_weight, d_bias

    def _terms(
        self, weight: torch.Tensor | None, mean: torch.Tensor, variance: torch.Tensor, means: torch.Tensor, dims: int
    ) -> tuple[torch.Tensor, ...]:
        """Return gain, slope and shift, in a shape that broadcasts with the map: dx = gain · dy + slope · x + shift.

        This holds on owned pixels; on other computed copies dx is gain · dy.

        Args:
            weight: weight of the norm.
            mean: mean of the map.
            variance: variance of the map.
            means: (mean of dy, mean of dy · x̂) over the map, for each channel.
            dims: number of dims of the map's tensor.
        """
        # In float64: one number for each channel, rounded only when it is applied to pixels.
        inverse = (variance.double() + self.eps).rsqrt()
        gain = inverse if weight is None else inverse * weight.double()
        slope = -gain * means[1] * inverse
        shift = -gain * means[0]
        # ``_centred`` subtracts the mean of float64 maps, so their shift has none.
        if mean.dtype != torch.float64:
            shift = shift - slope * mean.double()
        return tuple(term.to(mean.dtype).view(1, -1, *[1] * (dims - 2)) for term in (gain, slope, shift))


def _added(sums: Mapping[int, Tensors]) -> torch.Tensor:
    """Return (Σ dy, Σ dy · x̂), stacked, over the ranks of ``sums``, added in float64 in rank order."""
    both = [tensor for rank in sorted(sums) for tensor in sums[rank]]
    rows = torch.stack(both).double()
    return rows if len(sums) == 1 else rows.view(len(sums), 2, -1).sum(0)


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of each block of a map; (0, 0), for all of it, if it has no rows or values."""
    rows = tensor.shape[2] if tensor.dim() > 2 and tensor.numel() else 0
    if not rows:
        yield 0, 0
        return
    values = _BLOCK_VALUES if tensor.device.type == "cpu" else _DEVICE_BLOCK_VALUES
    height = max(1, values * rows // tensor.numel())
    for top in range(0, rows, height):
        yield top, min(height, rows - top)


def _in_one_format(dy: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (dy, own) in the map's memory format: CUDA's kernel reads the map as if it had the cotangent's format."""
    channels_last = _CHANNELS_LAST.get(own.dim(), torch.contiguous_format)
    if own.is_contiguous(memory_format=channels_last):
        return dy.contiguous(memory_format=channels_last), own
    # A map with gaps has neither format, and a cotangent of one channel or pixel, or of features, has both.
    return dy.contiguous() if dy.is_contiguous(memory_format=channels_last) else dy, own.contiguous()


@dataclass(frozen=True)
class FusedBatchNorm(BatchNorm):
    """``BatchNorm`` of a computed box: statistics over owned pixels, applied to all computed ones.

    Attributes:
        owned: owned box, relative to the computed one; may be empty.
    """

    owned: Box

    def _uses_kernel(self, own: torch.Tensor) -> bool:
        """Return False: the kernel counts all pixels, and which cells have margins differs between them."""
        return False

    def _counted(self, tensor: torch.Tensor, top: int = 0) -> torch.Tensor:
        """Return the view of owned pixels: those of the margins are counted by their owners."""
        # The owned rows within this block; there may be none.
        y0, y1 = (min(max(y - top, 0), tensor.shape[2]) for y in (self.owned.y0, self.owned.y1))
        return tensor.narrow(2, y0, y1 - y0).narrow(3, self.owned.x0, self.owned.width)
