"""Pooling windows overlapped with the halo exchange: inner outputs on the own part, bands on small canvases.

    ┌───────────┬─┐  inner outputs, whose windows are within the own part: one native call, no copy
    │   inner   │b│
    ├───────────┼─┤  bands b, whose windows reach into strips: computed on small canvases after these have arrived
    └───────────┴─┘

In backward, bands come first: their cotangents of strips are sent while those of inner outputs are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hyfi_core.comm.base import Communicator, Tensors
from hyfi_core.comm.progress import polled
from hyfi_core.comm.waits import Waits
from hyfi_core.ops.cut import at
from hyfi_core.ops.redistribute import Redistribute, like
from hyfi_core.plan.box import Box
from hyfi_core.plan.window import Window
from hyfi_core.plan.window_calls import OwnCall, faster_apart, inner_outputs, own_call

NO_PADDING = (0, 0)
"""Padding of a call on a canvas, which includes all pixels of its windows."""


@dataclass(frozen=True)
class Banded:
    """A pool on a part.

    Attributes:
        halo: halo exchange, with its fill value outside of the map.
        window: window of the pool.
        output: this rank's part of the output; may be empty.
        canvas_padding: (y, x) padding that is left to the native call.
        apart: whether inner outputs may be computed separately; False: always on one canvas.
    """

    halo: Redistribute
    window: Window
    output: Box
    canvas_padding: tuple[int, int]
    apart: bool = True

    @cached_property
    def own(self) -> OwnCall | None:
        """The call on the own part; None if one canvas is better or necessary."""
        transfer = self.halo.transfer
        call = own_call(self.window, transfer.have, self.output)
        if not self.apart or not faster_apart(transfer) or call is None or self.inner.empty:
            return None
        kernels = (self.window.y.kernel, self.window.x.kernel)  # the native call pads by half a window at most
        return call if all(p <= k // 2 for p, k in zip(call.padding, kernels, strict=True)) else None

    @cached_property
    def inner(self) -> Box:
        """Outputs whose windows are within the own part."""
        return inner_outputs(self.window, self.halo.transfer.have, self.halo.transfer.map, self.output)

    @cached_property
    def bands(self) -> tuple[Box, ...]:
        """Boxes of all outputs that are not inner ones; they do not overlap."""
        out, inner = self.output, self.inner
        # Above and below across the whole width, left and right between them: each corner is in one band.
        bands = (
            Box(out.y0, inner.y0, out.x0, out.x1),
            Box(inner.y1, out.y1, out.x0, out.x1),
            Box(inner.y0, inner.y1, out.x0, inner.x0),
            Box(inner.y0, inner.y1, inner.x1, out.x1),
        )
        return tuple(band for band in bands if not band.empty)

    @property
    def steps(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """(kernel, stride, dilation), each (y, x)."""
        y, x = self.window.y, self.window.x
        return (y.kernel, x.kernel), (y.stride, x.stride), (y.dilation, x.dilation)

    def call_input(self, own: torch.Tensor) -> torch.Tensor:
        """Return the view of the own part that the native call takes."""
        assert self.own is not None
        return own if self.own.start == (0, 0) else own[:, :, self.own.start[0] :, self.own.start[1] :]

    def canvases(self, own: torch.Tensor, strips: Tensors) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield each band and its canvas: own pixels and strips, and the fill value outside of the map."""
        have = self.halo.transfer.have
        # A corner band may read its own part and three strips.
        pieces = [(have, own), *zip((s.box for s in self.halo.transfer.receives), strips, strict=True)]
        for band in self.bands:
            box = self.window.input_box(band)
            canvas = like(own, [*own.shape[:2], *box.shape]).fill_(self.halo.fill)
            for origin, piece in pieces:
                common = box.intersect(origin)
                if not common.empty:
                    at(canvas, common, box).copy_(at(piece, common, origin))
            yield band, canvas

    def back(
        self,
        comm: Communicator,
        form: torch.Tensor,
        d_bands: Sequence[torch.Tensor],
        back_of_own: Callable[[], torch.Tensor],
    ) -> Waits[torch.Tensor]:
        """Return the cotangent of this rank's part of the input, with what other ranks send for it.

        A band is a box of outputs whose windows reach into neighbours' parts; its canvas is the input of these windows.

        Args:
            comm: the ranks.
            form: a tensor with the batch, channels, dtype, device and memory format of the map.
            d_bands: the cotangent of each band's canvas.
            back_of_own: computes the part's cotangent from all other outputs; called during the exchange.
        """
        boxes = [self.window.input_box(band) for band in self.bands]
        received = self.halo.transfer.receives
        # Zeros first: bands may read only a part of a strip, and where several read it, their cotangents are added.
        backs = [like(form, [*form.shape[:2], *strip.box.shape]).zero_() for strip in received]
        for strip, back in zip(received, backs, strict=True):
            for box, d_band in zip(boxes, d_bands, strict=True):
                _add(back, strip.box, d_band, box)
        # Sent before the large call below, which hides the message.
        pending_strips = yield from self.halo.start_back(comm, form, backs)
        with polled(pending_strips.pending):
            d_own = back_of_own()
            for box, d_band in zip(boxes, d_bands, strict=True):
                _add(d_own, self.halo.transfer.have, d_band, box)
        yield from self.halo.add_back(d_own, pending_strips)
        return d_own


def _add(target: torch.Tensor, target_box: Box, more: torch.Tensor, more_box: Box) -> None:
    common = target_box.intersect(more_box)
    if not common.empty:
        at(target, common, target_box).add_(at(more, common, more_box))
