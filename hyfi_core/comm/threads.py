"""Ranks as threads of one process, for tests.

Semantics are those of MPI: messages between two ranks with the same tag arrive in order, a send completes when its
tensor may be reused (here at once: it is copied), and the failure of one rank ends all. In strict mode, semantics are
those of NCCL: see :mod:`hyfi_core.comm.thread_ranks.group`.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch

from hyfi_core.comm.base import LARGEST_TAG, Communicator, Completed, Message, ReduceOp, version_of
from hyfi_core.comm.thread_ranks.group import GroupCall, Operation, PostedMessage, ThreadGroup
from hyfi_core.comm.thread_ranks.world import DeadlockError, PeerFailedError, ThreadWorld

__all__ = ["DeadlockError", "PeerFailedError", "ThreadCommunicator", "run_ranks"]

T = TypeVar("T")


def _begin(group: ThreadGroup, rank: int, sends: list[PostedMessage], receives: list[PostedMessage]) -> None:
    for post in receives:
        group.receive(rank, post)
    for post in sends:
        group.send(rank, post)


class _PostedExchange:
    """Pending sends and receives."""

    needs_polls = False

    def __init__(self, group: ThreadGroup, rank: int, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._group, self._rank = group, rank
        self._sends = [PostedMessage(message, version_of(message.tensor)) for message in sends]
        self._receives = [PostedMessage(message) for message in receives]
        posts = (*self._sends, *self._receives)
        # Not a method of this object, which would make a reference cycle: messages are freed with the object, and need
        # not wait for the garbage collector.
        begin = partial(_begin, group, rank, self._sends, self._receives)
        self._operation = Operation(begin, lambda: all(post.done for post in posts))
        group.run(rank, self._operation)

    def test(self) -> bool:
        world = self._group.world
        with world.lock:
            world.check()
            if not self._operation.done():
                world.pause(self._group.members[self._rank])
            return self._operation.done()

    def wait(self) -> None:
        world = self._group.world
        with world.lock:
            world.wait_for(self._group.members[self._rank], self._operation.done, self._open)

    def _open(self) -> str:
        to = [f"rank {p.message.peer} to receive (tag {p.message.tag})" for p in self._sends if not p.done]
        to += [f"rank {p.message.peer} to send (tag {p.message.tag})" for p in self._receives if not p.done]
        turn = "" if self._operation.started else "its earlier operations, then for "
        return turn + " and ".join(to)


class _ThreadReduction:
    """A pending reduction."""

    needs_polls = False

    def __init__(self, comm: ThreadCommunicator, tensor: torch.Tensor, op: ReduceOp) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._op = op
        self._comm = comm
        name = f"all_reduce {op} of {tuple(tensor.shape)} {tensor.dtype}"
        # A copy: this rank may overwrite its tensor with the sum while other ranks still read its input.
        self._call_number, self._call = comm._enter(name, tensor.detach().clone())

    def test(self) -> bool:
        """Return whether all ranks have entered this call; if so, the result is in this rank's tensor."""
        world = self._comm._group.world
        with world.lock:
            world.check()
            if self._tensor is not None and not self._comm._group.complete(self._call):
                # The caller tests in a loop: let the ranks run for which it waits.
                world.pause(self._comm._group.members[self._comm._rank])
                return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait until all ranks have entered this call, and write the result into this rank's tensor."""
        if self._tensor is None:  # written already
            return
        group = self._comm._group
        with group.world.lock:
            self._comm._wait_for(self._call)
            result = group.reduce(self._call_number, self._call, self._op)
        self._tensor.copy_(result)
        self._tensor = None


