"""Redistribution of activations between ranks, and its adjoint, which adds the returned cotangents.

forward                              backward (the adjoint)
own ──copy──▶ need                   own ◀──add── cotangent of need
peer's strip ──message──▶ need       peer ◀──message── cotangent of its strip, added there
outside the map: the fill value      outside the map: dropped
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from hyfi_core.comm.base import Communicator, Message, Pending, Tensors
from hyfi_core.comm.waits import Waits
from hyfi_core.ops.base import Cotangents, NeedsGrad
from hyfi_core.ops.buffers import Buffers
from hyfi_core.ops.cut import copy_box
from hyfi_core.plan.box import Box
from hyfi_core.plan.transfer import Transfer


@dataclass(frozen=True)
class PendingStrips:
    """Strips that are being sent and received.

    Attributes:
        pending: the messages; None if there is nothing to wait for.
        strips: received tensors, in the order of the transfer; valid after ``wait``.
        left: called once all messages have been sent.
    """

    pending: Pending | None
    strips: tuple[torch.Tensor, ...]
    left: Callable[[], None] = lambda: None

    def wait(self) -> Waits[tuple[torch.Tensor, ...]]:
        """Wait and return the received strips; call it once."""
        if self.pending is not None:
            yield self.pending
        self.left()
        return self.strips


@dataclass(frozen=True)
class Redistribute:
    """Redistributes a map from the boxes that ranks have to those that they need.

    Attributes:
        transfer: what this rank keeps, sends and receives.
        dims: which tensor dims are (y, x).
        fill: value outside the map (0 for a convolution, -inf for a maximum).
        in_turn: whether ranks are cells that take turns: then nothing is computed during an exchange, and received
            strips may keep the memory in which they arrive.
    """

    in_turn: ClassVar[bool] = False

    transfer: Transfer
    dims: tuple[int, int] = (2, 3)
    fill: float = 0.0

    def forward(self, comm: Communicator, inputs: Tensors) -> Waits[tuple[Tensors, Any]]:
        """Return (the box that this rank needs,); saves only shapes."""
        (own,) = inputs
        transfer = self.transfer
        saved = (own.shape, own.dtype, own.device)
        # Nothing moves: the tensor itself, which is why ``own_cotangents`` is False then.
        if transfer.idle:
            return (own,), saved
        pending_strips = yield from self.start(comm, own)
        # While strips are on their way, own pixels are copied.
        result = self.placed(own)
        self._place(result, (yield from pending_strips.wait()))
        self.give_back(pending_strips.strips)
        return (result,), saved

    def assembled(self, own: torch.Tensor, strips: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the box that this rank needs, copied from its own part and received strips."""
        result = self.placed(own)
        self._place(result, strips)
        return result

    def unset(self, own: torch.Tensor) -> torch.Tensor:
        """Return memory for the box that this rank needs, in the format of ``own``."""
        return own if self.transfer.idle else like(own, self._sized(own.shape, self.transfer.need))

    def _place(self, result: torch.Tensor, strips: Sequence[torch.Tensor]) -> None:
        for strip, arrived in zip(self.transfer.receives, strips, strict=True):
            copy_box(self._view(result, strip.box, self.transfer.need), arrived)

    def placed(self, own: torch.Tensor) -> torch.Tensor:
        """Return the box that this rank needs, with own pixels and fill values; strips of other ranks are not set.

        If it has exactly that box and sends nothing (``idle``), this is ``own`` itself, not a copy.
        """
        transfer = self.transfer
        if transfer.idle:
            return own
        result = self._canvas(own)
        copy_box(self._view(result, transfer.kept, transfer.need), self._view(own, transfer.kept, transfer.have))
        return result

    def backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> Waits[Cotangents]:
        """Return (the cotangent of the own part,): this rank's plus those of other ranks."""
        shape, dtype, device = saved
        transfer = self.transfer
        (cotangent,) = cotangents
        if transfer.idle:
            return (cotangent,)
        if cotangent is None:
            # A rank without a cotangent still sends its strips: their owners wait.
            cotangent = torch.zeros(self._sized(shape, transfer.need), dtype=dtype, device=device)
        strips = [self._view(cotangent, s.box, transfer.need) for s in transfer.receives]
        pending_strips = yield from self.start_back(comm, cotangent, strips)
        result = self._own_cotangent(cotangent, shape)
        yield from self.add_back(result, pending_strips)
        return (result,)

    def start(self, comm: Communicator, own: torch.Tensor) -> Waits[PendingStrips]:
        """Start sending the strips of ``own`` that others need, and receiving those that this rank needs.

        The caller owns the received strips until it passes them to ``give_back``.
        """
        transfer = self.transfer
        outgoing = [(s.peer, self._view(own, s.box, transfer.have)) for s in transfer.sends]
        # Messages are contiguous: memory formats may differ between neighbours.
        receives = [Message(s.peer, self._memory_for(own, s.box), moves=self.in_turn) for s in transfer.receives]
        return (yield from self._start(comm, outgoing, receives))

    def start_back(
        self, comm: Communicator, like: torch.Tensor, strips: Sequence[torch.Tensor]
    ) -> Waits[PendingStrips]:
        """Start sending the cotangents of received strips to their owners.

        Args:
            comm: the ranks.
            like: a tensor with the batch, channels, dtype and device of the strips.
            strips: received strips in the order of ``transfer.receives``.
        """
        transfer = self.transfer
        outgoing = [(s.peer, back) for s, back in zip(transfer.receives, strips, strict=True)]
        receives = [Message(s.peer, self._memory_for(like, s.box), moves=self.in_turn) for s in transfer.sends]
        return (yield from self._start(comm, outgoing, receives))

    def give_back(self, strips: Iterable[torch.Tensor]) -> None:
        """Release the memory of received strips that are no longer read."""
        self._buffers.give_back(strips)

    def add_back(self, cotangent: torch.Tensor, pending_strips: PendingStrips) -> Waits[None]:
        """Add the strips of ``start_back`` to the cotangent of the own part, in place."""
        for strip, arrived in zip(self.transfer.sends, (yield from pending_strips.wait()), strict=True):
            self._view(cotangent, strip.box, self.transfer.have).add_(arrived)
        self.give_back(pending_strips.strips)

    @property
    def own_cotangents(self) -> bool:
        """Whether backward returns new memory; if nothing moves, it returns its argument."""
        return not self.transfer.idle

    @cached_property
    def _buffers(self) -> Buffers:
        return Buffers()

    def _start(
        self, comm: Communicator, outgoing: Sequence[tuple[int, torch.Tensor]], receives: Sequence[Message]
    ) -> Waits[PendingStrips]:
        """Start the messages of strips.

        Args:
            comm: the ranks.
            outgoing: (peer, view of the strip to send).
            receives: messages with memory for the strips to receive.
        """
        sends = [Message(peer, self._buffers.dense(view)) for peer, view in outgoing]
        pending = comm.exchange(sends, receives) if sends or receives else None
        # Copies only: a strip that was contiguous is a view of the caller's tensor and must not be given back.
        staged = [sent.tensor for sent, (_, view) in zip(sends, outgoing, strict=True) if sent.tensor is not view]
        strips = tuple(message.tensor for message in receives)
        # Ranks of one thread compute one after another: there is nothing to hide a message behind.
        if pending is not None and self.in_turn:
            yield pending
            pending = None
        return PendingStrips(pending, strips, lambda: self._buffers.give_back(staged))

    def _memory_for(self, like: torch.Tensor, box: Box) -> torch.Tensor:
        """Return memory for a strip; ``like``: a tensor with its batch, channels, dtype and device."""
        return self._buffers.take(self._sized(like.shape, box), like.dtype, like.device)

    def _own_cotangent(self, cotangent: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return this rank's contribution to the cotangent of its own part; zero for pixels that it does not need."""
        transfer = self.transfer
        own_pixels = self._view(cotangent, transfer.kept, transfer.need)
        # A copy, as received strips are added to it, and the caller may still read the cotangent.
        if transfer.kept == transfer.have and not transfer.have.empty:
            return copy_box(like(cotangent, list(own_pixels.shape)), own_pixels)
        result = like(cotangent, self._sized(shape, transfer.have)).zero_()
        copy_box(self._view(result, transfer.kept, transfer.have), own_pixels)
        return result

    def _canvas(self, own: torch.Tensor) -> torch.Tensor:
        """Return a tensor for the needed box in which only the pixels outside of the map are set."""
        transfer = self.transfer
        result = like(own, self._sized(own.shape, transfer.need))
        if not transfer.map.contains(transfer.need):
            self._fill_outside(result)
        return result

    def _fill_outside(self, result: torch.Tensor) -> None:
        """Set the bands of the needed box outside of the map."""
        for band in self._bands_outside:
            self._view(result, band, self.transfer.need).fill_(self.fill)

    @cached_property
    def _bands_outside(self) -> tuple[Box, ...]:
        """At most four bands of the needed box outside of the map."""
        need, map_box = self.transfer.need, self.transfer.map
        # Corners are in two bands and filled twice, with the same value.
        bands = (
            Box(need.y0, min(map_box.y0, need.y1), need.x0, need.x1),
            Box(max(map_box.y1, need.y0), need.y1, need.x0, need.x1),
            Box(need.y0, need.y1, need.x0, min(map_box.x0, need.x1)),
            Box(need.y0, need.y1, max(map_box.x1, need.x0), need.x1),
        )
        return tuple(band for band in bands if not band.empty)

    def _sized(self, shape: torch.Size, box: Box) -> list[int]:
        sides = list(shape)
        sides[self.dims[0]], sides[self.dims[1]] = box.shape
        return sides

    def _view(self, tensor: torch.Tensor, box: Box, origin: Box) -> torch.Tensor:
        """Return the pixels of ``box`` in a tensor whose first pixel is that of ``origin``."""
        # An empty box may lie anywhere, even outside of the tensor.
        if box.empty:
            return tensor.narrow(self.dims[0], 0, 0).narrow(self.dims[1], 0, 0)
        local = box.relative_to(origin)
        return tensor.narrow(self.dims[0], local.y0, local.height).narrow(self.dims[1], local.x0, local.width)


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor of four dims is channels-last, and not contiguous as well."""
    # With one channel or one pixel, strides fit both formats: then it is the plain one.
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _format_of(tensor: torch.Tensor) -> torch.memory_format:
    return torch.channels_last if is_channels_last(tensor) else torch.contiguous_format


def like(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Return an empty tensor of another shape in the same memory format."""
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=_format_of(tensor))
