"""``torch.distributed``: gloo between hosts, for jobs started by ``torchrun`` without MPI; NCCL for GPUs.

NCCL pairs the messages of two ranks in the order in which they are started, regardless of tags, and a send completes
with its receive; the strict mode of thread-ranks checks programs for this. The NCCL path itself is unverified: it
cannot be run with two ranks on one GPU, and no machine with two was available.

Gloo reports the end of a message only to the thread that waits for it, so ``test`` lets a helper thread wait. Small
values are sent through the rendezvous store, which can be read without blocking.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hyfi_core.comm.activity import ACTIVITY, named_ranks
from hyfi_core.comm.base import LARGEST_TAG, Completed, Message, ReduceOp
from hyfi_core.comm.supervision.rendezvous import Expected, joined
from hyfi_core.comm.wire import decoded, encoded, from_wire, to_wire
from hyfi_core.errors import LostPeerError, RendezvousError, RequestError

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_HEAD_BYTES = 4096  # of a small value in one message
_WAITERS = ThreadPoolExecutor(max_workers=16, thread_name_prefix="gloo-wait")


@contextlib.contextmanager
def _losing_peers() -> Iterator[None]:
    """Context for sends and receives of gloo, which fail only if a connection ends or their time runs out.

    Raises:
        LostPeerError: instead of gloo's RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        raise LostPeerError(str(error)) from error


class _Works:
    """Pending sends and receives, and the tensors that must outlive them."""

    needs_polls = False

    def __init__(
        self,
        works: list[Any],
        describe: Callable[[], str],
        keep: Sequence[torch.Tensor] = (),
        finish: Callable[[], None] | None = None,
        on_gpu: bool = False,
    ) -> None:
        self._works = works
        self._what = describe  # called only if a message says what is waited for
        self._keep = keep  # tensors that must outlive the works
        self._nbytes = sum(tensor.nbytes for tensor in keep)
        self._finish = finish  # copies the result to its destination, once
        self._on_gpu = on_gpu
        self._waiting: Future[None] | None = None  # a thread's wait, once ``test`` was called on a CPU

    def test(self) -> bool:
        """Return whether all have completed, without waiting for them."""
        if self._on_gpu:  # test without waiting: a wait would make the caller's stream wait for the messages
            is_over = all(work.is_completed() for work in self._works)
            if is_over:
                self.wait()
            return is_over
        if self._waiting is None:
            # One thread for all later tests: gloo reports the end of a message only to a thread blocked in ``wait``.
            self._waiting = _WAITERS.submit(self._wait_for_all)
        if self._waiting.done():
            self.wait()
            return True
        return False

    def wait(self) -> None:
        """Wait until all have completed, and copy the result to its destination."""
        with ACTIVITY.waiting(self._what, self._nbytes):
            if self._waiting is None:
                self._wait_for_all()
            else:  # a thread waits already
                self._waiting.result()
        if self._finish is not None:
            self._finish()
            self._finish = None

    def _wait_for_all(self) -> None:
        with contextlib.nullcontext() if self._on_gpu else _losing_peers():
            for work in self._works:
                work.wait()


