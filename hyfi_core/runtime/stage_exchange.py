"""Stage exchange: the values and cotangents that travel between stages, as one rank sends and receives them.

Receives are posted and sends are started by the schedule; nothing here waits but ``values`` and ``cotangents``, for
what a forward or a backward needs now. Between two stages on the same rank a buffer is handed over as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hyfi_core.comm.base import Message, Pending
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.ops.boundary import BoundaryTransfer, Pieces, pack
from hyfi_core.plan.placement import Placement

Edge = tuple[int, int]
_Key = tuple[Edge, int, int, bool]


@dataclass
class _Arrival:
    buffers: dict[int, torch.Tensor]
    pending: Pending


class StageExchange:
    """Sends and receives of one step.

    Args:
        boundaries: (from, to) -> what travels there.
        placement: which ranks hold which stage.
        comm: the ranks of the replica.
        device: where buffers are made.

    Attributes:
        device: the same.
    """

    def __init__(
        self,
        boundaries: Mapping[Edge, BoundaryTransfer],
        placement: Placement,
        comm: CountedCommunicator,
        device: torch.device,
    ) -> None:
        self._boundaries = boundaries
        self._placement = placement
        self._comm = comm.of("stage")
        self.device = device
        self._arrivals: dict[_Key, _Arrival] = {}
        self._local: dict[tuple[_Key, int], torch.Tensor] = {}
        self._leaving: list[tuple[Pending, list[Message]]] = []

    def send(self, edge: Edge, direction: int, microbatch: int, values: Mapping[str, torch.Tensor], back: bool) -> None:
        """Start sending what this rank holds of the values (or, ``back``, of their cotangents)."""
        position, pieces, peers = self._side(edge, direction, back, at_source=not back)
        sends = []
        for other, chosen in pieces.items():
            buffer = pack(self._boundaries[edge], position, chosen, values, at_source=not back)
            if peers[other] == self._comm.rank:
                self._local[(edge, direction, microbatch, back), position] = buffer
            else:
                sends.append(Message(peers[other], buffer))
        if sends:
            self._leaving.append((self._comm.exchange(sends, []), sends))
        self._leaving = [item for item in self._leaving if not item[0].test()]

    def expect(self, edge: Edge, direction: int, microbatch: int, back: bool) -> None:
        """Post the receives of what the other stage sends to this rank."""
        _, pieces, peers = self._side(edge, direction, back, at_source=back)
        boundary = self._boundaries[edge]
        buffers = {
            other: boundary.buffer(p, self.device) for other, p in pieces.items() if peers[other] != self._comm.rank
        }
        receives = [Message(peers[other], buffer) for other, buffer in buffers.items()]
        self._arrivals[edge, direction, microbatch, back] = _Arrival(buffers, self._comm.exchange([], receives))

    def values(self, stage: int, direction: int, microbatch: int) -> dict[str, torch.Tensor]:
        """Return the values that a stage takes from others, when they have come."""
        found: dict[str, torch.Tensor] = {}
        for edge, boundary in self._boundaries.items():
            if edge[1] == stage:
                position, buffers = self._collect(edge, direction, microbatch, back=False)
                found.update(boundary.arrived(position, buffers))
        return found

    def cotangents(self, stage: int, direction: int, microbatch: int) -> dict[str, torch.Tensor]:
        """Return the cotangents of what a stage gave to others, added up, when they have come."""
        found: dict[str, torch.Tensor] = {}
        for edge, boundary in self._boundaries.items():
            if edge[0] == stage:
                position, buffers = self._collect(edge, direction, microbatch, back=True)
                for name, cotangent in boundary.returned(position, buffers).items():
                    found[name] = found[name] + cotangent if name in found else cotangent
        return found

    def finish(self) -> None:
        """Return when everything that was sent has left; what was not asked for stays."""
        for pending, _ in self._leaving:
            pending.wait()
        self._leaving.clear()

    def _collect(self, edge: Edge, direction: int, microbatch: int, back: bool) -> tuple[int, dict[int, torch.Tensor]]:
        key = (edge, direction, microbatch, back)
        position, pieces, peers = self._side(edge, direction, back, at_source=back)
        arrival = self._arrivals.pop(key)
        arrival.pending.wait()
        for other in pieces:
            if peers[other] == self._comm.rank:
                arrival.buffers[other] = self._local.pop((key, other))
        return position, arrival.buffers

    def _side(self, edge: Edge, direction: int, back: bool, at_source: bool) -> tuple[int, Pieces, tuple[int, ...]]:
        """Return (this rank's position in its stage, pieces by position in the other stage, that stage's ranks)."""
        here, there = edge if at_source else edge[::-1]
        position = self._placement.group(here, direction).index(self._comm.rank)
        boundary = self._boundaries[edge]
        pieces = boundary.outgoing(position, back) if at_source else boundary.incoming(position, back)
        return position, pieces, self._placement.group(there, direction)
