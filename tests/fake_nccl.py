"""NCCL on a GPU made of CPU tensors: ``torch.distributed`` as ``comm.torchdist`` calls it, for one rank of many.

    with FakeGpu(seed) as gpu:
        nccl = FakeNccl(gpu, rank=0, size=2, peers=...)
        monkeypatch.setattr(torchdist, "dist", nccl)
        comm = TorchCommunicator(nccl.WORLD, [0, 1])

Only one rank runs; ``peers`` says what the others send. As in NCCL, every group has one stream, on which its operations
run in the order in which they are started, after what the current stream has done until then; calls return at once, and
``wait`` makes the current stream wait, not the host. What is received is garbage until then. Sends and receives outside
of a batch, which may block each other, are refused, as are tensors with gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.fake_gpu import _GARBAGE, Event, FakeGpu, Stream

Peers = Callable[[int, torch.Tensor], torch.Tensor]
"""(global rank, a tensor of the same shape and dtype) -> what the rank sends or adds."""


@dataclass
class Group:
    """A communicator of NCCL.

    Attributes:
        ranks: global ranks.
        stream: of all its operations.
    """

    ranks: tuple[int, ...]
    stream: Stream


@dataclass
class P2POp:
    """One send or receive of a batch."""

    op: Any
    tensor: torch.Tensor
    peer: int
    group: Group


class Work:
    """An operation under way."""

    def __init__(self, gpu: FakeGpu, stream: Stream) -> None:
        self._gpu, self._done = gpu, Event(gpu)
        self._done.record(stream)

    def wait(self) -> None:
        self._gpu.current.wait_event(self._done)

    def is_completed(self) -> bool:
        return self._done.query()


@dataclass
class FakeNccl:
    """Stands in for ``torch.distributed``.

    Attributes:
        gpu: the device.
        rank: global rank of this process.
        size: number of ranks.
        peers: what other ranks send.
        seconds: of the device's time that every operation takes.
        calls: (ranks of the group, operation, its other rank or None, shape) of all operations, as started.
        sent: (peer, values) of all sends that have run.
    """

    gpu: FakeGpu
    rank: int
    size: int
    peers: Peers
    seconds: float = 0.0
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    sent: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    P2POp = P2POp

    def __post_init__(self) -> None:
        self.WORLD = self.new_group(list(range(self.size)))
        self.distributed_c10d = SimpleNamespace(_get_default_store=lambda: None)

    def get_rank(self) -> int:
        return self.rank

    def get_backend_config(self, group: Group) -> str:
        return "cpu:gloo,cuda:nccl"

    def new_group(self, ranks: list[int], **options: Any) -> Group:
        return Group(tuple(ranks), Stream(self.gpu))

    def isend(self, tensor: torch.Tensor, *rest: Any) -> None:
        raise AssertionError("a send on a GPU outside of a batch")

    def irecv(self, tensor: torch.Tensor, *rest: Any) -> None:
        raise AssertionError("a receive on a GPU outside of a batch")

    def batch_isend_irecv(self, ops: Sequence[P2POp]) -> list[Work]:
        """Start all as one operation: they run in any order."""
        group = ops[0].group
        sends, receives = ([op for op in ops if op.op == kind] for kind in (self.isend, self.irecv))
        for op in ops:
            assert op.group is group and op.peer in group.ranks and op.peer != self.rank
            kind = "send" if op.op == self.isend else "receive"
            self.calls.append((group.ranks, kind, op.peer, tuple(op.tensor.shape)))
        leaving = [(op.peer, self._detached(op.tensor)) for op in sends]

        def run() -> None:
            self.sent += leaving
            for op in receives:
                self._write(op.tensor, self.peers(op.peer, op.tensor))

        return [self._launch(group, "an exchange", [op.tensor for op in sends], [op.tensor for op in receives], run)]

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: Group, async_op: bool) -> Work:
        """Start a sum, or a maximum or minimum."""
        self.calls.append((group.ranks, "all_reduce", None, tuple(tensor.shape)))
        total = self._detached(tensor)
        with _disable_current_modes():
            others = [self.peers(rank, tensor) for rank in group.ranks if rank != self.rank]
            for other in others:
                kind = str(op)
                total = (
                    total + other
                    if "SUM" in kind
                    else (torch.maximum if "MAX" in kind else torch.minimum)(total, other)
                )
        return self._launch(group, "an all-reduce", [tensor], [tensor], lambda: self._write(tensor, total))

    def broadcast(self, tensor: torch.Tensor, root: int, group: Group, async_op: bool) -> Work:
        """Start a broadcast."""
        self.calls.append((group.ranks, "broadcast", root, tuple(tensor.shape)))
        if root == self.rank:
            return self._launch(group, "a broadcast", [tensor], [], lambda: None)
        return self._launch(group, "a broadcast", [], [tensor], lambda: self._write(tensor, self.peers(root, tensor)))

    def _launch(
        self, group: Group, what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], run: Any
    ) -> Work:
        gpu, stream = self.gpu, group.stream
        stream.wait_stream(gpu.current)
        gpu.tick(stream.number)
        for tensor in (*reads, *writes):
            assert gpu.on_gpu(tensor), f"{what} of a tensor on the host"
            assert tensor.is_contiguous(), f"{what} of a tensor with gaps"
        for tensor in reads:
            gpu.touch(tensor, stream.number, False, what)
        for tensor in writes:
            gpu.touch(tensor, stream.number, True, what)
            with _disable_current_modes(), torch.no_grad():
                tensor.detach().view(-1).view(torch.uint8).fill_(_GARBAGE)
        stream.time_s += self.seconds
        stream.queue.append((stream.clock[stream.number], run))
        return Work(gpu, stream)

    def _detached(self, tensor: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            return tensor.detach().clone()

    def _write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        with _disable_current_modes(), torch.no_grad():
            tensor.detach().copy_(values)
