"""The protocol of all communication backends: tensors between ranks, without autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

import torch

Tensors = tuple[torch.Tensor, ...]
ReduceOp = Literal["sum", "max", "min"]
LARGEST_TAG = 2**31 - 1
"""The largest tag of a message, unless a library has a smaller limit."""


@dataclass(frozen=True)
class Message:
    """One tensor to or from one rank of the group.

    Attributes:
        peer: rank of the group.
        tensor: contiguous; what is sent must not change until the exchange has completed; what is received is written
            into the receiver's tensor.
        tag: pairs a send with its receive; between two ranks, messages with the same tag arrive in order.
        moves: for a receive: whether its tensor may take over the memory in which the message arrives; otherwise the
            message is copied.
    """

    peer: int
    tensor: torch.Tensor
    tag: int = 0
    moves: bool = False


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the number of a tensor's in-place changes; None for inference tensors, which do not count them."""
    return None if tensor.is_inference() else tensor._version


class Pending(Protocol):
    """Pending communication."""

    @property
    def needs_polls(self) -> bool:
        """Whether it makes progress only inside calls to it, which another thread may make (see ``comm.progress``)."""
        ...

    def test(self) -> bool:
        """Make progress without blocking; return whether it has completed."""
        ...

    def wait(self) -> None:
        """Return when it has completed. Backs off instead of spinning in long waits."""
        ...


class Completed:
    """Completed communication."""

    needs_polls = False

    def test(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


class Communicator(Protocol):
    """A group of ranks. All tensors live on the host unless the adapter says otherwise."""

    @property
    def rank(self) -> int:
        """This rank in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    @property
    def in_order(self) -> bool:
        """Whether a rank's operations on this group run one after another, in the order in which they are started.

        True on GPUs, where a group has one stream: an exchange that waits for its peer blocks all later operations.
        """
        ...

    @property
    def largest_tag(self) -> int:
        """The largest tag that a message may have; 32,767 or more."""
        ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Start sends and receives, receives first, without blocking."""
        ...

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place over the group; bitwise equal on every rank. NaN on any rank gives NaN."""
        ...

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Start reducing in place; the tensor must not be used until ``wait`` returns or ``test`` returns True.

        Several may be pending; all ranks must start collective calls in the same order.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite ``tensor`` with the tensor of rank ``root``."""
        ...

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's value (JSON-like and small; slow)."""
        ...

    def gather_objects(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return all ranks' values in rank order on the root, None elsewhere."""
        ...

    def send_object(self, value: Any, peer: int, tag: int) -> Pending:
        """Start sending a small value; the value is copied before this returns."""
        ...

    def poll_object(self, tag: int, peer: int | None = None) -> tuple[int, Any] | None:
        """Return (peer, value) of one object received with ``tag``, None if there is none. Does not block."""
        ...

    def barrier(self) -> None:
        """Return when every rank of the group has entered the call."""
        ...

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return the group of all ranks with the same ``color`` (collective); None for ``color=None``."""
        ...

    def subgroup(self, members: Sequence[int]) -> Communicator | None:
        """Return the group of ``members``, in their order; None if there are none.

        Every rank calls it with the members of its own group. Unlike ``split``, it does not have to gather anything
        from all ranks, because every rank knows the members already.
        """
        ...

    def abort(self, code: int) -> NoReturn:
        """End every rank of the job within seconds."""
        ...


class ForwardingCommunicator:
    """Forwards every call to another communicator: base class of wrappers.

    Args:
        comm: the other communicator.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self._comm.size

    def __getattr__(self, name: str) -> Any:
        """Forward all other attributes."""
        return getattr(self._comm, name)
