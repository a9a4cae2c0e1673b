"""Max pooling of a part, overlapped with its halo exchange.

Unlike a sum, a maximum cannot be taken strip by strip: of equal values the first in the window gets the gradient. So
outputs near a seam are computed in bands after the exchange. Only the indices of maxima are saved, and no values except
those that the map's producer saves anyway; otherwise the map's memory is kept for its cotangent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hyfi_core.comm.base import Communicator, Tensors
from hyfi_core.comm.progress import polled
from hyfi_core.comm.waits import Waits
from hyfi_core.ops.bands import NO_PADDING, Banded
from hyfi_core.ops.base import Cotangents, NeedsGrad, RemakesSaved
from hyfi_core.ops.cut import at, copy_box
from hyfi_core.ops.window_places import WindowPlaces
from hyfi_core.plan.window import Window


@dataclass(frozen=True)
class _BandIndices:
    """Indices of the maxima of the outputs in a band.

    Attributes:
        call_input: the canvas that the native call took, or a tensor of its shape without memory.
        indices: indices that the native call returned.
    """

    call_input: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True)
class MaxPool(Banded, RemakesSaved):
    """``max_pool2d`` on a part; outside of the map its halo is -inf.

    Attributes:
        holds_map: whether the map is kept, so that its cotangent can take its memory; else only its shape is kept, and
            the caller recomputes the indices, or has them stored in one byte each by ``compact``.
        overwrites_map: whether the map's memory may be overwritten by its cotangent.
    """

    own_cotangents: ClassVar[bool] = True

    holds_map: bool = True
    overwrites_map: bool = False

    def forward(self, comm: Communicator, inputs: Tensors) -> Waits[tuple[Tensors, Any]]:
        """Return (maxima,); saves their indices."""
        (own,) = inputs
        if self.own is None:
            (canvas,), saved_halo = yield from self.halo.forward(comm, (own,))
            if self.output.empty:
                return (own.new_empty((*own.shape[:2], *self.output.shape)),), (saved_halo, canvas, None, ())
            result, indices = self._pool(canvas, self.canvas_padding)
            return (result,), (saved_halo, self._form_to_save(canvas), indices, ())
        pending_strips = yield from self.halo.start(comm, own)
        with polled(pending_strips.pending):
            result, indices = self._pool(self.call_input(own), self.own.padding)
        band_indices = []
        for band, canvas in self.canvases(own, (yield from pending_strips.wait())):
            maxima, where = self._pool(canvas, NO_PADDING)
            at(result, band, self.output).copy_(maxima)
            # Indices of a band count within its canvas, not within the map.
            band_indices.append(_BandIndices(self._form_to_save(canvas), self._narrow(canvas, where, NO_PADDING)))
        self.halo.give_back(pending_strips.strips)
        return (result,), (self._form_to_save(own), indices, tuple(band_indices))

    @property
    def remakes(self) -> bool:
        """Whether the input is enough to compute the indices again: a canvas with strips needs the strips, too."""
        needs_strips = self.own is None and bool(self.halo.transfer.receives)
        return not self.holds_map and not needs_strips and not self.output.empty

    def remade(self, saved: Any) -> torch.Tensor | None:
        """Return the indices, except those of bands; see ``ops.base.RemakesSaved``."""
        indices: torch.Tensor = saved[1 if self.own is not None else 2]
        return indices if self.remakes else None

    def remake(self, own: torch.Tensor) -> torch.Tensor:
        """Return the indices again; see ``ops.base.RemakesSaved``."""
        if self.own is None:
            return self._pool(self.halo.placed(own), self.canvas_padding)[1]
        return self._pool(self.call_input(own), self.own.padding)[1]

    def compact(self, saved: Any) -> Any:
        """Return ``saved`` with indices in one byte each where that is enough; see ``ops.base.RemakesSaved``."""
        if self.holds_map:  # only for cells, which do not keep the map, is memory worth the time to pack indices
            return saved
        if self.own is None:  # pooled on a canvas: what the halo exchange saved, canvas, indices, no bands
            saved_halo, canvas, indices, no_bands = saved
            narrow = None if indices is None else self._narrow(canvas, indices, self.canvas_padding)
            return saved_halo, canvas, narrow, no_bands
        own, indices, band_indices = saved  # those of bands are in one byte each already
        # On the meta device: the map's memory may be gone, and only its shape is read.
        shape_alone = own.new_empty(own.shape, device="meta")
        return own, self._narrow(self.call_input(shape_alone), indices, self.own.padding), band_indices

    def backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> Waits[Cotangents]:
        """Return (the cotangent of the map,): each output's cotangent goes to the position of its maximum."""
        dy = cotangents[0]
        if self.own is None:
            return (yield from self._back_from_canvas(comm, saved, dy))
        own, indices, band_indices = saved
        # If only the map's shape is kept, it has no memory to overwrite.
        over = own if self.overwrites_map and self.holds_map else None
        if dy is None:
            dy = own.new_zeros((*own.shape[:2], *self.output.shape))
        d_bands = [
            self._back(at(dy, band, self.output), saved_band.call_input, saved_band.indices, NO_PADDING)
            for band, saved_band in zip(self.bands, band_indices, strict=True)
        ]
        d_own = yield from self.back(comm, own, d_bands, lambda: self._back_of_own(dy, own, indices, over))
        return (d_own,)

    def _back_from_canvas(self, comm: Communicator, saved: Any, dy: torch.Tensor | None) -> Waits[Cotangents]:
        """Return the cotangent of the map from that of the canvas, which had own part, strips and fill value.

        There are no indices if this rank has no outputs.
        """
        saved_halo, canvas, indices, _ = saved
        if dy is None or indices is None:
            d_canvas = torch.zeros_like(canvas)
        else:
            d_canvas = self._back(dy, canvas, indices, self.canvas_padding)
        return (yield from self.halo.backward(comm, saved_halo, (d_canvas,)))

    def _form_to_save(self, own: torch.Tensor) -> torch.Tensor:
        """Return the form of a map to keep for backward: the map, or its shape and strides without memory."""
        if self.holds_map:
            return own
        # The strides say the memory format.
        shape_alone = torch.empty_like(own)
        shape_alone.untyped_storage().resize_(0)
        return shape_alone

    def _narrow(self, own: torch.Tensor, indices: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
        """Return the indices in one byte each if that is enough and the map is not kept; else as they are."""
        places = self._places(own, padding)
        return indices if self.holds_map or not places.fits else places.narrow(indices)

    def _places(self, own: torch.Tensor, padding: tuple[int, int]) -> WindowPlaces:
        kernel, stride, dilation = self.steps
        return WindowPlaces(own.shape[3], kernel, stride, padding, dilation)

    def _back_of_own(
        self, dy: torch.Tensor, own: torch.Tensor, indices: torch.Tensor, over: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the cotangent of the own part from the inner outputs, in the memory of ``over`` if given."""
        assert self.own is not None
        inner = dy
        if self.inner != self.output:
            # A copy: dy is the caller's, and others may read it.
            inner = torch.zeros_like(dy)
            copy_box(at(inner, self.inner, self.output), at(dy, self.inner, self.output))
        if self.own.start == (0, 0):
            return self._back(inner, own, indices, self.own.padding, over)
        d_own = torch.zeros_like(own)
        pooled = self.call_input(d_own)  # of the map, only the shape may be left
        copy_box(pooled, self._back(inner, pooled, indices, self.own.padding))
        return d_own

    def _pool(self, tensor: torch.Tensor, padding: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        call = torch.ops.aten.max_pool2d_with_indices.default
        result, indices = call(tensor, *self.steps[:2], padding, self.steps[2], False)
        return result, indices

    def _back(
        self,
        dy: torch.Tensor,
        tensor: torch.Tensor,
        indices: torch.Tensor,
        padding: tuple[int, int],
        over: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the cotangent of ``tensor``; the native call needs only its shape."""
        result = _gradient_memory(tensor, over)
        # The native kernel takes int64 indices only.
        if indices.dtype == torch.uint8:
            indices = self._places(tensor, padding).wide(indices)
        call = torch.ops.aten.max_pool2d_with_indices_backward.grad_input
        call(dy, tensor, *self.steps[:2], padding, self.steps[2], False, indices, grad_input=result)
        return result


def _gradient_memory(tensor: torch.Tensor, over: torch.Tensor | None) -> torch.Tensor:
    """Return memory for the cotangent of a map: ``over`` if it is contiguous or channels-last, else new memory.

    CUDA's kernel ignores the strides of its output: it writes in the memory format of the map, and contiguously for a
    map of neither format, such as a transposed one.
    """
    result = torch.empty_like(tensor) if over is None else over
    if result.is_contiguous() or result.is_contiguous(memory_format=torch.channels_last):
        return result
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class WholeMaxPool:
    """``max_pool2d`` of a map that one rank has whole; its cotangent overwrites the map where allowed.

    Attributes:
        window: window of the pool; within the padding.
        overwrites_map: whether the map may be overwritten.
    """

    own_cotangents: ClassVar[bool] = True

    window: Window
    overwrites_map: bool = False

    def forward(self, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (maxima,); saves their indices, and the map, whose memory the cotangent may take."""
        call = torch.ops.aten.max_pool2d_with_indices.default
        result, indices = call(inputs[0], *self._settings)
        return (result,), (inputs[0], indices)

    def backward(self, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()) -> Cotangents:
        """Return (the cotangent of the map,): each output's cotangent goes to the position of its maximum."""
        image, indices = saved
        result = _gradient_memory(image, image if self.overwrites_map else None)
        dy = torch.zeros_like(indices, dtype=image.dtype) if cotangents[0] is None else cotangents[0]
        call = torch.ops.aten.max_pool2d_with_indices_backward.grad_input
        call(dy, image, *self._settings, indices, grad_input=result)
        return (result,)

    @property
    def _settings(self) -> tuple[Any, ...]:
        """Arguments of the native call: kernel, stride, padding, dilation, ceil_mode."""
        y, x = self.window.y, self.window.x
        sides = ((y.kernel, x.kernel), (y.stride, x.stride), (y.padding, x.padding), (y.dilation, x.dilation))
        return (*sides, False)
