"""Ranks as threads of one process: what tests run on.

Semantics are those of MPI: messages between two ranks under one tag arrive in order, a send finishes when its tensor
may be used again (at once here: it is copied), and one rank's failure ends all of them.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch

from hyfi_core.comm.base import Communicator, Message, ReduceOp

T = TypeVar("T")
_WAIT_S = 0.05  # how long a waiting rank sleeps before it looks whether another has failed


class PeerFailedError(RuntimeError):
    """Another rank has failed; this one ends because of it. Never the first error."""


@dataclass
class _World:
    """What the ranks of one group share."""

    size: int
    failed: threading.Event
    changed: threading.Condition = field(default_factory=threading.Condition)
    mail: dict[tuple[int, int, int], deque[torch.Tensor]] = field(default_factory=dict)
    objects: dict[tuple[int, int], deque[tuple[int, str]]] = field(default_factory=dict)
    slots: dict[int, list[Any]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait, under ``changed``, until ``ready``; raise if a rank has failed meanwhile."""
        while not ready():
            if self.failed.is_set():
                raise PeerFailedError("another rank has failed")
            self.changed.wait(_WAIT_S)


class _Receipt:
    """Receives under way; sends were finished when they were started."""

    def __init__(self, world: _World, rank: int, receives: Sequence[Message]) -> None:
        self._world = world
        self._rank = rank
        self._open = list(receives)

    def test(self) -> bool:
        with self._world.changed:
            if self._world.failed.is_set():
                raise PeerFailedError("another rank has failed")
            return self._take()

    def wait(self) -> None:
        with self._world.changed:
            self._world.wait_for(self._take)

    def _take(self) -> bool:
        still_open = []
        blocked: set[tuple[int, int]] = set()
        for message in self._open:
            lane = (message.peer, message.tag)
            box = self._world.mail.get((message.peer, self._rank, message.tag))
            if lane in blocked or not box:
                blocked.add(lane)  # later messages of this lane may not overtake
                still_open.append(message)
                continue
            sent = box.popleft()
            if sent.shape != message.tensor.shape or sent.dtype != message.tensor.dtype:
                raise RuntimeError(
                    f"rank {self._rank} expects {tuple(message.tensor.shape)} {message.tensor.dtype} from rank "
                    f"{message.peer} under tag {message.tag}, which sent {tuple(sent.shape)} {sent.dtype}"
                )
            message.tensor.copy_(sent)
        self._open = still_open
        return not still_open


class _Done:
    def test(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class ThreadCommunicator:
    """One rank's view of a group of threads."""

    def __init__(self, world: _World, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._calls = 0

    @property
    def rank(self) -> int:
        """This rank, counted in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self._world.size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Receipt:
        """Start sends (copied at once) and receives."""
        with self._world.changed:
            for message in sends:
                key = (self._rank, message.peer, message.tag)
                self._world.mail.setdefault(key, deque()).append(message.tensor.detach().clone())
            self._world.changed.notify_all()
        return _Receipt(self._world, self._rank, receives)

    def _share(self, value: Any) -> list[Any]:
        """Return what every rank gave in the same collective call, in rank order."""
        world, call = self._world, self._calls
        self._calls += 1
        with world.changed:
            slots = world.slots.setdefault(call, [None] * world.size)
            slots[self._rank] = (value,)
            world.changed.notify_all()
            world.wait_for(lambda: all(slot is not None for slot in slots))
            world.taken[call] = world.taken.get(call, 0) + 1
            if world.taken[call] == world.size:
                del world.slots[call], world.taken[call]
        return [slot[0] for slot in slots]

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place, in rank order: the same bits on every rank."""
        parts = self._share(tensor.detach().clone())
        total = parts[0].clone()
        for part in parts[1:]:
            if op == "sum":
                total += part
            else:
                total = torch.maximum(total, part) if op == "max" else torch.minimum(total, part)
        tensor.copy_(total)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite ``tensor`` with the root's."""
        parts = self._share(tensor.detach().clone() if self._rank == root else None)
        if self._rank != root:
            tensor.copy_(parts[root])

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's value."""
        return json.loads(self._share(json.dumps(value) if self._rank == root else None)[root])

    def gather_objects(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return all values on the root."""
        texts = self._share(json.dumps(value))
        return [json.loads(text) for text in texts] if self._rank == root else None

    def send_object(self, value: Any, peer: int, tag: int) -> _Done:
        """Send a small value."""
        with self._world.changed:
            self._world.objects.setdefault((peer, tag), deque()).append((self._rank, json.dumps(value)))
            self._world.changed.notify_all()
        return _Done()

    def poll_object(self, tag: int, peer: int | None = None) -> tuple[int, Any] | None:
        """Return (peer, value) of one that has arrived."""
        with self._world.changed:
            if self._world.failed.is_set():
                raise PeerFailedError("another rank has failed")
            box = self._world.objects.get((self._rank, tag), deque())
            for item in box:
                if peer is None or item[0] == peer:
                    box.remove(item)
                    return item[0], json.loads(item[1])
        return None

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self._share(None)

    def split(self, color: int | None, key: int = 0) -> ThreadCommunicator | None:
        """Return the group of all ranks that gave the same color, ordered by (key, rank)."""
        votes = self._share((color, key, self._rank))
        members = [rank for vote, _, rank in sorted(votes, key=lambda v: v[1:]) if color is not None and vote == color]
        first = bool(members) and members[0] == self._rank
        worlds = self._share(_World(len(members), self._world.failed) if first else None)
        return None if color is None else ThreadCommunicator(worlds[members[0]], members.index(self._rank))

    def abort(self, code: int) -> NoReturn:
        """End all ranks: each raises in whatever it waits for."""
        self._world.failed.set()
        raise PeerFailedError(f"aborted with code {code} by rank {self._rank}")


def run_ranks(size: int, body: Callable[[Communicator], T], timeout_s: float = 240.0) -> list[T]:
    """Run ``body`` on ``size`` thread-ranks and return what each returned, in rank order.

    Raises:
        BaseException: the first error of any rank, as that rank raised it.
        TimeoutError: the ranks did not end in time: a dead-lock.
    """
    world = _World(size, threading.Event())
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def target(rank: int) -> None:
        try:
            results[rank] = body(ThreadCommunicator(world, rank))
        except BaseException as error:
            errors.append(error)
            world.failed.set()

    threads = [threading.Thread(target=target, args=(rank,), daemon=True, name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise next((error for error in errors if not isinstance(error, PeerFailedError)), errors[0])
    if any(thread.is_alive() for thread in threads):
        world.failed.set()
        raise TimeoutError(f"{size} ranks did not end within {timeout_s:.0f} s")
    return results
