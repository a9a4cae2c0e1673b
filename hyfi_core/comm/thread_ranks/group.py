"""Shared state of thread-ranks in a group: queues that pair sends with receives, and collective calls.

    usual    a send is copied and completes at once; it is paired with a receive by tag
    strict   as NCCL: a send completes when its receive has started (rendezvous); sends and receives of two ranks are
             paired in order, regardless of tags; and a rank's operations on a group run one after another, as on the
             single stream of an NCCL communicator

In strict mode, programs that depend on tags, on buffering or on reordering of operations raise an error that names both
sides, and so do deadlocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hyfi_core.comm.base import Message, ReduceOp, version_of
from hyfi_core.comm.thread_ranks.world import ThreadWorld
from hyfi_core.comm.wire import reduced


@dataclass
class PostedMessage:
    """One send or receive that waits for its other side.

    Attributes:
        message: the message; a send's tensor is a copy unless the world is strict.
        version: version counter of the tensor when it was posted; None for inference tensors.
        done: whether it has been paired.
    """

    message: Message
    version: int | None = None
    done: bool = False


@dataclass
class Operation:
    """An exchange or a collective call of one rank, in the rank's stream.

    Attributes:
        start: begins it.
        done: whether it has completed.
        started: whether it has begun.
    """

    start: Callable[[], None]
    done: Callable[[], bool]
    started: bool = False


@dataclass
class _MessageQueues:
    sends: deque[PostedMessage] = field(default_factory=deque)
    receives: deque[PostedMessage] = field(default_factory=deque)


@dataclass
class GroupCall:
    """One collective call of a group.

    Attributes:
        what: name of the call, with what must be the same on all ranks.
        first: the rank that entered it first.
        inputs: rank -> its input.
        taken: number of ranks that have their result.
        result: result of a reduction, computed once; None before that, and in other calls.
    """

    what: str
    first: int
    inputs: dict[int, Any] = field(default_factory=dict)
    taken: int = 0
    result: torch.Tensor | None = None


class ThreadGroup:
    """State of one group. Its methods are called under ``world.lock``.

    Args:
        world: the run.
        members: ranks of the whole world, in the order in which the group counts them.
    """

    def __init__(self, world: ThreadWorld, members: list[int]) -> None:
        self.world = world
        self.members = members
        self.objects: dict[tuple[int, int], deque[tuple[int, str]]] = {}
        self._queues: dict[tuple[int, int, int], _MessageQueues] = {}
        self._calls: dict[int, GroupCall] = {}
        self._streams: list[deque[Operation]] = [deque() for _ in members]

    def run(self, rank: int, operation: Operation) -> None:
        """Begin an operation of a rank: at once, or in a strict world when the rank's earlier ones are done."""
        if not self.world.strict:
            operation.start()
            return
        self._streams[rank].append(operation)
        # A list, so that ``any`` tries every stream in each round. An operation that completes may let others complete.
        while any([self._advance(stream) for stream in self._streams]):
            pass

    @staticmethod
    def _advance(stream: deque[Operation]) -> bool:
        """Begin and complete operations of one rank's stream; return whether any began or completed."""
        moved = False
        while stream:
            first = stream[0]
            if not first.started:
                first.started = moved = True
                first.start()
            if not first.done():
                break
            stream.popleft()
            moved = True
        return moved

    def send(self, rank: int, post: PostedMessage) -> None:
        """Begin a send; it is done at once, in a strict world only when the receive is there, too (as in NCCL)."""
        message = post.message
        queues = self._queues_of(rank, message.peer, message.tag)
        queues.sends.append(post)
        self._pair(rank, message.peer, queues)
        if not self.world.strict and not post.done:  # not paired, so still the last; the sender may reuse its tensor
            queues.sends[-1] = PostedMessage(Message(message.peer, message.tensor.detach().clone(), message.tag))
            post.done = True

    def receive(self, rank: int, post: PostedMessage) -> None:
        """Begin a receive; its tensor is written when the send is posted."""
        message = post.message
        queues = self._queues_of(message.peer, rank, message.tag)
        queues.receives.append(post)
        self._pair(message.peer, rank, queues)

    def enter(self, number: int, rank: int, name: str, value: Any) -> GroupCall:
        """Add this rank's input to the group's call of that number.

        Raises:
            RuntimeError: another rank makes a different call.
        """
        call = self._calls.setdefault(number, GroupCall(name, rank))
        # Real backends would reduce one tensor into another's, or wait for ever.
        if call.what != name:
            raise RuntimeError(f"rank {rank} calls {name} while rank {call.first} calls {call.what}")

        if self.world.strict:
            self.run(rank, Operation(partial(self._give, call, rank, value), partial(self.complete, call)))
        else:
            self._give(call, rank, value)
        return call

    def _give(self, call: GroupCall, rank: int, value: Any) -> None:
        call.inputs[rank] = value
        self.world.notify(self.members if self.complete(call) else ())

    def complete(self, call: GroupCall) -> bool:
        """Whether every rank has entered the call."""
        return len(call.inputs) == len(self.members)

    def missing(self, call: GroupCall) -> str:
        """Describe which ranks have not entered a call."""
        return f"{call.what} with ranks {[rank for rank in range(len(self.members)) if rank not in call.inputs]}"

    def take(self, number: int, call: GroupCall) -> list[Any]:
        """Return the inputs of all ranks, in rank order; the last rank removes the call."""
        self._count_taken(number, call)
        return [call.inputs[rank] for rank in range(len(self.members))]

    def reduce(self, number: int, call: GroupCall, op: ReduceOp) -> torch.Tensor:
        """Return the inputs of all ranks, reduced in rank order; the last rank removes the call."""
        if call.result is None:
            with torch.inference_mode(False), torch.no_grad():  # whatever the modes of the calling rank
                call.result = reduced([call.inputs[rank] for rank in range(len(self.members))], op)
        self._count_taken(number, call)
        return call.result

    def _count_taken(self, number: int, call: GroupCall) -> None:
        """Count a rank that has its result; the last one removes the call."""
        call.taken += 1
        if call.taken == len(self.members):
            del self._calls[number]

    def _queues_of(self, source: int, target: int, tag: int) -> _MessageQueues:
        # In strict mode without the tag: NCCL has no tags.
        return self._queues.setdefault((source, target, 0 if self.world.strict else tag), _MessageQueues())

    def _pair(self, source: int, target: int, queues: _MessageQueues) -> None:
        """Pair sends and receives of two ranks in order."""
        while queues.sends and queues.receives:
            sent, received = queues.sends.popleft(), queues.receives.popleft()
            self._refuse_mismatch(source, target, sent, received)
            with torch.inference_mode():  # whatever the modes of the two ranks
                received.message.tensor.copy_(sent.message.tensor)
            sent.done = received.done = True
            self.world.notify((self.members[source], self.members[target]))

    def _refuse_mismatch(self, source: int, target: int, sent: PostedMessage, received: PostedMessage) -> None:
        """Refuse a message with another shape, dtype or tag at its other end, or changed while it was sent."""
        expected, arrived = _described(received.message), _described(sent.message)
        if expected != arrived:
            raise RuntimeError(f"rank {target} expects {expected} from rank {source}, which sent {arrived}")
        if self.world.strict and sent.version != version_of(sent.message.tensor):
            raise RuntimeError(f"rank {source} changed {arrived} before its send to rank {target} had completed")


def _described(message: Message) -> str:
    """Return what must be the same at both ends of a message."""
    return f"{tuple(message.tensor.shape)} {message.tensor.dtype} with tag {message.tag}"
