"""The exchange of branches: each plane sends the values that it has computed to the planes that use them.

forward     plane 0: a ──▶ 1      plane 1: b ──▶ 0      afterwards both have a and b
backward    plane 0: ā + ā₁       plane 1: b̄ + b̄₀       cotangents return to the plane that has computed the value

The cotangent of a value that several planes hold is the sum over them, so the adjoint of a copy is a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from hyfi_core.comm.base import Communicator, Message, Tensors
from hyfi_core.comm.waits import Waits
from hyfi_core.comm.wire import as_sent, laid_out
from hyfi_core.ops.base import Cotangents, NeedsGrad

SMALL_BYTES = 1 << 16
"""Values of at most this many bytes, such as running statistics, share a message; larger ones go alone."""


@dataclass(frozen=True)
class PlaneValue:
    """A value that is sent from one plane to others.

    Attributes:
        name: name of the value.
        shape: shape of this rank's tensor.
        dtype: dtype in the run, so after autocast.
        owner: the plane that computes it.
        takers: the planes that receive it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: int
    takers: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a message with it."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PlaneExchange:
    """Sends values between the ranks that have the same position in all planes.

    Inputs are the values of this plane, outputs those of others, both in the order of ``values``.

    Attributes:
        values: all values that any plane sends.
        plane: index of this rank's plane.
        device: device of received tensors.
        channels_last: whether maps are received in this memory format.
        active: names of values whose cotangents are sent back.
    """

    values: tuple[PlaneValue, ...]
    plane: int
    device: torch.device
    channels_last: bool = False
    active: frozenset[str] = frozenset()
    own_cotangents = True

    @property
    def sent(self) -> tuple[PlaneValue, ...]:
        """Values of this plane."""
        return tuple(value for value in self.values if value.owner == self.plane)

    @property
    def received(self) -> tuple[PlaneValue, ...]:
        """Values that this plane receives."""
        return tuple(value for value in self.values if self.plane in value.takers)

    @property
    def largest_bytes(self) -> int:
        """The most bytes that any plane sends, or receives, in a forward."""
        planes = {plane for value in self.values for plane in (value.owner, *value.takers)}
        sent = [sum(v.nbytes * len(v.takers) for v in self.values if v.owner == plane) for plane in planes]
        received_bytes = [sum(v.nbytes for v in self.values if plane in v.takers) for plane in planes]
        return max(*sent, *received_bytes)

    def carrying(self, active: frozenset[str]) -> PlaneExchange:
        """Return the exchange for a program in which the values ``active`` have cotangents."""
        return replace(self, active=active.intersection(value.name for value in self.values))

    def forward(self, comm: Communicator, inputs: Tensors) -> Waits[tuple[Tensors, Any]]:
        """Return (the values of other planes); saves nothing. Received tensors are new memory."""
        own_values = {value.name: tensor for value, tensor in zip(self.sent, inputs, strict=True)}
        arrived = yield from self._swap(comm, self.values, own_values, back=False)
        # Values without elements are in no message.
        return tuple(arrived[v.name][0] if v.name in arrived else self._zeros(v) for v in self.received), None

    def backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> Waits[Cotangents]:
        """Return, for each sent value, the sum of its cotangents in other planes; None if it is inactive."""
        active_values = [value for value in self.values if value.name in self.active]
        own_cotangents = {}
        for value, cotangent in zip(self.received, cotangents, strict=True):
            # Zeros, not nothing: the owner waits for a message of this length.
            own_cotangents[value.name] = self._zeros(value) if cotangent is None else cotangent
        returned = yield from self._swap(comm, active_values, own_cotangents, back=True)
        return tuple(_total(returned[value.name]) if value.name in returned else None for value in self.sent)

    def _swap(
        self, comm: Communicator, values: Sequence[PlaneValue], own: Mapping[str, torch.Tensor], back: bool
    ) -> Waits[dict[str, list[torch.Tensor]]]:
        """Send this plane's tensors of ``values``; return name -> received tensors, one from each plane that sent it.

        With ``back``, the tensors are cotangents, which receivers send to the owner.
        """
        sends: list[Message] = []
        receives: list[Message] = []
        unpack: list[Callable[[], list[tuple[str, torch.Tensor]]]] = []
        # Both ends list the same values in the same order: messages have no tags or headers.
        for peer in sorted({plane for value in values for plane in (value.owner, *value.takers)} - {self.plane}):
            mine = [value for value in values if value.owner == self.plane and peer in value.takers]
            theirs = [value for value in values if value.owner == peer and self.plane in value.takers]
            leaving, arriving = (theirs, mine) if back else (mine, theirs)
            for bundle in _bundles(leaving):
                sends.append(Message(peer, self._packed(bundle, own)))
            for bundle in _bundles(arriving):
                buffer = torch.empty(sum(prod(v.shape) for v in bundle), dtype=bundle[0].dtype, device=self.device)
                receives.append(Message(peer, buffer))
                # Defaults bind ``bundle`` and ``buffer`` of this iteration.
                unpack.append(lambda bundle=bundle, buffer=buffer: self._unpacked(bundle, buffer))  # type: ignore[misc]
        if sends or receives:
            yield comm.exchange(sends, receives)
        received: dict[str, list[torch.Tensor]] = {}
        for pieces in unpack:
            for name, tensor in pieces():
                received.setdefault(name, []).append(tensor)
        return received

    def _packed(self, bundle: Sequence[PlaneValue], own: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the message of a bundle: its values, flattened and concatenated."""
        flat = [laid_out(own[value.name].to(value.dtype), self.channels_last).reshape(-1) for value in bundle]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def _unpacked(self, bundle: Sequence[PlaneValue], buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return (name, value) of a bundle, from its message."""
        parts = zip(bundle, buffer.split([prod(value.shape) for value in bundle]), strict=True)
        return [(value.name, as_sent(flat, value.shape, self.channels_last)) for value, flat in parts]

    def _zeros(self, value: PlaneValue) -> torch.Tensor:
        return torch.zeros(value.shape, dtype=value.dtype, device=self.device)


def _bundles(values: Sequence[PlaneValue]) -> list[list[PlaneValue]]:
    """Divide values into messages: small ones of a dtype share one, larger ones go alone, empty ones are left out."""
    bundles: list[list[PlaneValue]] = []
    small: dict[torch.dtype, list[PlaneValue]] = {}
    for value in values:
        if not value.nbytes:
            continue
        if value.nbytes > SMALL_BYTES:
            bundles.append([value])
        elif value.dtype in small:
            small[value.dtype].append(value)
        else:
            small[value.dtype] = [value]
            bundles.append(small[value.dtype])
    return bundles


def _total(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum, in the memory of the first."""
    # Received memory, to which nothing else refers.
    total = tensors[0]
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total