class TorchCommunicator:
    """A group of ranks connected by gloo or NCCL.

    Args:
        group: the process group.
        members: global ranks in the order in which the group counts them.
        name: unique for the group, the same on all its ranks; distinguishes its small values from those of other
            groups.
    """

    largest_tag = LARGEST_TAG

    def __init__(self, group: Any, members: list[int], name: str = "world") -> None:
        self._group = group
        self._name = name
        self._members = members
        self._store = dist.distributed_c10d._get_default_store()
        # Tag -> number of values that this rank has taken; the next value has the next number (see ``send_object``).
        self._taken: dict[int, int] = {}
        self._aside: dict[int, deque[tuple[int, Any]]] = {}  # tag -> (peer, value) taken but not returned yet
        self._splits = 0
        self._in_order = "nccl" in str(dist.get_backend_config(group))

    @property
    def in_order(self) -> bool:
        """Whether operations run one after another: on GPUs, where a group has one stream."""
        return self._in_order

    @property
    def process_group(self) -> Any:
        """The library's group, for functions of the library that need one, such as dividing weights."""
        return self._group

    @property
    def rank(self) -> int:
        """This rank, counted in the group."""
        return self._members.index(dist.get_rank())

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self._members)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Works:
        """Start sends and receives, receives first."""
        if _on_gpu([*sends, *receives]):
            return self._exchange_on_gpu(sends, receives)
        with _losing_peers():
            works = [dist.irecv(m.tensor, self._members[m.peer], self._group, m.tag) for m in receives]
            works += [dist.isend(m.tensor, self._members[m.peer], self._group, m.tag) for m in sends]
        return _Works(works, self._with_peers(sends, receives), [message.tensor for message in (*sends, *receives)])

    def _exchange_on_gpu(self, sends: Sequence[Message], receives: Sequence[Message]) -> _Works:
        """Start an exchange as one NCCL group, so that its parts may run in any order. Unverified."""
        ops = [dist.P2POp(dist.irecv, m.tensor, self._members[m.peer], self._group) for m in receives]
        ops += [dist.P2POp(dist.isend, m.tensor, self._members[m.peer], self._group) for m in sends]
        works = dist.batch_isend_irecv(ops)
        return _Works(
            works, self._with_peers(sends, receives), [message.tensor for message in (*sends, *receives)], on_gpu=True
        )

    def _with_peers(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], str]:
        peers = {self._members[m.peer] for m in (*sends, *receives)}
        return lambda: f"an exchange with {named_ranks(sorted(peers))}"

    def _describer(self, operation: str) -> Callable[[], str]:
        """Return a function that describes an operation of all ranks, for messages about waits."""
        return lambda: f"{operation} of {named_ranks(sorted(self._members))}"

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        """Reduce in place; 16-bit floats are sent and added as float32."""
        self.start_all_reduce(tensor, op).wait()

    def start_all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> _Works:
        """Start reducing in place; 16-bit floats are sent and added as float32."""
        wide = to_wire(tensor, op)
        work = dist.all_reduce(wide, _OPS[op], self._group, async_op=True)
        finish = functools.partial(from_wire, wide, tensor, op)
        return _Works([work], self._describer("all-reduce"), [wide], finish, on_gpu=wide.is_cuda)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite ``tensor`` with the root's."""
        dense = tensor.detach().contiguous()
        work = dist.broadcast(dense, self._members[root], self._group, async_op=True)
        _Works([work], self._describer("broadcast"), [dense], on_gpu=dense.is_cuda).wait()
        if dense.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(dense)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the root's value."""
        data = encoded(value) if self.rank == root else torch.empty(0, dtype=torch.uint8)
        # The length and as many bytes as fit: a small value needs only this broadcast.
        head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
        head[:8] = torch.tensor([data.numel()]).view(torch.uint8)
        first = data[: _HEAD_BYTES - 8]
        head[8 : 8 + first.numel()] = first
        self.broadcast(head, root)
        length = int(head[:8].view(torch.int64))
        if length <= _HEAD_BYTES - 8:
            return decoded(head[8 : 8 + length])
        if self.rank != root:
            data = torch.empty(length, dtype=torch.uint8)
        self.broadcast(data, root)
        return decoded(data)

    def gather_objects(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return all values on the root."""
        values = self._texts(value)
        return values if self.rank == root else None

    def _texts(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        data = encoded(value)
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = data.numel()
        self.all_reduce(sizes)
        buffers = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        # One broadcast for each rank: a gather of gloo takes tensors of one length only.
        buffers[self.rank].copy_(data)
        for root, buffer in enumerate(buffers):
            self.broadcast(buffer, root)
        return [decoded(buffer) for buffer in buffers]

    def send_object(self, value: Any, peer: int, tag: int) -> Completed:
        """Store a small value for a peer."""
        lane = f"hyfi/{self._name}/{peer}/{tag}"
        # Numbered by the store: several ranks may send to one peer, without knowing of each other.
        slot = self._store.add(f"{lane}/count", 1)
        self._store.set(f"{lane}/{slot}", json.dumps([self.rank, value]))
        return Completed()

    def poll_object(self, tag: int, peer: int | None = None) -> tuple[int, Any] | None:
        """Return (sender, value) of one received value with a tag, or None; ``peer``: only of this sender."""
        # Values are taken in the order of arrival; those of other peers wait in ``aside`` until a call asks for them.
        aside = self._aside.setdefault(tag, deque())
        key = f"hyfi/{self._name}/{self.rank}/{tag}/{self._taken.get(tag, 0) + 1}"
        if self._store.check([key]):
            sender, value = json.loads(self._store.get(key))
            self._store.delete_key(key)
            self._taken[tag] = self._taken.get(tag, 0) + 1
            aside.append((sender, value))
        for item in aside:
            if peer is None or item[0] == peer:
                aside.remove(item)
                return item
        return None

    def barrier(self) -> None:
        """Return when every rank of the group has entered the call."""
        self.all_reduce(torch.zeros(1))

    def split(self, color: int | None, key: int = 0) -> TorchCommunicator | None:
        """Return the group of all ranks that gave the same color, ordered by (key, rank)."""
        votes = self._texts([color, key])
        if color is None:
            return self.subgroup([])
        # Counted on every rank, even outside of the new group: its name must be new, and equal on all its ranks.
        self._splits += 1
        members = sorted((vote[1], rank) for rank, vote in enumerate(votes) if vote[0] == color)
        return self._group_of([rank for _, rank in members], str(color))

    def subgroup(self, members: Sequence[int]) -> TorchCommunicator | None:
        """Return the group of ``members``; only they exchange messages for it."""
        self._splits += 1
        if not members:
            # The library names a group by its ranks and the process's number of groups. That number must be equal on
            # all ranks, so a rank without members makes a group, too.
            dist.new_group([self._members[self.rank]], use_local_synchronization=True)
            return None
        return self._group_of(members, f"of {members[0]}")

    def _group_of(self, members: Sequence[int], name: str) -> TorchCommunicator:
        ranks = [self._members[rank] for rank in members]
        # Only members synchronise: otherwise every rank of the job would have to call it.
        group = dist.new_group(ranks, use_local_synchronization=True)
        return TorchCommunicator(group, ranks, f"{self._name}.{self._splits}.{name}")

    def abort(self, code: int) -> NoReturn:
        """End this process; ``torchrun`` then ends all others."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _on_gpu(messages: Sequence[Message]) -> bool:
    return any(message.tensor.is_cuda for message in messages)


def world(
    limit_s: float = 0.0, expected: Expected | None = None, interrupted: Callable[[], bool] = lambda: False
) -> TorchCommunicator:
    """Return all ranks that ``torchrun`` started.

    Args:
        limit_s: time limit of a message in the library; 0 for its default.
        expected: what the environment says about the other ranks, for messages.
        interrupted: whether a request to stop has been received; it ends the wait for other ranks.

    Raises:
        RendezvousError: they have not come in time, or the variables are wrong.
    """
    expected = expected or Expected("torchrun", os.environ)
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    try:
        return joined(lambda: _world(limit_s, gpu), expected, interrupted)
    except (ValueError, dist.DistError) as error:
        if isinstance(error, RequestError):
            raise
        reason = str(error).splitlines()[0]
        raise RendezvousError(
            f"torch.distributed cannot start ({reason}): {expected.describe()}. {expected.advice()}"
        ) from error


def _world(limit_s: float, gpu: int | None) -> TorchCommunicator:
    """Return the communicator of all ranks, after ``init_process_group`` unless that has been called."""
    if gpu is not None:
        torch.cuda.set_device(gpu)  # each thread has a current device of its own
    if not dist.is_initialized():
        on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
        limit = timedelta(seconds=limit_s) if limit_s else None
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", timeout=limit)
        atexit.register(_leave)
    return TorchCommunicator(dist.group.WORLD, list(range(dist.get_world_size())))


def board_store() -> Any:
    """Return a store for ``comm.supervision.board`` with its own connection: calls on another one may block it."""
    store: Any = dist.distributed_c10d._get_default_store()
    return dist.distributed_c10d.PrefixStore("hyfi/board", store.clone())


def _leave() -> None:
    """Destroy all groups before the interpreter shuts down: gloo's threads must not outlive it."""
    if dist.is_initialized():
        dist.destroy_process_group()
