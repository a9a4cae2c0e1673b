"""Ranks that take turns in one thread: each goes on until it would have to wait, then the next one does.

    turn      cell 0 ── run ── sends, would wait │                              │ has all it waits for ── run ── …
              cell 1                             │ ── run ── sends, would wait  │
                                                 └── `WouldBlock` is raised; later the same call is made once more

A communicating operator may so be begun twice, and once more for each time that it communicates. What it was answered
the times before it is answered again, and it sends nothing twice; so what it does between must have no effects, as is
true of the forward of any operator here that communicates (see ``ops.base``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hyfi_core.comm.base import Completed, Message, ReduceOp
from hyfi_core.comm.wire import reduced


class WouldBlock(Exception):  # noqa: N818 (not an error: somebody else's turn)
    """This rank cannot go on before others have had their turn; it makes the same call again later."""


@dataclass(frozen=True)
class _Sent:
    """A tensor on its way, not copied; and how often it had been changed when it was sent."""

    tensor: torch.Tensor
    version: int | None

    def arrive(self, source: int) -> torch.Tensor:
        if _version(self.tensor) != self.version:
            raise RuntimeError(f"rank {source} changed a tensor of {tuple(self.tensor.shape)} before it was received")
        return self.tensor


@dataclass
class _CooperativeReduction:
    """What ranks gave, and what came of it."""

    given: dict[int, torch.Tensor] = field(default_factory=dict)
    result: torch.Tensor | None = None
    taken: int = 0


@dataclass
class CooperativeGroup:
    """What all ranks share.

    Attributes:
        size: ranks.
        happened: how often something was sent, received or reduced; if it does not grow, nobody can go on.
    """

    size: int
    happened: int = 0
    _queues: dict[tuple[int, int, int], deque[_Sent]] = field(default_factory=dict)
    _under_way: dict[int, _CooperativeReduction] = field(default_factory=dict)

    def send(self, source: int, message: Message) -> None:
        """Leave a tensor for its receiver; it must stay as it is until then."""
        self.happened += 1
        queue = self._queues.setdefault((source, message.peer, message.tag), deque())
        queue.append(_Sent(message.tensor, _version(message.tensor)))

    def receive(self, target: int, sources: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Return the tensors that have come, one for each (peer, tag); they are the senders'.

        Raises:
            WouldBlock: one of them has not been sent yet.
        """
        wanted = Counter((peer, target, tag) for peer, tag in sources)
        if any(len(self._queues.get(queue, ())) < count for queue, count in wanted.items()):
            raise WouldBlock
        self.happened += 1
        return [self._queues[peer, target, tag].popleft().arrive(peer) for peer, tag in sources]

    def give(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        """Give a rank's share of the reduction of that number."""
        self.happened += 1
        self._under_way.setdefault(number, _CooperativeReduction()).given[rank] = tensor.detach().clone()

    def total(self, number: int, op: ReduceOp) -> torch.Tensor:
        """Return a reduction's result, taken in rank order.

        Raises:
            WouldBlock: not every rank has given its share.
        """
        call = self._under_way[number]
        if len(call.given) < self.size:
            raise WouldBlock
        if call.result is None:
            call.result = reduced([call.given[rank] for rank in range(self.size)], op)
            self.happened += 1
        call.taken += 1
        if call.taken == self.size:
            del self._under_way[number]
        return call.result


class CooperativeCommunicator:
    """One rank's view of them; for the forward of communicating operators, and nothing else.

    Args:
        group: what the ranks share.
        rank: this one.
    """

    def __init__(self, group: CooperativeGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = group.size
        self._reductions = 0
        self._answers: list[list[torch.Tensor]] = []
        self._asked = False
        self._at = 0

    def of(self, kind: str) -> CooperativeCommunicator:
        """Return itself: nothing is counted."""
        return self

    def begin(self) -> None:
        """An operator is begun, or begun again: what it was answered before is answered again."""
        self._at = 0

    def end(self) -> None:
        """The operator has ended: its answers are needed no more."""
        self._answers.clear()

    def swap(self, sends: Sequence[Message], sources: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Send, and return what each (peer, tag) has sent: the peers' own tensors, to be looked at only.

        Raises:
            WouldBlock: not all of it has been sent.
        """

        def ask() -> None:
            for message in sends:
                self._group.send(self.rank, message)

        return self._answer(ask, lambda: self._group.receive(self.rank, sources))

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Completed:
        """Send, and receive what has been sent.

        Raises:
            WouldBlock: not all of it has been.
        """
        arrived = self.swap(sends, [(message.peer, message.tag) for message in receives])
        for message, theirs in zip(receives, arrived, strict=True):
            ours = message.tensor
            if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
                raise RuntimeError(
                    f"{tuple(ours.shape)} {ours.dtype} is expected from rank {message.peer}, which sent "
                    f"{tuple(theirs.shape)} {theirs.dtype}"
                )
            ours.copy_(theirs)
        return Completed()

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Completed:
        """Reduce in place.

        Raises:
            WouldBlock: not every rank has come here.
        """
        number = self._reductions
        answers = self._answer(
            lambda: self._group.give(number, self.rank, tensor), lambda: [self._group.total(number, op)], reduction=True
        )
        tensor.copy_(answers[0])
        return Completed()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place; as ``start_all_reduce``."""
        self.start_all_reduce(tensor, op)

    def _answer(
        self, ask: Callable[[], None], answer: Callable[[], list[torch.Tensor]], reduction: bool = False
    ) -> list[torch.Tensor]:
        """Return what this call is answered; it asks once, however often it is made."""
        if self._at == len(self._answers):
            if not self._asked:
                ask()
                self._asked = True
            self._answers.append(answer())
            self._asked = False
            self._reductions += reduction
        self._at += 1
        return self._answers[self._at - 1]

    def __getattr__(self, name: str) -> Any:
        """Nothing else is part of a forward."""
        raise AttributeError(f"{name} is not offered to ranks that take turns: no forward of a stage calls it")


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
