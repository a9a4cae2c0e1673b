"""Boundary transfer: sends values from the ranks of one stage to those of another, and their cotangents back.

    stage s, grid 2 x 2          stage t, grid 1 x 2
    ┌───┬───┐                    ┌───┬───┐
    │ 0 │ 1 │   ── boxes ──▶     │   │   │      each piece is sent directly from its owner to the ranks that need it;
    ├───┼───┤                    │ 0 │ 1 │      all pieces for one rank are in one message
    │ 2 │ 3 │   ◀── added ──     │   │   │
    └───┴───┘                    └───┴───┘

A replicated value is sent to rank j of the second stage by rank j mod m of the first; its cotangent is a sum over
ranks, so each rank returns its partial cotangent to the sender, which adds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from hyfi_core.comm.wire import as_sent, laid_out
from hyfi_core.ops.buffers import Buffers, is_kept
from hyfi_core.ops.cut import copy_box
from hyfi_core.plan.box import Box
from hyfi_core.plan.boxes import Boxes

# The size of complex128: ``view(dtype)`` of bytes needs a start that is a multiple of the item's size.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class BoundaryValue:
    """One value that is sent.

    Attributes:
        name: name of the value.
        shape: global, with height and width as separate dims.
        dtype: dtype in the message, and at the receiver.
        gradient: whether its cotangent is sent back.
        dims: which tensor dims are (y, x).
        have: the box of each rank of the first stage; None for a replicated value.
        need: the box of each rank of the second stage; None for a replicated value.
        folded: (first, last) of each range of dims that the local tensor has as one dim; the last range first.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    dims: tuple[int, int] = (2, 3)
    have: Boxes | None = None
    need: Boxes | None = None
    folded: tuple[tuple[int, int], ...] = ()

    def local_shape(self, box: Box | None) -> tuple[int, ...]:
        """Return the shape of a rank's part of the value."""
        sides = list(self.shape)
        if box is not None:
            sides[self.dims[0]], sides[self.dims[1]] = box.shape
        return tuple(sides)

    def opened(self, tensor: torch.Tensor, box: Box | None) -> torch.Tensor:
        """Return a rank's part with height and width as separate dims; a view where possible."""
        return tensor.reshape(self.local_shape(box)) if self.folded and box is not None else tensor

    def closed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the local form; the inverse of ``opened``."""
        for first, last in self.folded:
            tensor = tensor.flatten(first, last)
        return tensor

    def cut(self, tensor: torch.Tensor, box: Box | None, origin: Box | None) -> torch.Tensor:
        """Return the pixels of ``box`` in a tensor whose first pixel is that of ``origin``; a view."""
        if box is None or origin is None:
            return tensor
        local = box.relative_to(origin)
        return tensor.narrow(self.dims[0], local.y0, local.height).narrow(self.dims[1], local.x0, local.width)


@dataclass(frozen=True)
class BoundaryPiece:
    """A box of a value that two ranks of the two stages exchange; box None: the whole value."""

    value: BoundaryValue
    box: Box | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the message."""
        return self.value.local_shape(self.box)

    @property
    def bytes(self) -> int:
        """Length in the message, without padding for alignment."""
        count = self.value.dtype.itemsize
        for side in self.shape:
            count *= side
        return count


@dataclass(frozen=True)
class HandedOver:
    """Pieces of a boundary transfer that need no message, because both stages are on one rank.

    Attributes:
        tensors: tensors in the order of the pieces; views of the sender's values unless they are ``copied``.
        copied: whether they are copies, in memory that nothing else uses.
    """

    tensors: Sequence[torch.Tensor]
    copied: bool


Pieces = dict[int, tuple[BoundaryPiece, ...]]
Delivery = torch.Tensor | HandedOver
"""A message, or pieces without one."""


class _ReceivedPiece(NamedTuple):
    piece: BoundaryPiece
    tensor: torch.Tensor
    may_stay: bool  # whether the receiver may keep this memory: nothing else will use it


