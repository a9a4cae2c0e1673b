"""Average pooling of a part, overlapped with its halo exchange.

The kernel divides all sums by the same number, and outputs that count fewer pixels are corrected. It does not return
undivided sums: in 16-bit floats these may overflow. Pooling is linear, so only the shape of the map is saved.

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
from hyfi_core.ops.bands import NO_PADDING, Banded
from hyfi_core.ops.base import Cotangents, NeedsGrad
from hyfi_core.ops.constants import Constant
from hyfi_core.ops.cut import at
from hyfi_core.ops.redistribute import like
from hyfi_core.plan.box import Box
from hyfi_core.plan.window import AxisWindow, Window

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
        """Return (means,); saves (what the halo saves, shape of the canvas or part, a small tensor of its format)."""
        (own,) = inputs  # this rank's part of the map
        if self.own is None:  # one call on a canvas, the part with its halo
            (canvas,), back = yield from self.halo.forward(comm, (own,))
            # After the exchange: a rank without outputs may own pixels that others need.
            if self.output.empty:
                return (own.new_empty((*own.shape[:2], *self.output.shape)),), (back, canvas.shape, like(own, _PATTERN))
            result = self._pooled(canvas, self.canvas_padding)
            return (self._corrected(result),), (back, canvas.shape, like(own, _PATTERN))
        # Else one call on the part, while the halo is sent, and one for each band of outputs that need the halo.
        pending_strips = yield from self.halo.start(comm, own)
        with polled(pending_strips.pending):
            result = self._pooled(self.call_input(own), self.own.padding)
        for band, canvas in self.canvases(own, (yield from pending_strips.wait())):
            # The native call has written these outputs too, with zeros for the strips: they are replaced.
            at(result, band, self.output).copy_(self._pooled(canvas, NO_PADDING))
        self.halo.give_back(pending_strips.strips)
        return (self._corrected(result),), (None, own.shape, like(own, _PATTERN))

    def backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> Waits[Cotangents]:
        """Return (the cotangent of the map,): each output's cotangent is spread over its window."""
        back, shape, pattern = saved  # what the halo has saved, shape of the canvas or part, a tensor of its format
        form = like(pattern, list(shape))
        dy = cotangents[0]
        if dy is None or self.output.empty:
            # A rank without a cotangent still sends zeros: its neighbours wait for them.
            dy = like(pattern, [*shape[:2], *self.output.shape]).zero_()
        else:
            # A new tensor, which ``_back_of_own`` may therefore change.
            dy = self._corrected(dy.clone())
        if self.own is None:  # one call on a canvas, the part with its halo
            d_canvas = form.zero_() if self.output.empty else self._back(dy, form, self.canvas_padding)
            return (yield from self.halo.backward(comm, back, (d_canvas,)))
        # Bands are outputs that need the halo: their cotangents are computed first, and sent during the large call.
        d_bands = []
        for band in self.bands:
            canvas = like(pattern, [*shape[:2], *self.window.input_box(band).shape])
            d_bands.append(self._back(at(dy, band, self.output), canvas, NO_PADDING))
        d_own = yield from self.back(comm, form, d_bands, lambda: self._back_of_own(dy, form))
        return (d_own,)

    def _back_of_own(self, dy: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Return the cotangent of this rank's part of the input, from outputs whose windows are within it.

        Args:
            dy: the cotangent of all outputs; it is set to zero in those whose windows reach into neighbours' parts.
            into: memory of the result.
        """
        assert self.own is not None
        for band in self.bands:
            # The caller computes the cotangents of these outputs' inputs: here they would count twice.
            at(dy, band, self.output).zero_()
        if self.own.start == (0, 0):
            return self._back(dy, into, self.own.padding)
        # No inner output reads the rows and columns before ``start``: their cotangent is zero.
        d_own = into.zero_()
        pooled = self.call_input(d_own)  # a view of the rows and columns from ``start`` on
        pooled.copy_(self._back(dy, like(into, list(pooled.shape)), self.own.padding))
        return d_own

    def _pooled(self, tensor: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
        """Return the sum over each window, divided by the same number for all: see ``_corrected``."""
        pooled: torch.Tensor = F.avg_pool2d(tensor, *self.steps[:2], padding, divisor_override=self._divisor)
        return pooled

    def _back(self, dy: torch.Tensor, into: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
        """Return the cotangent of the input of ``_pooled``, in the memory of ``into``."""
        call = torch.ops.aten.avg_pool2d_backward.grad_input
        ceil_mode, count_include_pad = False, True  # as in ``_pooled``
        result = into
        # Computed in the contiguous format, and copied: in that of ``into``, a GPU's kernel ignores the padding.
        if gradient_forgets_padding(into, padding):
            result = torch.empty_like(into, memory_format=torch.contiguous_format)
        # The native call reads only the shape of the pool's input, so that the result's memory stands for it.
        kernel, stride, _ = self.steps
        call(dy, result, kernel, stride, padding, ceil_mode, count_include_pad, self._divisor, grad_input=result)
        return into if result is into else into.copy_(result)

    def _corrected(self, tensor: torch.Tensor) -> torch.Tensor:
        """Multiply each output of ``_pooled``, or its cotangent, by the factor that makes it a mean; in place."""
        factors = None if self.divisor is not None else self._counts.factors(tensor)
        return tensor if factors is None else tensor.mul_(factors)

    @property
    def _divisor(self) -> int:
        return self._counts.most if self.divisor is None else self.divisor

    @cached_property
    def _counts(self) -> WindowCounts:
        return WindowCounts.of(self.window, self.output, self.halo.transfer.map, self.include_pad)


class WindowCounts:
    """How many pixels each window of a part counts.

    Args:
        rows: for each row of outputs, the rows of pixels that its windows count.
        columns: for each column of outputs, likewise.

    Attributes:
        most: the largest number of pixels of any window.
    """

    def __init__(self, rows: Sequence[int], columns: Sequence[int]) -> None:
        most_rows, most_columns = max(rows, default=1), max(columns, default=1)
        self.most = most_rows * most_columns
        self._rows = Constant(torch.tensor([most_rows / count for count in rows], dtype=torch.float64))
        self._columns = Constant(torch.tensor([most_columns / count for count in columns], dtype=torch.float64))
        self._same = {*rows} <= {most_rows} and {*columns} <= {most_columns}

    @classmethod
    def of(cls, window: Window, outputs: Box, map_box: Box, include_pad: bool) -> WindowCounts:
        """Return the counts of the windows of some outputs.

        Args:
            window: window of the pool.
            outputs: the outputs whose windows to count.
            map_box: the whole map.
            include_pad: whether padding counts.
        """
        return cls(
            counts(window.y, outputs.y0, outputs.y1, map_box.height, include_pad),
            counts(window.x, outputs.x0, outputs.x1, map_box.width, include_pad),
        )

    def factors(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return ``most`` / count of each window, in the dtype and on the device of ``like``; None if all are 1."""
        return None if self._same else self._rows.like(like)[:, None] * self._columns.like(like)[None, :]


def gradient_forgets_padding(tensor: torch.Tensor, padding: int | Sequence[int]) -> bool:
    """Whether the native cotangent of an average pool of this map may be wrong: see the module."""
    padded = any(padding) if isinstance(padding, Sequence) else bool(padding)
    # A map of one channel has the same memory in both formats: the kernel decides by the strides.
    return padded and tensor.is_cuda and tensor.dim() == 4 and tensor.stride(1) <= tensor.stride(3)


def avg_pool2d(
    tensor: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    *settings: Any,
    **more: Any,
) -> torch.Tensor:
    """Return ``aten.avg_pool2d`` in the memory format of the map; its gradient is right on a GPU, too."""
    call = torch.ops.aten.avg_pool2d.default
    # PyTorch's gradient of a padded channels-last map on a GPU is wrong: such a map is pooled in the other format.
    if not gradient_forgets_padding(tensor, padding):
        return call(tensor, kernel_size, stride, padding, *settings, **more)  # type: ignore[no-any-return]
    # A clone, since a map of one channel counts as contiguous already, with the strides of the other format.
    plain = tensor.clone(memory_format=torch.contiguous_format)
    result: torch.Tensor = call(plain, kernel_size, stride, padding, *settings, **more)
    return result.contiguous(memory_format=torch.channels_last)


def counts(window: AxisWindow, start: int, stop: int, length: int, include_pad: bool) -> list[int]:
    """Return for each output in [start, stop) how many positions its window counts, of the map and of padding.

    Args:
        window: window of the pool, along one axis.
        start: first output.
        stop: the output after the last.
        length: length of the map.
        include_pad: whether padding counts.
    """
    beyond = window.padding if include_pad else 0
    numbers = []
    for output in range(start, stop):
        first, last = window.input_interval(output, output + 1)
        # At least 1: the sum of a window that covers no pixel is 0, and 0 / 0 would be NaN.
        numbers.append(max(1, min(last, length + beyond) - max(first, -beyond)))
    return numbers
