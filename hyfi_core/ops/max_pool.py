"""Maximum over windows of a part while its halo is on the way.

    ┌───────────┬─┐  inner outputs, whose windows stay on the own part: one native call on it, no copy
    │   inner   │b│
    ├───────────┼─┤  bands b: their windows reach into strips; computed on small canvases when these have come
    └───────────┴─┘

A maximum cannot be taken strip by strip as a sum can: of equal values the first in the window gets the gradient. What
is saved are places of maxima, and no values but those that the map's maker shares; where it does not, the map's memory
is kept for its cotangent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.progress import polled
from hyfi_core.ops.base import Cotangents, Tensors, Wanted
from hyfi_core.ops.memory import ours_alone
from hyfi_core.ops.redistribute import Redistribute, like
from hyfi_core.plan.box import Box
from hyfi_core.plan.share import OwnCall, inner_outputs, own_call, worth_it
from hyfi_core.plan.window import Window

_AT_ONCE = (0, 0)


@dataclass(frozen=True)
class _Places:
    """Where the maxima of some outputs were.

    Attributes:
        seen: the map that the native call took, or an empty one of its shape.
        indices: as the native call returns them.
    """

    seen: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True)
class MaxPool:
    """``max_pool2d`` on a part.

    Attributes:
        halo: brings a rank all that it needs; fills with -inf.
        window: of the pool.
        output: this rank's part of the output; may be empty.
        canvas_padding: (y, x) that the need leaves to the native call.
        apart: whether inner outputs may be computed apart; False: always on one canvas.
    """

    halo: Redistribute
    window: Window
    output: Box
    canvas_padding: tuple[int, int]
    apart: bool = True

    @cached_property
    def own(self) -> OwnCall | None:
        """The call on the own part; None where one canvas is the better way, or the only one."""
        transfer = self.halo.transfer
        call = own_call(self.window, transfer.have, self.output)
        if not self.apart or not worth_it(transfer) or call is None or self.inner.empty:
            return None
        kernels = (self.window.y.kernel, self.window.x.kernel)  # the native call pads by half a window at most
        return call if all(p <= k // 2 for p, k in zip(call.padding, kernels, strict=True)) else None

    @cached_property
    def inner(self) -> Box:
        """Outputs whose windows touch nobody else's pixels."""
        return inner_outputs(self.window, self.halo.transfer.have, self.halo.transfer.map, self.output)

    @cached_property
    def _bands(self) -> tuple[Box, ...]:
        out, inner = self.output, self.inner
        bands = (
            Box(out.y0, inner.y0, out.x0, out.x1),
            Box(inner.y1, out.y1, out.x0, out.x1),
            Box(inner.y0, inner.y1, out.x0, inner.x0),
            Box(inner.y0, inner.y1, inner.x1, out.x1),
        )
        return tuple(band for band in bands if not band.empty)

    def forward(self, comm: Communicator, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (maxima,); saved are their places."""
        (own,) = inputs
        if self.own is None:
            (canvas,), back = self.halo.forward(comm, (own,))
            if self.output.empty:
                return (own.new_empty((*own.shape[:2], *self.output.shape)),), (back, canvas, None, ())
            result, indices = self._pool(canvas, self.canvas_padding)
            return (result,), (back, canvas, indices, ())
        flight = self.halo.start(comm, own)
        with polled(flight.pending):
            result, indices = self._pool(self._seen(own), self.own.padding)
        strips, places = flight.land(), []
        for band in self._bands:
            canvas = self._canvas(band, own, strips)
            found, where = self._pool(canvas, _AT_ONCE)
            _at(result, band, self.output).copy_(found)
            places.append(_Places(canvas, where))
        return (result,), (own, indices, tuple(places))

    def backward(self, comm: Communicator, saved: Any, cotangents: Cotangents, wanted: Wanted = ()) -> Cotangents:
        """Return (the cotangent of the map,): each output's goes to the place of its maximum."""
        dy = cotangents[0]
        if self.own is None:
            return self._back_from_canvas(comm, saved, dy)
        over = saved[0] if ours_alone(saved, 0) else None
        whole, indices, places = saved
        if dy is None:
            dy = whole.new_zeros((*whole.shape[:2], *self.output.shape))
        received = self.halo.transfer.receives
        backs = [like(whole, [*whole.shape[:2], *strip.box.shape]).zero_() for strip in received]
        d_bands = []
        for band, place in zip(self._bands, places, strict=True):
            d_band = self._back(_at(dy, band, self.output), place.seen, place.indices, _AT_ONCE)
            d_bands.append((self.window.input_box(band), d_band))
            for strip, back in zip(received, backs, strict=True):
                _add(back, strip.box, d_band, d_bands[-1][0])
        flight = self.halo.start_back(comm, whole, backs)
        with polled(flight.pending):
            d_own = self._back_of_own(dy, whole, indices, over)
            for box, d_band in d_bands:
                _add(d_own, self.halo.transfer.have, d_band, box)
        self.halo.add_back(d_own, flight)
        return (d_own,)

    def _back_from_canvas(self, comm: Communicator, saved: Any, dy: torch.Tensor | None) -> Cotangents:
        back, canvas, indices, _ = saved
        if dy is None or indices is None:
            d_canvas = torch.zeros_like(canvas)
        else:
            d_canvas = self._back(dy, canvas, indices, self.canvas_padding)
        return self.halo.backward(comm, back, (d_canvas,))

    def _back_of_own(
        self, dy: torch.Tensor, whole: torch.Tensor, indices: torch.Tensor, over: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the cotangent of the own part from the inner outputs, in the memory of ``over`` if there is any."""
        assert self.own is not None
        inner = dy
        if self.inner != self.output:
            inner = torch.zeros_like(dy)
            _at(inner, self.inner, self.output).copy_(_at(dy, self.inner, self.output))
        if self.own.start == (0, 0):
            return self._back(inner, whole, indices, self.own.padding, over)
        d_own = torch.zeros_like(whole)
        seen = self._seen(whole)
        self._seen(d_own).copy_(self._back(inner, seen, indices, self.own.padding))
        return d_own

    def _seen(self, own: torch.Tensor) -> torch.Tensor:
        """Return what the native call takes of the own part."""
        assert self.own is not None
        return own if self.own.start == (0, 0) else own[:, :, self.own.start[0] :, self.own.start[1] :]

    def _canvas(self, band: Box, own: torch.Tensor, strips: Tensors) -> torch.Tensor:
        """Return what a band's windows see: own pixels and strips, -inf outside the map."""
        box = self.window.input_box(band)
        canvas = like(own, [*own.shape[:2], *box.shape]).fill_(self.halo.fill)
        have = self.halo.transfer.have
        pieces = [(have, own), *zip((s.box for s in self.halo.transfer.receives), strips, strict=True)]
        for origin, piece in pieces:
            both = box.intersect(origin)
            if not both.empty:
                _at(canvas, both, box).copy_(_at(piece, both, origin))
        return canvas

    def _pool(self, tensor: torch.Tensor, padding: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        call = torch.ops.aten.max_pool2d_with_indices.default
        result, indices = call(tensor, *self._steps[:2], padding, self._steps[2], False)
        return result, indices

    def _back(
        self,
        dy: torch.Tensor,
        tensor: torch.Tensor,
        indices: torch.Tensor,
        padding: tuple[int, int],
        over: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the cotangent of ``tensor``, of which the native call looks at nothing but the shape."""
        result = torch.empty_like(tensor) if over is None else over
        call = torch.ops.aten.max_pool2d_with_indices_backward.grad_input
        call(dy, tensor, *self._steps[:2], padding, self._steps[2], False, indices, grad_input=result)
        return result

    @property
    def _steps(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """(kernel, stride, dilation), each (y, x)."""
        y, x = self.window.y, self.window.x
        return (y.kernel, x.kernel), (y.stride, x.stride), (y.dilation, x.dilation)


def _at(tensor: torch.Tensor, box: Box, origin: Box) -> torch.Tensor:
    y, x = box.relative_to(origin).slices()
    return tensor[:, :, y, x]


def _add(target: torch.Tensor, target_box: Box, more: torch.Tensor, more_box: Box) -> None:
    both = target_box.intersect(more_box)
    if not both.empty:
        _at(target, both, target_box).add_(_at(more, both, more_box))
