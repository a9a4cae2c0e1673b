"""The NCCL path of ``torchdist`` on a GPU made of CPU tensors, and a stand-in for NCCL: what runs when, and where."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hyfi_core.comm import torchdist
from hyfi_core.comm.base import Message, ReduceOp
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.comm.torchdist import TorchCommunicator
from hyfi_core.comm.wire import to_wire
from tests.fake_gpu import FakeGpu, RaceError
from tests.fake_nccl import FakeNccl


def sends(rank: int, like: torch.Tensor) -> torch.Tensor:
    floats = torch.full(like.shape, 10.0 * rank + 1)
    return to_wire(floats, "max") if like.dtype == torch.int32 else floats.to(like.dtype)


@pytest.fixture(params=range(4))
def gpu(request: pytest.FixtureRequest) -> Iterator[FakeGpu]:
    with FakeGpu(request.param) as gpu:
        yield gpu


@pytest.fixture
def nccl(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    nccl = FakeNccl(gpu, rank=0, size=3, peers=sends)
    monkeypatch.setattr(torchdist, "dist", nccl)
    return nccl


@pytest.fixture
def comm(nccl: FakeNccl) -> TorchCommunicator:
    return TorchCommunicator(nccl.WORLD, [0, 1, 2])


def on_gpu(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((4,), value, dtype=dtype, device="cuda")


def test_an_exchange_ends_without_the_host_waiting(gpu: FakeGpu, nccl: FakeNccl, comm: TorchCommunicator) -> None:
    left, right, out = on_gpu(0.0), on_gpu(0.0), on_gpu(5.0)
    with gpu.no_synchronisation():
        pending = comm.exchange([Message(1, out)], [Message(1, left), Message(2, right)])
        pending.wait()
        total = left + right
        out.fill_(6.0)
    assert total.cpu().tolist() == [32.0] * 4
    assert [(peer, values.tolist()) for peer, values in nccl.sent] == [(1, [5.0] * 4)]


def test_what_is_received_or_sent_belongs_to_nccl_until_the_wait(comm: TorchCommunicator) -> None:
    into, out = on_gpu(0.0), on_gpu(5.0)
    pending = comm.exchange([Message(1, out)], [Message(1, into)])
    with pytest.raises(RaceError, match="add on stream"):
        into + 1
    with pytest.raises(RaceError, match="fill_ on stream"):
        out.fill_(6.0)
    pending.wait()
    assert (into + 1).cpu().tolist() == [12.0] * 4


@pytest.mark.parametrize("tested", [False, True])
@pytest.mark.parametrize(("dtype", "op"), [(torch.float32, "sum"), (torch.bfloat16, "sum"), (torch.float32, "max")])
def test_reductions_are_completed_by_wait_and_by_test(
    gpu: FakeGpu, comm: TorchCommunicator, dtype: torch.dtype, op: ReduceOp, tested: bool
) -> None:
    gradient = on_gpu(2.0, dtype)
    with gpu.no_synchronisation():
        pending = comm.start_all_reduce(gradient, op)
        while tested and not pending.test():
            pass
        pending.wait()
        doubled = gradient * 2
    assert doubled.cpu().tolist() == [68.0 if op == "sum" else 42.0] * 4


def test_a_wait_left_out_is_seen(comm: TorchCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchdist._Works, "_wait_for_all", lambda works: None)
    gradient = on_gpu(2.0)
    comm.start_all_reduce(gradient).wait()
    with pytest.raises(RaceError):
        gradient * 2
    narrow = on_gpu(2.0, torch.bfloat16)
    with pytest.raises(RaceError):  # its sum is copied back
        comm.start_all_reduce(narrow).wait()


def test_weights_are_broadcast_before_they_are_read(comm: TorchCommunicator) -> None:
    weight = on_gpu(0.0)
    comm.broadcast(weight, root=2)
    assert (weight + 1).cpu().tolist() == [22.0] * 4


def test_time_spent_on_messages_is_that_of_the_stream(gpu: FakeGpu, nccl: FakeNccl, comm: TorchCommunicator) -> None:
    """The wait returns at once; the stream waits for what is left of the messages after its own work."""
    nccl.seconds = 250.0
    counted = CountedCommunicator(comm)
    with gpu.no_synchronisation():
        pending = counted.of("stage").exchange([], [Message(1, on_gpu(0.0))])
        gpu.current.time_s += 100.0  # computes meanwhile
        pending.wait()
        counted.of("reduce").all_reduce(on_gpu(1.0))
        counted.counts.collect()
        before = dict(counted.counts.seconds)  # what is over already
        counted.counts.reset()  # the next step begins before the host has seen the end of this one
    gpu.current.synchronize()
    counted.counts.collect()
    after = counted.counts.seconds
    assert before["stage"] + after["stage"] == pytest.approx(150, abs=20)  # and the host's own time
    assert before["reduce"] + after["reduce"] == pytest.approx(250, abs=20)


def test_groups_have_streams_of_their_own(gpu: FakeGpu, nccl: FakeNccl) -> None:
    """An operation of one group does not wait for one of another group; one of the same group does."""
    first, second = (TorchCommunicator(nccl.new_group([0, 1]), [0, 1]) for _ in range(2))
    nccl.seconds = 1.0
    before = first.start_all_reduce(on_gpu(1.0))
    second.start_all_reduce(on_gpu(1.0)).wait()
    assert gpu.current.time_s == 1.0
    after = first.start_all_reduce(on_gpu(1.0))
    before.wait()
    assert gpu.current.time_s == 1.0
    after.wait()
    assert gpu.current.time_s == 2.0


def test_a_send_outside_of_a_batch_is_refused(
    nccl: FakeNccl, comm: TorchCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchdist, "_on_gpu", lambda messages: False)
    with pytest.raises(AssertionError, match="outside of a batch"):
        comm.exchange([Message(1, on_gpu(1.0))], [])
