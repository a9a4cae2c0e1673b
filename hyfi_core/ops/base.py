"""Operators with a backward of their own, which the engine runs and autograd does not see.

A ``CustomOperator`` works on what its rank holds. A ``Collective`` communicates; its backward is the adjoint of its
forward. Inputs and outputs are local tensors, detached; what ``forward`` saves is handed to ``backward``.

An operator whose backward returns cotangents in memory of their own (no views of what it was given or has saved, but
where it is told that it may write over these) says so with a class attribute ``own_cotangents = True``: then these may
be written over in turn (see ``lowering.reuse``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch

from hyfi_core.comm.base import Communicator, Pending

Tensors = tuple[torch.Tensor, ...]
Cotangents = tuple[torch.Tensor | None, ...]
Wanted = tuple[bool, ...]
Rest = Callable[[], Cotangents]
"""The rest of a backward, without messages; like the backward, it returns a cotangent or None for every input."""


class CustomOperator(Protocol):
    """An operator on this rank's values alone; it sends nothing."""

    def forward(self, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (outputs, saved)."""
        ...

    def backward(self, saved: Any, cotangents: Cotangents, wanted: Wanted = ()) -> Cotangents:
        """Return the cotangent of every input, None for one that has none.

        Args:
            saved: what ``forward`` saved.
            cotangents: of the outputs; None means zero.
            wanted: for every input, whether its cotangent is of use; empty: all are. One that is not need not be
                computed.
        """
        ...


class Collective(Protocol):
    """A communicating operator. All ranks of the stage call it in the same order, whatever they own."""

    def forward(self, comm: Communicator, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (outputs, saved)."""
        ...

    def backward(self, comm: Communicator, saved: Any, cotangents: Cotangents, wanted: Wanted = ()) -> Cotangents:
        """Return the cotangent of every input, None for one that has none.

        Args:
            comm: the ranks of the stage.
            saved: what ``forward`` saved.
            cotangents: of the outputs; None means zero.
            wanted: for every input, whether its cotangent is of use, the same on all ranks; empty: all are. One that is
                not need be neither computed nor sent.
        """
        ...


class Recomputable(ABC):
    """An operator whose first output is cheap to compute once more, rather than to keep."""

    @abstractmethod
    def again(self, inputs: Tensors, saved: Any) -> torch.Tensor:
        """Return the first output once more, to the last bit, without messages.

        Args:
            inputs: as ``forward`` was given them.
            saved: what it saved; None where that was its output.
        """


class SplitBackward(ABC):
    """A collective whose backward comes in two parts: first the map's cotangent, later its weights'.

    Other ranks wait for the first. Nobody waits for a weight gradient, so the second can be deferred.
    """

    @abstractmethod
    def backward_of_map(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, wanted: Wanted = ()
    ) -> tuple[Cotangents, Rest]:
        """Return the map's cotangent (None for all other inputs), and the function that computes the others."""


class HoldsBuffers(ABC):
    """An operator that saves buffers: whoever runs it says when they are free."""

    @abstractmethod
    def give_back(self, saved: Any) -> None:
        """Take back the buffers that a forward saved: its backward is done, the rest of it, too, or never comes."""


class AsyncBackward(ABC):
    """A collective whose backward waits for one message, small enough to be under way while others compute."""

    @abstractmethod
    def start_backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, wanted: Wanted = ()
    ) -> tuple[Pending, Rest]:
        """Start ``backward``; return the message, and what makes the cotangents once it has arrived."""
