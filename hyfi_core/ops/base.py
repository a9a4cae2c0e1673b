"""Operators with their own backward, run by the engine and not by autograd.

A ``CustomOperator`` works on local values. A ``Collective`` communicates; its backward is the adjoint of its
forward. Inputs and outputs are local tensors, detached; what ``forward`` saves is passed to ``backward``.

An operator whose backward returns cotangents in new memory (no views of its arguments or saved values, except those
that it may overwrite) has the class attribute ``own_cotangents = True``: these may be overwritten in turn (see
``lowering.reuse``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hyfi_core.comm.base import Communicator, Pending, Tensors
from hyfi_core.comm.waits import Waits

Cotangents = tuple[torch.Tensor | None, ...]
NeedsGrad = tuple[bool, ...]
Rest = Callable[[], Cotangents]
"""The rest of a backward, without messages; like the backward, it returns a cotangent or None for every input."""


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as in the gradient of a mean: such a tensor cannot be overwritten."""
    # A stride of 0: writing one element would write all that share it.
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


class CustomOperator(Protocol):
    """An operator on local values, without communication."""

    def forward(self, inputs: Tensors) -> tuple[Tensors, Any]:
        """Return (outputs, saved)."""
        ...

    def backward(self, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()) -> Cotangents:
        """Return the cotangent of every input, None for one that has none.

        Args:
            saved: what ``forward`` saved.
            cotangents: cotangents of the outputs; None means zero.
            needs_grad: for every input, whether its cotangent is needed; empty: all are.
        """
        ...


class Collective(Protocol):
    """An operator with communication. All ranks of the stage call it in the same order, even if they own nothing.

    Its methods are generators that yield what they wait for: see ``comm.waits``.
    """

    def forward(self, comm: Communicator, inputs: Tensors) -> Waits[tuple[Tensors, Any]]:
        """Return (outputs, saved)."""
        ...

    def backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> Waits[Cotangents]:
        """Return the cotangent of every input, None for one that has none.

        Args:
            comm: the ranks of the stage.
            saved: what ``forward`` saved.
            cotangents: cotangents of the outputs; None means zero.
            needs_grad: for every input, whether its cotangent is needed, the same on all ranks; empty: all are.
        """
        ...


class Recomputable(ABC):
    """An operator whose first output may be cheaper to recompute than to keep."""

    def flops_of_value(self, shapes: Sequence[Sequence[int]]) -> float:
        """Return the operations per value of the output, besides reading and writing maps.

        Args:
            shapes: shapes of the inputs.
        """
        return 0.0

    @abstractmethod
    def recompute(self, inputs: Tensors, saved: Any) -> torch.Tensor:
        """Return the first output again, bitwise equal and without messages.

        Args:
            inputs: the inputs of ``forward``.
            saved: what ``forward`` saved; None if that was its output.
        """


class RemakesSaved(ABC):
    """An operator that saves a tensor which can be computed again from its first input, such as indices of maxima."""

    @abstractmethod
    def remade(self, saved: Any) -> torch.Tensor | None:
        """Return the part of what ``forward`` saved that ``remake`` returns; None if there is none."""

    @abstractmethod
    def remake(self, own: torch.Tensor) -> torch.Tensor:
        """Return the tensor of ``remade`` again, bitwise equal and without messages, computed from the first input."""

    @abstractmethod
    def compact(self, saved: Any) -> Any:
        """Return what ``forward`` saved in as few bytes as possible, to keep it until backward."""


class SplitBackward(ABC):
    """A collective with a split backward: first the cotangent of the map, later those of the weights.

    Other ranks wait for the first, but not for weight gradients, so the second can be deferred.
    """

    @abstractmethod
    def backward_of_map(
        self,
        comm: Communicator,
        saved: Any,
        cotangents: Cotangents,
        needs_grad: NeedsGrad = (),
        waits: bool = True,
    ) -> Waits[tuple[Cotangents, Rest]]:
        """Return the map's cotangent (None for other inputs), and a function that computes the others.

        Args:
            comm: the ranks of the stage.
            saved: what ``forward`` saved.
            cotangents: cotangents of the outputs; None means zero.
            needs_grad: for every input, whether its cotangent is needed; empty: all are.
            waits: whether to compute the others at once if this rank would have to wait for messages.
        """


class LocalSplitBackward(ABC):
    """An operator without communication whose backward is split as that of ``SplitBackward``."""

    @abstractmethod
    def backward_of_map(
        self, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> tuple[Cotangents, Rest]:
        """Return the cotangents of maps (None for weights), and a function that computes those of weights."""


class HoldsBuffers(ABC):
    """An operator that saves buffers, which its caller releases."""

    @abstractmethod
    def give_back(self, saved: Any) -> None:
        """Release the buffers that a forward saved, after the whole backward, or if there will be none."""


class AsyncBackward(ABC):
    """A collective whose backward waits for one small message, which can overlap with other computation."""

    @abstractmethod
    def start_backward(
        self, comm: Communicator, saved: Any, cotangents: Cotangents, needs_grad: NeedsGrad = ()
    ) -> tuple[Pending, Rest]:
        """Start ``backward``; return the pending message, and a function that computes the cotangents afterwards."""
