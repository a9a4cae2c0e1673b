"""Convolution of a part, overlapped with its halo exchange.

    forward    start ──▶ own part, padded with zeros          ──▶ finish ──▶ each strip's contribution added to the
                                                                            outputs that it reaches
    backward   cotangents of the strips ──▶ start ──▶ cotangents of own part and weight ──▶ finish, add received

A convolution is linear, so the own part and each strip can be convolved separately and added, without a padded copy:
the own part is shared with its producer, and received strips are small. If parts are small, strips are relatively
large: then everything is first copied to one canvas, as in plain redistribution. The cells of a GPU do so, too: they
wait for no message, and one kernel on a canvas takes less time than starting twenty on strips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from hyfi_core.comm.base import Communicator, Tensors
from hyfi_core.comm.progress import polled
from hyfi_core.comm.waits import Waits
from hyfi_core.ops import taps
from hyfi_core.ops.base import Cotangents, HoldsBuffers, NeedsGrad, Recomputable, Rest, SplitBackward
from hyfi_core.ops.cut import at
from hyfi_core.ops.redistribute import PendingStrips, Redistribute, like
from hyfi_core.plan.box import Box
from hyfi_core.plan.window import Window
from hyfi_core.plan.window_calls import OwnCall, StripCall, faster_apart, own_call, strip_call

# Which cotangents to compute: of map, weight and bias.
OutputMask = tuple[bool, bool, bool]
_MAP_ONLY, _WEIGHT_ONLY = (True, False, False), (False, True, False)
_WeightBack = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class _SavedConvolution:
    """Saved for backward.

    Attributes:
        conv_input: the input of the native call: own part or canvas; the own part if the canvas is built again.
        strips: received strips; none if the canvas is kept.
        weight: the weight as it was passed.
        dtype: dtype of the input map; under autocast the others differ.
        shape: shape of the input map.
    """

    conv_input: torch.Tensor
    strips: tuple[torch.Tensor, ...]
    weight: torch.Tensor
    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class _Back:
    """Arguments of a backward.

    Attributes:
        saved: what forward has saved.
        dy: cotangent of the output, in the dtype of the computation.
        kernel: the weight in that dtype.
        mask: which cotangents are needed: of map, weight, bias.
    """

    saved: _SavedConvolution
    dy: torch.Tensor
    kernel: torch.Tensor
    mask: OutputMask


@dataclass(frozen=True)
class _ReachingStrip:
    """A received strip that reaches outputs of this rank.

    Attributes:
        index: among the received strips.
        box: box of the strip.
        call: the call that gives its contribution.
    """

    index: int
    box: Box
    call: StripCall


@dataclass(frozen=True)
class Convolution(SplitBackward, HoldsBuffers, Recomputable):
    """``conv2d`` on a part. Inputs: map, weight, bias or None.

    Attributes:
        halo: halo exchange of the input.
        window: window of the convolution.
        output: this rank's part of the output; may be empty.
        canvas_padding: (y, x) padding that is left to the native call.
        groups: number of groups of the convolution.
        apart: whether own part and strips may be computed separately; False: always on a canvas.
        keeps_canvas: whether a canvas is kept for backward; False: backward builds it again from own part and strips.
    """

    own_cotangents: ClassVar[bool] = True

    halo: Redistribute
    window: Window
    output: Box
    canvas_padding: tuple[int, int]
    groups: int
    apart: bool = True
    keeps_canvas: bool = True

    @cached_property
    def own(self) -> OwnCall | None:
        """The call on the own part; None if a canvas is better or necessary."""
        transfer = self.halo.transfer
        if not self.apart or not faster_apart(transfer):
            return None
        return own_call(self.window, transfer.have, self.output)

    @cached_property
    def _reaching_strips(self) -> tuple[_ReachingStrip, ...]:
        strips = enumerate(self.halo.transfer.receives)
        reaching = ((index, strip.box, strip_call(self.window, strip.box, self.output)) for index, strip in strips)
        return tuple(_ReachingStrip(index, box, call) for index, box, call in reaching if call is not None)

    # -- forward

    def forward(self, comm: Communicator, inputs: Tensors) -> Waits[tuple[Tensors, Any]]:
        """Return (convolved part,); saves the own part (without a copy) and the strips."""
        image, weight, bias = inputs
        # Cast here: on CPUs, autocast does not know ``aten.convolution``, which is called below.
        own = image.to(_computed_in(image))
        kernel = weight.to(own.dtype)
        offset = None if bias is None else bias.to(own.dtype)
        if self.own is None and self.keeps_canvas:
            (canvas,), _ = yield from self.halo.forward(comm, (own,))
            result = self._convolve(canvas, kernel, offset, self.canvas_padding)
            return (result,), _SavedConvolution(canvas, (), weight, image.dtype, image.shape)
        pending_strips = yield from self.halo.start(comm, own)
        if self.own is None:
            strips = yield from pending_strips.wait()
            result = self._convolve(self.halo.assembled(own, strips), kernel, offset, self.canvas_padding)
            return (result,), _SavedConvolution(own, strips, weight, image.dtype, image.shape)
        # With a stride, the first own window may begin after the first own pixels: without those that none reads.
        conv_input = own[:, :, self.own.start[0] :, self.own.start[1] :]
        with polled(pending_strips.pending):
            result = self._convolve(conv_input, kernel, offset, self.own.padding)
        strips = yield from pending_strips.wait()
        self._add_reached(result, kernel, conv_input, strips)
        return (result,), _SavedConvolution(conv_input, strips, weight, image.dtype, image.shape)

    def recompute(self, inputs: Tensors, saved: _SavedConvolution) -> torch.Tensor:
        """Return the convolved part again, from own part and strips; see ``ops.base.Recomputable``."""
        conv_input, kernel = saved.conv_input, saved.weight.to(saved.conv_input.dtype)
        offset = None if inputs[2] is None else inputs[2].to(conv_input.dtype)
        if self.own is None:  # own part and strips were convolved on one canvas
            return self._convolve(self._native_input(saved), kernel, offset, self.canvas_padding)
        result = self._convolve(conv_input, kernel, offset, self.own.padding)
        self._add_reached(result, kernel, conv_input, saved.strips)
        return result

    def flops_of_value(self, shapes: Sequence[Sequence[int]]) -> float:
        """Return two operations for each weight of an output channel; see ``ops.base.Recomputable``."""
        return 2.0 * prod(shapes[1][1:])

    def _native_input(self, saved: _SavedConvolution, is_read: bool = True) -> torch.Tensor:
        """Return the input of the native call: as saved, or a canvas built again, without values unless ``is_read``."""
        if self.own is not None or self.keeps_canvas:
            return saved.conv_input
        return self.halo.assembled(saved.conv_input, saved.strips) if is_read else self.halo.unset(saved.conv_input)

    def _add_reached(
        self, result: torch.Tensor, kernel: torch.Tensor, conv_input: torch.Tensor, strips: tuple[torch.Tensor, ...]
    ) -> None:
        """Add to this rank's ``result`` what received strips contribute, each to the outputs whose windows reach it."""
        for piece in self._reaching_strips:
            canvas, reading_taps = _canvas(piece, strips, conv_input), _reading_taps(kernel, piece)
            outputs = self._outputs(result, piece)
            # Few pixels and large weights: products of matrices instead of a kernel that rearranges the weight.
            if taps.in_place(kernel, self.groups):
                taps.add_outputs(outputs, canvas, reading_taps, *self._stride_dilation)
            else:
                outputs.add_(self._convolve(canvas, reading_taps, None, (0, 0)))

    def _convolve(
        self, tensor: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, padding: tuple[int, int]
    ) -> torch.Tensor:
        """Return the convolution of ``tensor`` with (y, x) padding; an empty tensor if this rank has no outputs."""
        if self.output.empty:
            return tensor.new_empty((tensor.shape[0], kernel.shape[0], *self.output.shape))
        stride, dilation = self._stride_dilation
        if self._pads(tensor, padding):
            tensor, padding = F.pad(tensor, _sides(padding)), (0, 0)
        call = torch.ops.aten.convolution.default
        result: torch.Tensor = call(tensor, kernel, bias, stride, padding, dilation, False, (0, 0), self.groups)
        return result

    # -- backward

    def backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> Waits[Cotangents]:
        """Return the cotangents of map, weight and bias; the latter two as this rank's partial sums."""
        back = self._backward_arguments(saved, cotangents, needs_grad)
        d_own, weight_back = yield from self._map_back(comm, back, at_once=True)
        return d_own, *(weight_back or self._weight_back(back))

    def backward_of_map(
        self,
        comm: Communicator,
        saved: Any,
        cotangents: Cotangents,
        needs_grad: NeedsGrad = (),
        waits: bool = True,
    ) -> Waits[tuple[Cotangents, Rest]]:
        """Return (cotangent of the map, None, None), and the rest of the backward; see ``ops.base.SplitBackward``."""
        back = self._backward_arguments(saved, cotangents, needs_grad)
        d_own, weight_back = yield from self._map_back(comm, back, at_once=False, waits=waits)
        return (d_own, None, None), lambda: (None, *(weight_back or self._weight_back(back)))

    def give_back(self, saved: _SavedConvolution) -> None:
        """Release the strips."""
        self.halo.give_back(saved.strips)

    def _backward_arguments(self, saved: _SavedConvolution, cotangents: Cotangents, needs_grad: NeedsGrad) -> _Back:
        conv_input, dy = saved.conv_input, cotangents[0]
        if dy is None:
            dy = conv_input.new_zeros((conv_input.shape[0], saved.weight.shape[0], *self.output.shape))
        mask = (needs_grad[0], needs_grad[1], needs_grad[2]) if needs_grad else (True, True, True)
        return _Back(saved, dy.to(conv_input.dtype), saved.weight.to(conv_input.dtype), mask)

    def _map_back(
        self, comm: Communicator, back: _Back, at_once: bool, waits: bool = True
    ) -> Waits[tuple[torch.Tensor | None, _WeightBack | None]]:
        """Return the cotangent of the own part and, if computed during the exchange, those of weight and bias.

            send cotangents of strips ──▶ cotangent of own part ──▶ (weight and bias) ──▶ add what is received

        Args:
            comm: the ranks of the stage.
            back: arguments of the backward.
            at_once: whether to compute weight and bias during the exchange in any case. Without an exchange to compute
                them in (on a canvas, without messages, or if the map needs no cotangent), they are left to the caller.
            waits: without ``at_once``, whether to compute them if this rank would have to wait.
        """
        if not back.mask[0]:
            return None, None
        if self.own is None:
            d_canvas = self._differentiate(back, _MAP_ONLY)[0]
            saved = (back.saved.shape, back.saved.conv_input.dtype, back.saved.conv_input.device)
            (d_own,) = yield from self.halo.backward(comm, saved, (d_canvas,))
            assert d_own is not None
            return d_own.to(back.saved.dtype), None
        pending_strips, weight_back = (yield from self._send_back(comm, back)), None
        pending = pending_strips.pending
        with polled(pending):
            d_input = self._differentiate(back, _MAP_ONLY)[0]
        # While strips are on their way, the weight's cotangent is useful work; once they have arrived, it can wait.
        if pending is not None and (at_once or (waits and not pending.test())):
            with polled(pending):
                weight_back = self._weight_back(back)
        d_own = self._on_whole_part(d_input, back.saved)
        yield from self.halo.add_back(d_own, pending_strips)
        return d_own, weight_back

    def _weight_back(self, back: _Back) -> _WeightBack:
        """Return this rank's partial sums of the cotangents of weight and bias."""
        if not (back.mask[1] or back.mask[2]):
            return None, None
        _, d_weight, d_bias = self._differentiate(back, (False, *back.mask[1:]))
        # On a canvas, the native call has the strips, too. The bias needs none: its cotangent is a sum over outputs.
        if d_weight is not None and self.own is not None:
            self._add_strips(d_weight, back)
        return d_weight, d_bias

    def _send_back(self, comm: Communicator, back: _Back) -> Waits[PendingStrips]:
        """Start sending the cotangents of strips to their owners."""
        saved, dy, kernel = back.saved, back.dy, back.kernel
        # Zero where no window reads a strip.
        backs = [torch.zeros_like(strip) for strip in saved.strips]
        for piece in self._reaching_strips:
            canvas, part = _canvas(piece, saved.strips, saved.conv_input), self._outputs(dy, piece)
            reading_taps = _reading_taps(kernel, piece)
            if taps.in_place(kernel, self.groups):
                d_canvas = taps.back(canvas, reading_taps, part, *self._stride_dilation)
            else:
                d_canvas = self._native_back(part, canvas, reading_taps, (0, 0), _MAP_ONLY)[0]
            # The canvas may reach beyond the strip, into pixels of other strips, which have calls of their own.
            common = piece.call.inputs.intersect(piece.box)
            at(backs[piece.index], common, piece.box).copy_(at(d_canvas, common, piece.call.inputs))
        return (yield from self.halo.start_back(comm, saved.conv_input, backs))

    def _add_strips(self, d_weight: torch.Tensor, back: _Back) -> None:
        """Add to the weight's cotangent what received strips contribute, each to the taps that read it."""
        saved, dy, kernel = back.saved, back.dy, back.kernel
        for piece in self._reaching_strips:
            canvas, part = _canvas(piece, saved.strips, saved.conv_input), self._outputs(dy, piece)
            d_taps = _reading_taps(d_weight, piece)  # a view: what is added to it is added to ``d_weight``
            if taps.in_place(d_weight, self.groups):
                taps.add_to_weight(d_taps, canvas, part, *self._stride_dilation)
            else:
                d_taps.add_(self._native_back(part, canvas, _reading_taps(kernel, piece), (0, 0), _WEIGHT_ONLY)[1])

    def _on_whole_part(self, d_input: torch.Tensor, saved: _SavedConvolution) -> torch.Tensor:
        """Return the cotangent of the whole own part, zero where no window reads it, in the map's original dtype."""
        if d_input.shape == saved.shape:
            return d_input.to(saved.dtype)
        # Own pixels before ``start`` are read by no own window.
        result = like(saved.conv_input, list(saved.shape)).to(saved.dtype).zero_()
        assert self.own is not None
        result[:, :, self.own.start[0] :, self.own.start[1] :] = d_input
        return result

    def _differentiate(self, back: _Back, mask: OutputMask) -> Any:
        """Return the cotangents of the native call's inputs selected by ``mask``; None if it is empty."""
        # The cotangent of the map needs the input's shape alone.
        conv_input = self._native_input(back.saved, is_read=mask[1] and not self.output.empty)
        if self.output.empty:
            return torch.zeros_like(conv_input) if mask[0] else None, None, None
        padding = self.canvas_padding if self.own is None else self.own.padding
        return self._native_back(back.dy, conv_input, back.kernel, padding, mask)

    def _native_back(
        self, dy: torch.Tensor, tensor: torch.Tensor, kernel: torch.Tensor, padding: tuple[int, int], mask: OutputMask
    ) -> Any:
        """Return the cotangents of ``tensor``, kernel and bias, by PyTorch's call; None where ``mask`` has False."""
        stride, dilation = self._stride_dilation
        pads, size = self._pads(tensor, padding), tensor.shape[2:]
        if pads:
            tensor, (top, left), padding = F.pad(tensor, _sides(padding)), padding, (0, 0)
        d_tensor, *others = torch.ops.aten.convolution_backward(
            dy, tensor, kernel, [kernel.shape[0]], stride, padding, dilation, False, (0, 0), self.groups, mask
        )
        if pads and d_tensor is not None:
            d_tensor = d_tensor[:, :, top : top + size[0], left : left + size[1]]
        return d_tensor, *others

    def _pads(self, tensor: torch.Tensor, padding: tuple[int, int]) -> bool:
        """Whether padding is written to memory instead of left to the native call: see ``lowering.gpu_calls``."""
        return tensor.is_cuda and any(padding) and is_sparse(self.window)

    @property
    def _stride_dilation(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(stride, dilation), each (y, x)."""
        y, x = self.window.y, self.window.x
        return (y.stride, x.stride), (y.dilation, x.dilation)

    def _outputs(self, tensor: torch.Tensor, piece: _ReachingStrip) -> torch.Tensor:
        return at(tensor, piece.call.outputs, self.output)


def is_sparse(window: Window) -> bool:
    """Whether a window has stride and dilation."""
    return max(window.y.stride, window.x.stride) > 1 and max(window.y.dilation, window.x.dilation) > 1


def _sides(padding: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return (y, x) padding as ``F.pad`` takes it."""
    return padding[1], padding[1], padding[0], padding[0]


def _computed_in(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a convolution of this map is computed, under autocast if active."""
    device = tensor.device.type
    # As autocast itself, which leaves float64 as it is.
    if tensor.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype


def _reading_taps(kernel: torch.Tensor, piece: _ReachingStrip) -> torch.Tensor:
    """Return the view ``(O, I, h, w)`` of the taps that read a strip."""
    y, x = piece.call.taps.slices()
    return kernel[:, :, y, x]


def _canvas(piece: _ReachingStrip, strips: tuple[torch.Tensor, ...], own: torch.Tensor) -> torch.Tensor:
    """Return a strip on a canvas of all pixels that its taps read, zero outside of it, in the format of ``own``."""
    strip, inputs = strips[piece.index], piece.call.inputs
    # Taps may reach beyond the strip, to pixels that other calls contribute: zeros add nothing.
    canvas = like(own, [*own.shape[:2], *inputs.shape])
    if inputs != piece.box:
        canvas.zero_()
    common = inputs.intersect(piece.box)
    at(canvas, common, inputs).copy_(at(strip, common, piece.box))
    return canvas
