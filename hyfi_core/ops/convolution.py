"""Convolution of a part while its halo is on the way.

    forward    start ──▶ own part, as if beyond it were zeros ──▶ finish ──▶ each strip's share added to the outputs
                                                                            that it reaches
    backward   cotangents of the strips ──▶ start ──▶ cotangents of own part and weight ──▶ finish, add what came

A convolution is a sum, so it may be taken share by share, and no padded copy is made or saved: what a rank owns is
shared with whoever made it, and the received strips are small. Where parts are small, strips are not: then everything
is put on one canvas first, as plain redistribution has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.progress import polled
from hyfi_core.ops import taps
from hyfi_core.ops.base import Cotangents, Tensors, Wanted
from hyfi_core.ops.redistribute import Flight, Redistribute, like
from hyfi_core.plan.box import Box
from hyfi_core.plan.share import OwnCall, Share, own_call, share_of, worth_it
from hyfi_core.plan.window import Window

Mask = tuple[bool, bool, bool]


@dataclass(frozen=True)
class _Saved:
    """What backward needs.

    Attributes:
        seen: the map that the native call took: own part or canvas.
        strips: received; none with a canvas.
        weight: as given.
        dtype: of the map that came in; under autocast the others have another.
        shape: of the map that came in.
    """

    seen: torch.Tensor
    strips: tuple[torch.Tensor, ...]
    weight: torch.Tensor
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class _Piece:
    """A received strip that reaches outputs of this rank.

    Attributes:
        index: among the received strips.
        box: of the strip.
        share: what it reaches.
    """

    index: int
    box: Box
    share: Share


@dataclass(frozen=True)
class Convolution:
    """``conv2d`` on a part. Inputs: map, weight, bias or None.

    Attributes:
        halo: brings a rank all that it needs.
        window: of the convolution.
        output: this rank's part of the output; may be empty.
        canvas_padding: (y, x) that the need leaves to the native call.
        groups: of the convolution.
        apart: whether own part and strips may be computed apart; False: always on a canvas.
    """

    halo: Redistribute
    window: Window
    output: Box
    canvas_padding: tuple[int, int]
    groups: int
    apart: bool = True

    @cached_property
    def own(self) -> OwnCall | None:
        """The call on the own part; None where a canvas is the better way, or the only one."""
        transfer = self.halo.transfer
        if not self.apart or not worth_it(transfer):
            return None
        return own_call(self.window, transfer.have, self.output)

    @cached_property
    def _pieces(self) -> tuple[_Piece, ...]:
        strips = enumerate(self.halo.transfer.receives)
        reaching = ((index, strip.box, share_of(self.window, strip.box, self.output)) for index, strip in strips)
        return tuple(_Piece(index, box, share) for index, box, share in reaching if share is not None)

    # -- forward

    def forward(self, comm: Communicator, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (convolved part,); saved are the own part, not copied, and the strips."""
        given, weight, bias = inputs
        own = given.to(_computed_in(given))
        kernel = weight.to(own.dtype)
        offset = None if bias is None else bias.to(own.dtype)
        if self.own is None:
            (canvas,), _ = self.halo.forward(comm, (own,))
            result = self._convolve(canvas, kernel, offset, self.canvas_padding)
            return (result,), _Saved(canvas, (), weight, given.dtype, given.shape)
        flight = self.halo.start(comm, own)
        seen = own[:, :, self.own.start[0] :, self.own.start[1] :]
        with polled(flight.pending):
            result = self._convolve(seen, kernel, offset, self.own.padding)
        strips = flight.land()
        for piece in self._pieces:
            canvas, tapped, outputs = _canvas(piece, strips, own), _tapped(kernel, piece), self._outputs(result, piece)
            if taps.in_place(kernel, self.groups):
                taps.add_outputs(outputs, canvas, tapped, *self._steps)
            else:
                outputs.add_(self._convolve(canvas, tapped, None, (0, 0)))
        return (result,), _Saved(seen, strips, weight, given.dtype, given.shape)

    def _convolve(
        self, tensor: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, padding: tuple[int, int]
    ) -> torch.Tensor:
        if self.output.empty:
            return tensor.new_empty((tensor.shape[0], kernel.shape[0], *self.output.shape))
        stride, dilation = self._steps
        call = torch.ops.aten.convolution.default
        result: torch.Tensor = call(tensor, kernel, bias, stride, padding, dilation, False, (0, 0), self.groups)
        return result

    # -- backward

    def backward(self, comm: Communicator, saved: Any, cotangents: Cotangents, wanted: Wanted = ()) -> Cotangents:
        """Return the cotangents of map, weight (this rank's share), bias (this rank's share)."""
        mask = (wanted[0], wanted[1], wanted[2]) if wanted else (True, True, True)
        seen, dy = saved.seen, cotangents[0]
        if dy is None:
            dy = seen.new_zeros((seen.shape[0], saved.weight.shape[0], *self.output.shape))
        dy = dy.to(seen.dtype)
        kernel = saved.weight.to(seen.dtype)
        if self.own is None:
            return self._back_from_canvas(comm, saved, dy, kernel, mask)
        flight = self._send_back(comm, saved, dy, kernel) if mask[0] else None
        with polled(flight.pending if flight is not None else None):
            d_seen, d_weight, d_bias = self._differentiate(dy, seen, kernel, self.own.padding, mask)
            if mask[1]:
                self._add_strips(d_weight, saved, dy, kernel)
        if flight is None:
            return None, d_weight, d_bias
        d_own = self._widened(d_seen, saved)
        self.halo.add_back(d_own, flight)
        return d_own, d_weight, d_bias

    def _back_from_canvas(
        self, comm: Communicator, saved: _Saved, dy: torch.Tensor, kernel: torch.Tensor, mask: Mask
    ) -> Cotangents:
        canvas = saved.seen
        if self.output.empty:
            d_canvas, d_weight, d_bias = torch.zeros_like(canvas), None, None
        else:
            d_canvas, d_weight, d_bias = self._differentiate(dy, canvas, kernel, self.canvas_padding, mask)
        if not mask[0]:
            return None, d_weight, d_bias
        back = (saved.shape, canvas.dtype, canvas.device)
        d_own = self.halo.backward(comm, back, (d_canvas,))[0]
        assert d_own is not None
        return d_own.to(saved.dtype), d_weight, d_bias

    def _send_back(self, comm: Communicator, saved: _Saved, dy: torch.Tensor, kernel: torch.Tensor) -> Flight:
        """Start sending the cotangents of the strips to whom they belong."""
        backs = [torch.zeros_like(strip) for strip in saved.strips]
        for piece in self._pieces:
            canvas, part = _canvas(piece, saved.strips, saved.seen), self._outputs(dy, piece)
            tapped, only = _tapped(kernel, piece), (True, False, False)
            if taps.in_place(kernel, self.groups):
                d_canvas = taps.back(canvas, tapped, part, *self._steps)
            else:
                d_canvas = self._differentiate(part, canvas, tapped, (0, 0), only)[0]
            both = piece.share.inputs.intersect(piece.box)
            _at(backs[piece.index], both, piece.box).copy_(_at(d_canvas, both, piece.share.inputs))
        return self.halo.start_back(comm, saved.seen, backs)

    def _add_strips(self, d_weight: torch.Tensor, saved: _Saved, dy: torch.Tensor, kernel: torch.Tensor) -> None:
        """Add what the strips give to the weight's cotangent, each through the taps that reach it."""
        for piece in self._pieces:
            canvas, part = _canvas(piece, saved.strips, saved.seen), self._outputs(dy, piece)
            tapped, only = _tapped(d_weight, piece), (False, True, False)
            if taps.in_place(d_weight, self.groups):
                taps.add_to_weight(tapped, canvas, part, *self._steps)
            else:
                tapped.add_(self._differentiate(part, canvas, _tapped(kernel, piece), (0, 0), only)[1])

    def _widened(self, d_seen: torch.Tensor, saved: _Saved) -> torch.Tensor:
        """Return the cotangent of the whole own part, in its type: zero where no window touches it."""
        if d_seen.shape == saved.shape:
            return d_seen.to(saved.dtype)
        result = like(saved.seen, list(saved.shape)).to(saved.dtype).zero_()
        assert self.own is not None
        result[:, :, self.own.start[0] :, self.own.start[1] :] = d_seen
        return result

    def _differentiate(
        self, dy: torch.Tensor, tensor: torch.Tensor, kernel: torch.Tensor, padding: tuple[int, int], mask: Mask
    ) -> Any:
        stride, dilation = self._steps
        return torch.ops.aten.convolution_backward(
            dy, tensor, kernel, [kernel.shape[0]], stride, padding, dilation, False, (0, 0), self.groups, mask
        )

    @property
    def _steps(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(stride, dilation), each (y, x)."""
        y, x = self.window.y, self.window.x
        return (y.stride, x.stride), (y.dilation, x.dilation)

    def _outputs(self, tensor: torch.Tensor, piece: _Piece) -> torch.Tensor:
        return _at(tensor, piece.share.outputs, self.output)


def _computed_in(tensor: torch.Tensor) -> torch.dtype:
    """Return the type in which autocast, if it is on, has a convolution of this map computed."""
    device = tensor.device.type
    if tensor.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def _at(tensor: torch.Tensor, box: Box, origin: Box) -> torch.Tensor:
    """Return the pixels of ``box`` in a tensor whose first pixel is that of ``origin``."""
    y, x = box.relative_to(origin).slices()
    return tensor[:, :, y, x]


def _tapped(kernel: torch.Tensor, piece: _Piece) -> torch.Tensor:
    y, x = piece.share.taps.slices()
    return kernel[:, :, y, x]


def _canvas(piece: _Piece, strips: tuple[torch.Tensor, ...], own: torch.Tensor) -> torch.Tensor:
    """Return the strip alone on what its taps cover, laid out as ``own`` is."""
    strip, inputs = strips[piece.index], piece.share.inputs
    canvas = like(own, [*own.shape[:2], *inputs.shape])
    if inputs != piece.box:
        canvas.zero_()
    both = inputs.intersect(piece.box)
    _at(canvas, both, inputs).copy_(_at(strip, both, piece.box))
    return canvas