@dataclass(frozen=True)
class BoundaryTransfer:
    """The transfer of all values along one edge between two stages.

    Attributes:
        values: the values, in the order of the message.
        sources: number of ranks of the first stage.
        targets: number of ranks of the second stage.
        channels_last: whether four-dimensional values are sent and received in this format.
        device: device of values; a rank that receives nothing has an empty part there, too.
    """

    values: tuple[BoundaryValue, ...]
    sources: int
    targets: int
    channels_last: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def outgoing(self, source: int, back: bool = False) -> Pieces:
        """Return position in the second stage -> pieces that ``source`` sends there, or with ``back`` receives."""
        return self._pieces(source, at_source=True, back=back)

    def incoming(self, target: int, back: bool = False) -> Pieces:
        """Return position in the first stage -> pieces that ``target`` receives from there, or with ``back`` sends."""
        return self._pieces(target, at_source=False, back=back)

    def buffer(self, pieces: tuple[BoundaryPiece, ...], device: torch.device) -> torch.Tensor:
        """Return memory for a message of these pieces; the caller owns it until ``give_back``."""
        return self._buffers.take((_length(pieces),), torch.uint8, device)

    def give_back(self, buffers: Iterable[torch.Tensor]) -> None:
        """Release buffers whose messages have been sent or unpacked."""
        self._buffers.give_back(buffers)

    @cached_property
    def _buffers(self) -> Buffers:
        return Buffers()

    def box_on(self, value: BoundaryValue, position: int, at_source: bool) -> Box | None:
        """Return the box of a value on the rank at ``position`` of a stage; None for a replicated value.

        ``at_source``: of the first stage; else of the second.
        """
        boxes = value.have if at_source else value.need
        return None if boxes is None else boxes[position]

    def arrived(self, target: int, messages: Mapping[int, Delivery]) -> dict[str, torch.Tensor]:
        """Return the values of the rank at ``target`` from all that it has received.

        They may be read, but not changed: values of a stage on the same rank are views of that stage's memory.
        """
        received, result = _unpacked(self, self.incoming(target), messages, only_read=True), {}
        for value in self.values:
            box, parts = self.box_on(value, target, at_source=False), received.get(value.name, [])
            full = self._from_one_piece(value, box, parts)
            if full is None:
                full = self._canvas(value, box)
                # Pieces of different owners do not overlap, so each is copied.
                for part in parts:
                    copy_box(value.cut(full, part.piece.box, box), part.tensor)
            result[value.name] = value.closed(full)
        return result

    def returned(self, source: int, messages: Mapping[int, Delivery]) -> dict[str, torch.Tensor]:
        """Return the sums of the cotangents received by the rank at ``source``, in memory that may be overwritten."""
        received, result = _unpacked(self, self.outgoing(source, back=True), messages, only_read=False), {}
        for value in self.values:
            box, parts = self.box_on(value, source, at_source=True), received.get(value.name, [])
            # A rank that did not send a replicated value to any rank has no share of its cotangent.
            if not value.gradient or (box is None and not parts):
                continue
            full = self._from_one_piece(value, box, parts)
            if full is None:
                full = self._canvas(value, box).zero_()
                for part in parts:
                    # Pieces of cotangents overlap where halos of several receivers read the same pixel: they are added.
                    value.cut(full, part.piece.box, box).add_(part.tensor)
            result[value.name] = value.closed(full)
        return result

    def _from_one_piece(
        self, value: BoundaryValue, box: Box | None, parts: Sequence[_ReceivedPiece]
    ) -> torch.Tensor | None:
        """Return a value that has arrived as one piece, in this stage's memory format; None if it has several pieces.

        The result is a copy unless the piece's memory may be kept.

        Args:
            value: the value to return.
            box: this rank's part of it; None for a replicated value.
            parts: the pieces of the value that have arrived.
        """
        if len(parts) != 1:
            return None
        (part,) = parts
        if part.piece.shape != value.local_shape(box):
            return None
        order = self._format(part.tensor.dim())
        return part.tensor.contiguous(memory_format=order) if part.may_stay else part.tensor.clone(memory_format=order)

    def _format(self, dims: int) -> torch.memory_format:
        return torch.channels_last if self.channels_last and dims == 4 else torch.contiguous_format

    def _canvas(self, value: BoundaryValue, box: Box | None) -> torch.Tensor:
        """Return an unset tensor for a rank's part of a value."""
        shape = value.local_shape(box)
        return torch.empty(shape, dtype=value.dtype, device=self.device, memory_format=self._format(len(shape)))

    @cached_property
    def _planned(self) -> dict[tuple[int, bool, bool], Pieces]:
        return {}

    def _pieces(self, position: int, at_source: bool, back: bool) -> Pieces:
        """Return position in the other stage -> pieces exchanged with the rank at ``position``, in order of values.

        ``at_source``: whether ``position`` is in the source stage; ``back``: gradients, which some values do not have.
        """
        key = position, at_source, back
        # Both ends compute the pieces from the plan, in the same order: messages have no headers.
        if key not in self._planned:
            pieces: dict[int, list[BoundaryPiece]] = {}
            for value in self.values:
                if value.gradient or not back:
                    for peer, box in self._peers(value, position, at_source):
                        pieces.setdefault(peer, []).append(BoundaryPiece(value, box))
            self._planned[key] = {peer: tuple(pieces[peer]) for peer in sorted(pieces)}
        return self._planned[key]

    def _peers(self, value: BoundaryValue, position: int, at_source: bool) -> Iterable[tuple[int, Box | None]]:
        """Return (position in the other stage, box) for each rank with which a rank exchanges a part of a value."""
        if value.have is not None and value.need is not None:
            own, opposite = (value.have, value.need) if at_source else (value.need, value.have)
            return opposite.meeting(own[position])
        peers = range(position, self.targets, self.sources) if at_source else (position % self.sources,)
        return ((peer, None) for peer in peers)


