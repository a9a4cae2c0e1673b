"""Communicating operators: a forward, and a backward that is its adjoint, run by the engine and not by autograd."""

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
"""What is left to do of a backward, without messages; like it, it returns a cotangent or None for every input."""


class Collective(Protocol):
    """A communicating operator. All ranks of the stage call it in the same order, whatever they own.

    Inputs and outputs are local tensors, detached; what ``forward`` saves, ``backward`` is given back.
    """

    def forward(self, comm: Communicator, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (outputs, saved)."""
        ...

    def backward(self, comm: Communicator, saved: Any, cotangents: Cotangents, wanted: Wanted = ()) -> Cotangents:
        """Return the cotangent of every input, None for one that has none; a cotangent of None means zero.

        Args:
            comm: the ranks of the stage.
            saved: by ``forward``.
            cotangents: of the outputs.
            wanted: for every input, whether its cotangent is of use, the same on all ranks; empty: all are. One that is
                not need be neither computed nor sent.
        """
        ...


class InTwo(ABC):
    """A collective operator whose weights' cotangents, which nobody waits for, can be computed later than its map's."""

    @abstractmethod
    def backward_first(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, wanted: Wanted = ()
    ) -> tuple[Cotangents, Rest]:
        """Return what ``backward`` does of the map, None of all else, and what computes that."""


class Waiting(ABC):
    """A collective operator whose backward waits for one message, small enough to fly while something else is done."""

    @abstractmethod
    def start_back(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, wanted: Wanted = ()
    ) -> tuple[Pending, Rest]:
        """Start ``backward``; return the message, and what makes the cotangents once it is there."""
