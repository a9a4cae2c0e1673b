"""Stage exchange: sends and receives values and cotangents between stages, on one rank.

Receives are posted and sends are started by the schedule; only ``values`` and ``cotangents`` wait, for the inputs of a
forward or backward. Between two stages on the same rank, values are handed over without a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hyfi_core.comm.base import Message, Pending
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.comm.waits import Waits
from hyfi_core.ops.boundary import BoundaryTransfer, Delivery, HandedOver, Pieces, cut_out, pack
from hyfi_core.plan.placement import Placement

Edge = tuple[int, int]
_MessageKey = tuple[Edge, int, int, bool]
"""(edge, direction, micro-batch, whether these are cotangents)."""


@dataclass
class _Arrival:
    """Posted receives: position in the other stage -> buffer; all are filled when ``pending`` is complete."""

    buffers: dict[int, torch.Tensor]
    pending: Pending


@dataclass
class _Departure:
    """Pending messages of one send, and the buffers into which they were packed."""

    boundary: BoundaryTransfer
    pending: Pending
    packed: list[torch.Tensor]

    def left(self) -> bool:
        """Whether all have been sent; if so, give their buffers back."""
        if not self.pending.test():
            return False
        self.boundary.give_back(self.packed)
        self.packed = []
        return True


class StageExchange:
    """Sends and receives of one step.

    Args:
        boundaries: (from, to) -> boundary transfer.
        placement: which ranks hold which stage.
        comm: the ranks of the plane.
        device: device of buffers.
        moves: whether values may leave memory after they have been sent: then they are handed over as copies.

    Attributes:
        device: see above.
    """

    def __init__(
        self,
        boundaries: Mapping[Edge, BoundaryTransfer],
        placement: Placement,
        comm: CountedCommunicator,
        device: torch.device,
        moves: bool = False,
    ) -> None:
        self._boundaries = boundaries
        self._placement = placement
        self._comm = comm.of("stage")
        self.device = device
        self._moves = moves  # whether values are copied before they are handed over on this rank
        self._arrivals: dict[_MessageKey, _Arrival] = {}  # posted receives
        self._local: dict[tuple[_MessageKey, int], HandedOver] = {}  # between two stages of this rank
        self._leaving: list[_Departure] = []  # sends that have not ended

    def send(self, edge: Edge, direction: int, microbatch: int, values: Mapping[str, torch.Tensor], back: bool) -> None:
        """Start sending this rank's parts of the values (or with ``back``, of their cotangents)."""
        position, pieces, other_ranks = self._side(edge, direction, back, at_source=not back)
        boundary, sends, packed = self._boundaries[edge], [], []
        for other_position, chosen in pieces.items():
            if other_ranks[other_position] == self._comm.rank:  # this rank holds both stages
                parts = cut_out(boundary, position, chosen, values, at_source=not back)
                handed = HandedOver([part.clone() for part in parts] if self._moves else parts, self._moves)
                self._local[(edge, direction, microbatch, back), position] = handed
                continue
            buffer = pack(boundary, position, chosen, values, at_source=not back)
            sends.append(Message(other_ranks[other_position], buffer))
            packed += [buffer] if len(chosen) > 1 else []  # a single piece may be the value itself
        if sends:
            self._leaving.append(_Departure(boundary, self._comm.exchange(sends, []), packed))
        # No send is waited for before the end of the step, so buffers of earlier ones are given back here.
        self._leaving = [item for item in self._leaving if not item.left()]

    def expect(self, edge: Edge, direction: int, microbatch: int, back: bool) -> None:
        """Post the receives of messages from the other stage."""
        # Values arrive at the target of an edge, cotangents (``back``) at its source.
        _, pieces, other_ranks = self._side(edge, direction, back, at_source=back)
        boundary = self._boundaries[edge]
        buffers = {
            other_position: boundary.buffer(chosen, self.device)
            for other_position, chosen in pieces.items()
            if other_ranks[other_position] != self._comm.rank
        }
        receives = [Message(other_ranks[other_position], buffer) for other_position, buffer in buffers.items()]
        self._arrivals[edge, direction, microbatch, back] = _Arrival(buffers, self._comm.exchange([], receives))

    def values(self, stage: int, direction: int, microbatch: int) -> Waits[dict[str, torch.Tensor]]:
        """Wait for the values that a stage receives from others, and return them; they may only be read."""
        received: dict[str, torch.Tensor] = {}
        for edge, boundary in self._boundaries.items():
            _, target = edge
            if target == stage:
                position, messages = yield from self._collect(edge, direction, microbatch, back=False)
                received.update(boundary.arrived(position, messages))
                self._unpacked(edge, messages)
        return received

    def cotangents(self, stage: int, direction: int, microbatch: int) -> Waits[dict[str, torch.Tensor]]:
        """Wait for the cotangents of the values that a stage has sent, and return their sums."""
        sums: dict[str, torch.Tensor] = {}
        for edge, boundary in self._boundaries.items():
            source, _ = edge
            if source == stage:
                position, messages = yield from self._collect(edge, direction, microbatch, back=True)
                for name, cotangent in boundary.returned(position, messages).items():
                    # In place: only this sum refers to the memory of the first cotangent.
                    sums[name] = sums[name].add_(cotangent) if name in sums else cotangent
                self._unpacked(edge, messages)
        return sums

    def finish(self) -> None:
        """Wait for all sends."""
        for item in self._leaving:
            item.pending.wait()
            # Gives the packed buffers back.
            item.left()
        self._leaving.clear()

    def _collect(
        self, edge: Edge, direction: int, microbatch: int, back: bool
    ) -> Waits[tuple[int, dict[int, Delivery]]]:
        """Wait for a boundary transfer; return (this rank's position, position in the other stage -> what it sent)."""
        key = (edge, direction, microbatch, back)
        position, pieces, other_ranks = self._side(edge, direction, back, at_source=back)
        arrival = self._arrivals.pop(key)
        # The only wait: the schedule has posted these receives long before.
        yield arrival.pending
        messages: dict[int, Delivery] = {**arrival.buffers}
        for other_position in pieces:
            if other_ranks[other_position] == self._comm.rank:  # handed over without a message
                messages[other_position] = self._local.pop((key, other_position))
        return position, messages

    def _unpacked(self, edge: Edge, messages: Mapping[int, Delivery]) -> None:
        """Release the buffers of messages whose values have been copied."""
        self._boundaries[edge].give_back(m for m in messages.values() if not isinstance(m, HandedOver))

    def _side(self, edge: Edge, direction: int, back: bool, at_source: bool) -> tuple[int, Pieces, tuple[int, ...]]:
        """Return (this rank's position in its stage, pieces by position in the other stage, that stage's ranks)."""
        own, opposite = edge if at_source else edge[::-1]
        position = self._placement.group(own, direction).index(self._comm.rank)
        boundary = self._boundaries[edge]
        pieces = boundary.outgoing(position, back) if at_source else boundary.incoming(position, back)
        return position, pieces, self._placement.group(opposite, direction)