def cut_out(
    boundary: BoundaryTransfer,
    position: int,
    pieces: tuple[BoundaryPiece, ...],
    tensors: Mapping[str, torch.Tensor],
    at_source: bool,
) -> list[torch.Tensor]:
    """Return pieces of this rank's values, in the dtype of the message; views where possible.

    Args:
        boundary: between the two stages.
        position: position of this rank in its stage.
        pieces: the pieces that it sends to one rank of the other stage.
        tensors: name -> this rank's part of the value, or of its cotangent; a missing one (a cotangent that was not
            computed) is zeros.
        at_source: whether this rank's stage is the first one: it sends values; else cotangents.
    """
    parts = []
    for piece in pieces:
        tensor = tensors.get(piece.value.name)
        if tensor is None:
            # The receiver expects these bytes: without them, all pieces that follow would be shifted.
            parts.append(torch.zeros(piece.shape, dtype=piece.value.dtype, device=boundary.device))
            continue
        origin = boundary.box_on(piece.value, position, at_source)
        # ``opened``: with height and width as separate dims, which the local tensor may have as one.
        parts.append(piece.value.cut(piece.value.opened(tensor, origin), piece.box, origin).to(piece.value.dtype))
    return parts


def pack(
    boundary: BoundaryTransfer,
    position: int,
    pieces: tuple[BoundaryPiece, ...],
    tensors: Mapping[str, torch.Tensor],
    at_source: bool,
) -> torch.Tensor:
    """Pack pieces of this rank's values into one message; see ``cut_out``."""
    parts = [
        laid_out(part, boundary.channels_last).reshape(-1).view(torch.uint8)
        for part in cut_out(boundary, position, pieces, tensors, at_source)
    ]
    # One piece is its own message: no copy into a buffer.
    if len(parts) == 1:
        return parts[0]
    buffer = boundary.buffer(pieces, parts[0].device)
    for (start, stop), part in zip(_places(pieces), parts, strict=True):
        buffer[start:stop].copy_(part)
    return buffer


def unpack(boundary: BoundaryTransfer, buffer: torch.Tensor, pieces: tuple[BoundaryPiece, ...]) -> list[torch.Tensor]:
    """Return the pieces of a message, as views of it."""
    return [
        as_sent(buffer[start:stop].view(piece.value.dtype), piece.shape, boundary.channels_last)
        for (start, stop), piece in zip(_places(pieces), pieces, strict=True)
    ]


def _unpacked(
    boundary: BoundaryTransfer, expected: Pieces, messages: Mapping[int, Delivery], only_read: bool
) -> dict[str, list[_ReceivedPiece]]:
    """Return name of a value -> its received pieces, views of the messages where possible.

    Args:
        boundary: between the two stages.
        expected: position in the other stage -> the pieces that it sends.
        messages: position in the other stage -> its message.
        only_read: whether the receiver does not change the values.
    """
    parts: dict[str, list[_ReceivedPiece]] = {}
    for position, pieces in expected.items():
        message = messages[position]
        if isinstance(message, HandedOver):
            # Tensors of a sender in this process, which may still use them unless they are copies.
            tensors, may_stay = message.tensors, only_read or message.copied
        else:
            # A buffer that is kept is used for the next message. One of several pieces must not stay, as a view: it
            # would keep the memory of all.
            tensors, may_stay = unpack(boundary, message, pieces), len(pieces) == 1 and not is_kept(message.device)
        for piece, tensor in zip(pieces, tensors, strict=True):
            parts.setdefault(piece.value.name, []).append(_ReceivedPiece(piece, tensor, may_stay))
    return parts


def _places(pieces: tuple[BoundaryPiece, ...]) -> list[tuple[int, int]]:
    """Return the byte range of each piece, aligned."""
    places, start = [], 0
    for piece in pieces:
        places.append((start, start + piece.bytes))
        start += -(-piece.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places


def _length(pieces: tuple[BoundaryPiece, ...]) -> int:
    return _places(pieces)[-1][1]
