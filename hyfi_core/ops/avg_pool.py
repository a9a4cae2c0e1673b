"""Average pooling of a part, overlapped with its halo exchange.

A mean is a sum divided by a count for each output. Sums are linear, so only the shape of the map is saved.

CUDA's kernel of the cotangent of a channels-last map forgets the padding, and returns a wrong one in silence, in plain
PyTorch, too (https://github.com/pytorch/pytorch/issues/188344, mended there in July 2026). Here the cotangent of a
padded map is computed in the contiguous format, in which it is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from hyfi_core.comm.base import Communicator, Tensors
from hyfi_core.comm.progress import polled
from hyfi_core.comm.waits import Waits
from hyfi_core.ops.bands import AT_ONCE, Banded
from hyfi_core.ops.base import Cotangents, NeedsGrad
from hyfi_core.ops.constants import Constant
from hyfi_core.ops.cut import at
from hyfi_core.ops.redistribute import like
from hyfi_core.plan.window import AxisWindow

# A side of 1 would make the strides ambiguous.
_PATTERN = [1, 2, 2, 2]  # the smallest map that shows its memory format


@dataclass(frozen=True)
class AvgPool(Banded):
    """``avg_pool2d`` on a part; outside of the map its halo is 0.

    Attributes:
        include_pad: whether padding counts; pixels beyond the padding (``ceil_mode``) never do.
        divisor: divisor of all sums; None: the count.
    """

    own_cotangents: ClassVar[bool] = True

    include_pad: bool = True
    divisor: int | None = None

    def forward(self, comm: Communicator, inputs: Tensors) -> Waits[tuple[Tensors, Any]]:
        """Return (means,); saves the map's shape and format."""
        (own,) = inputs
        if self.own is None:
            (canvas,), back = yield from self.halo.forward(comm, (own,))
            # After the exchange: a rank without outputs may own pixels that others need.
            if self.output.empty:
                return (own.new_empty((*own.shape[:2], *self.output.shape)),), (back, canvas.shape, like(own, _PATTERN))
            result = self._sums(canvas, self.canvas_padding)
            return (result.div_(self._counts(result)),), (back, canvas.shape, like(own, _PATTERN))
        pending_strips = yield from self.halo.start(comm, own)
        with polled(pending_strips.pending):
            result = self._sums(self.seen(own), self.own.padding)
        for band, canvas in self.canvases(own, (yield from pending_strips.wait())):
            # The native call has written these outputs too, with zeros for the strips: they are replaced.
            at(result, band, self.output).copy_(self._sums(canvas, AT_ONCE))
        self.halo.give_back(pending_strips.strips)
        return (result.div_(self._counts(result)),), (None, own.shape, like(own, _PATTERN))

    def backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> Waits[Cotangents]:
        """Return (the cotangent of the map,): each output's cotangent is spread over its window."""
        back, shape, pattern = saved
        form = like(pattern, list(shape))
        dy = cotangents[0]
        if dy is None or self.output.empty:
            # A rank without a cotangent still sends zeros: its neighbours wait for them.
            dy = like(pattern, [*shape[:2], *self.output.shape]).zero_()
        else:
            # A new tensor, which ``_back_of_own`` may therefore change.
            dy = dy / self._counts(dy)
        if self.own is None:
            d_canvas = form.zero_() if self.output.empty else self._back(dy, form, self.canvas_padding)
            return (yield from self.halo.backward(comm, back, (d_canvas,)))
        d_bands = []
        for band in self.bands:
            canvas = like(pattern, [*shape[:2], *self.window.input_box(band).shape])
            d_bands.append(self._back(at(dy, band, self.output), canvas, AT_ONCE))
        d_own = yield from self.back(comm, form, d_bands, lambda: self._back_of_own(dy, form))
        return (d_own,)

    def _back_of_own(self, dy: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Return the cotangent of the own part from the inner outputs, in the memory of ``into``.

        ``dy`` becomes zero in the bands; for bands and their canvases see ``ops.bands``.
        """
        assert self.own is not None
        for band in self.bands:
            # The cotangents of bands have been sent through their canvases: here they would count twice.
            at(dy, band, self.output).zero_()
        if self.own.start == (0, 0):
            return self._back(dy, into, self.own.padding)
        # No inner output reads the rows and columns before ``start``: their cotangent is zero.
        d_own = into.zero_()
        pooled = self.seen(d_own)
        pooled.copy_(self._back(dy, like(into, list(pooled.shape)), self.own.padding))
        return d_own

    def _sums(self, tensor: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
        # With the divisor 1 the kernel returns sums: it would divide by its own padded window.
        sums: torch.Tensor = F.avg_pool2d(tensor, *self.steps[:2], padding, divisor_override=1)
        return sums

    def _back(self, dy: torch.Tensor, into: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
        """Return the cotangent of the sums' input, in the memory of ``into``."""
        call = torch.ops.aten.avg_pool2d_backward.grad_input
        result = into
        if forgets_padding(into, padding):
            result = torch.empty_like(into, memory_format=torch.contiguous_format)
        # The kernel reads only the shape of its input, so that the result's memory stands for it.
        call(dy, result, *self.steps[:2], padding, False, True, 1, grad_input=result)
        return into if result is into else into.copy_(result)

    def _counts(self, like: torch.Tensor) -> torch.Tensor | int:
        """Return the divisor of each sum."""
        if self.divisor is not None:
            return self.divisor
        rows, columns = self._counted
        return rows.like(like)[:, None] * columns.like(like)[None, :]

    @cached_property
    def _counted(self) -> tuple[Constant, Constant]:
        """Number of rows and columns that each output's window counts."""
        map_box, out, (y, x) = self.halo.transfer.map, self.output, (self.window.y, self.window.x)
        return (
            Constant(counts(y, out.y0, out.y1, map_box.height, self.include_pad)),
            Constant(counts(x, out.x0, out.x1, map_box.width, self.include_pad)),
        )


def forgets_padding(tensor: torch.Tensor, padding: int | Sequence[int]) -> bool:
    """Whether the native cotangent of an average pool of this map may be wrong: see the module."""
    padded = any(padding) if isinstance(padding, Sequence) else bool(padding)
    # Of one channel, both formats have the same elements in the same places: the kernel looks at the strides.
    return padded and tensor.is_cuda and tensor.dim() == 4 and tensor.stride(1) <= tensor.stride(3)


def avg_pool2d(
    tensor: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    *settings: Any,
    **more: Any,
) -> torch.Tensor:
    """Return ``aten.avg_pool2d``, in the format of the map; its gradient is right on a GPU, too."""
    call = torch.ops.aten.avg_pool2d.default
    if not forgets_padding(tensor, padding):
        return call(tensor, kernel_size, stride, padding, *settings, **more)  # type: ignore[no-any-return]
    # A copy also of a map of one channel, which is contiguous, but has the strides of the other format.
    plain = tensor.clone(memory_format=torch.contiguous_format)
    result: torch.Tensor = call(plain, kernel_size, stride, padding, *settings, **more)
    return result.contiguous(memory_format=torch.channels_last)


def counts(window: AxisWindow, start: int, stop: int, length: int, include_pad: bool) -> list[int]:
    """Return how many positions of a map of this length, and of its padding if that counts, each window covers."""
    beyond = window.padding if include_pad else 0
    numbers = []
    for output in range(start, stop):
        first, last = window.input_interval(output, output + 1)
        # At least 1: the sum of a window that covers no pixel is 0, and 0 / 0 would be NaN.
        numbers.append(max(1, min(last, length + beyond) - max(first, -beyond)))
    return numbers