class ThreadCommunicator:
    """One rank's view of a group of threads."""

    largest_tag = LARGEST_TAG

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._calls = 0

    @property
    def in_order(self) -> bool:
        """Whether a rank's operations run one after another: in strict mode."""
        return self._group.world.strict

    @property
    def rank(self) -> int:
        """This rank, counted in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self._group.members)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _PostedExchange:
        """Start receives and sends (copied at once unless strict)."""
        with self._group.world.lock:
            return _PostedExchange(self._group, self._rank, sends, receives)

    def _enter(self, name: str, value: Any) -> tuple[int, GroupCall]:
        """Enter the group's next collective call; return its number and the call."""
        number = self._calls
        self._calls += 1
        with self._group.world.lock:
            return number, self._group.enter(number, self._rank, name, value)

    def _leave(self, number: int, call: GroupCall) -> list[Any]:
        """Return the inputs of all ranks, in rank order."""
        with self._group.world.lock:
            self._wait_for(call)
            return self._group.take(number, call)

    def _wait_for(self, call: GroupCall) -> None:
        group = self._group
        if not group.complete(call):
            group.world.wait_for(group.members[self._rank], partial(group.complete, call), partial(group.missing, call))

    def _gather_all(self, name: str, value: Any) -> list[Any]:
        return self._leave(*self._enter(name, value))

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> _ThreadReduction:
        """Start reducing in place, in rank order: bitwise equal on every rank."""
        return _ThreadReduction(self, tensor, op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place, in rank order: bitwise equal on every rank."""
        self.start_all_reduce(tensor, op).wait()

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite ``tensor`` with the root's."""
        name = f"broadcast from {root} of {tuple(tensor.shape)} {tensor.dtype}"
        parts = self._gather_all(name, tensor.detach().clone() if self._rank == root else None)
        if self._rank != root:
            tensor.copy_(parts[root])

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's value."""
        name = f"broadcast_object from {root}"
        return json.loads(self._gather_all(name, json.dumps(value) if self._rank == root else None)[root])

    def gather_objects(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return all values on the root."""
        texts = self._gather_all(f"gather_objects to {root}", json.dumps(value))
        return [json.loads(text) for text in texts] if self._rank == root else None

    def send_object(self, value: Any, peer: int, tag: int) -> Completed:
        """Send a small value."""
        with self._group.world.lock:
            self._group.objects.setdefault((peer, tag), deque()).append((self._rank, json.dumps(value)))
            self._group.world.notify(())  # a receiver polls: no wait ends by this
        return Completed()

    def poll_object(self, tag: int, peer: int | None = None) -> tuple[int, Any] | None:
        """Return (sender, value) of the oldest value with a tag, or None; ``peer``: only of this sender."""
        with self._group.world.lock:
            self._group.world.check()
            values = self._group.objects.get((self._rank, tag), deque())
            for item in values:
                if peer is None or item[0] == peer:
                    values.remove(item)
                    return item[0], json.loads(item[1])
            # The caller polls in a loop: let ranks run on whose value it may wait for.
            self._group.world.pause(self._group.members[self._rank])
        return None

    def barrier(self) -> None:
        """Return when every rank has entered the call."""
        self._gather_all("barrier", None)

    def split(self, color: int | None, key: int = 0) -> ThreadCommunicator | None:
        """Return the group of all ranks that gave the same color, ordered by (key, rank)."""
        votes = self._gather_all("split", (color, key, self._rank))
        same_color = sorted((k, rank) for c, k, rank in votes if color is not None and c == color)
        members = [rank for _, rank in same_color]
        is_first = bool(members) and members[0] == self._rank
        # All members share one object: the first makes it, and the second gathering gives it to the others.
        group = ThreadGroup(self._group.world, [self._group.members[rank] for rank in members]) if is_first else None
        groups = self._gather_all("split", group)
        return None if color is None else ThreadCommunicator(groups[members[0]], members.index(self._rank))

    def subgroup(self, members: Sequence[int]) -> ThreadCommunicator | None:
        """Return the group of ``members``, in their order."""
        if not members:
            return self.split(None)
        return self.split(members[0], members.index(self._rank))

    def abort(self, code: int) -> NoReturn:
        """End all ranks: each raises from its current wait."""
        self._group.world.fail()
        raise PeerFailedError(f"aborted with code {code} by rank {self._rank}")


def run_ranks(
    size: int, body: Callable[[Communicator], T], timeout_s: float = 240.0, *, strict: bool = False
) -> list[T]:
    """Run ``body`` on ``size`` thread-ranks and return the results in rank order.

    Args:
        size: number of ranks.
        body: called on each rank with its communicator.
        timeout_s: time limit, after which the ranks count as deadlocked.
        strict: whether sends are rendezvous, paired in order and not by tag, as in NCCL.

    Raises:
        BaseException: the first error of any rank.
        DeadlockError: in strict mode, no rank can continue; raised at once, with what each rank waits for.
        TimeoutError: the ranks did not end in time: a deadlock.
    """
    world = ThreadWorld(size, strict)
    group = ThreadGroup(world, list(range(size)))
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def target(rank: int) -> None:
        failed = True
        try:
            world.begin(rank)
            results[rank] = body(ThreadCommunicator(group, rank))
            failed = False
        except BaseException as error:
            errors.append(error)
        world.end(rank, failed)

    threads = [threading.Thread(target=target, args=(rank,), daemon=True, name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    in_time = world.oversee(timeout_s)
    if errors:
        # The first error that is not a ``PeerFailedError``, which ranks raise because another rank has failed.
        raise next((error for error in errors if not isinstance(error, PeerFailedError)), errors[0])
    if not in_time:
        world.fail()
        raise TimeoutError(f"{size} ranks did not end within {timeout_s:.0f} s")
    for thread in threads:
        thread.join()
    return results
