"""Messages of GPUs by MPI: through pinned host memory, or directly where MPI can; over stand-ins for both."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from hyfi_core.comm.base import Message
from tests.fake_gpu import FakeGpu, RaceError
from tests.fake_mpi import FakeMpi, adapter_over

SEEDS = range(4)


def numbers(value: float, count: int = 4) -> bytes:
    return torch.full((count,), value).numpy().tobytes()


def peers(rank: int, size: int) -> bytes:
    return numbers(10.0 * rank, size // 4)


@pytest.fixture(params=SEEDS)
def gpu(request: pytest.FixtureRequest) -> Iterator[FakeGpu]:
    with FakeGpu(request.param) as gpu:
        yield gpu


def over(mpi: FakeMpi, direct: bool) -> ModuleType:
    adapter = adapter_over(mpi)
    adapter.own_gpu_support = lambda: adapter.GpuSupport(direct, "as the test says")
    return adapter


def exchanged(gpu: FakeGpu, adapter: ModuleType, mpi: FakeMpi) -> list[float]:
    """Send a tensor that was just computed, receive one, and change both at once."""
    comm = adapter.MpiCommunicator(mpi.COMM_WORLD)
    out = mpi.device_memory(torch.full((4,), 2.0, device="cuda").add_(3.0))
    into = mpi.device_memory(torch.zeros(4, device="cuda"))
    comm.exchange([Message(1, out)], [Message(1, into)]).wait()
    out.fill_(7.0)
    found: list[float] = (into + 1.0).cpu().tolist()
    return found


@pytest.mark.parametrize("direct", [False, True])
def test_what_is_sent_and_received_is_complete(gpu: FakeGpu, direct: bool) -> None:
    mpi = FakeMpi(peers, gpu.random.randrange(100), gpu)
    assert exchanged(gpu, over(mpi, direct), mpi) == [11.0] * 4
    assert mpi.sent == [(1, numbers(5.0))]
    assert mpi.direct == (2 if direct else 0)


def test_what_was_received_is_copied_to_the_device_without_the_host_waiting(gpu: FakeGpu) -> None:
    mpi = FakeMpi(peers)
    comm = over(mpi, False).MpiCommunicator(mpi.COMM_WORLD)
    into = torch.zeros(4, device="cuda")
    with gpu.no_synchronisation():
        comm.exchange([], [Message(1, into)]).wait()
        doubled = into * 2
    assert doubled.cpu().tolist() == [20.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direct", [False, True])
def test_reductions_go_through_host_memory(gpu: FakeGpu, direct: bool, dtype: torch.dtype) -> None:
    """MPIs that take addresses of GPUs do not take them in reductions that do not block."""
    mpi = FakeMpi(peers)
    comm = over(mpi, direct).MpiCommunicator(mpi.COMM_WORLD)
    gradient = torch.ones(4, device="cuda", dtype=dtype)
    comm.all_reduce(gradient)
    assert (gradient * 2).cpu().tolist() == [22.0] * 4


def sliced(gpu: FakeGpu, adapter: ModuleType, mpi: FakeMpi, monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Exchange three messages each way, of 0, 3 and 11 numbers, in slices of 4; change and read them at once."""
    monkeypatch.setattr(adapter, "_SLICE_BYTES", 16)
    comm, sizes = adapter.MpiCommunicator(mpi.COMM_WORLD), (0, 3, 11)
    outs = [torch.arange(size, dtype=torch.float32, device="cuda").mul_(2.0) for size in sizes]
    into = [torch.zeros(size, device="cuda") for size in sizes]
    received = [Message(1, tensor, tag) for tag, tensor in enumerate(into)]
    pending = comm.exchange([Message(1, tensor, tag) for tag, tensor in enumerate(outs)], received)
    for out in outs:
        out.fill_(-1.0)
    pending.wait()
    return [(tensor + 1.0).cpu().tolist() for tensor in into]


@pytest.mark.parametrize("seed", range(12))
def test_slices_of_long_messages_arrive_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices differ, and each is read or written when it completes: an early or late access gives wrong numbers."""
    with FakeGpu(seed) as gpu:
        counts = iter(range(100))
        mpi = FakeMpi(lambda rank, size: numbers(float(next(counts)), size // 4), seed)
        found = sliced(gpu, over(mpi, False), mpi, monkeypatch)
    assert [len(values) for values in found] == [0, 3, 11]
    parts = [found[1], found[2][:4], found[2][4:8], found[2][8:]]
    assert all(len(set(part)) == 1 for part in parts)  # a slice is of one message
    assert {part[0] for part in parts} <= {1.0, 2.0, 3.0, 4.0, 5.0} and len({part[0] for part in parts}) == 4
    wanted = [torch.arange(size, dtype=torch.float32).mul(2.0) for size in (0, 3, 11)]
    pieces = [piece.numpy().tobytes() for tensor in wanted for piece in tensor.split(4)]
    assert sorted(data for _, data in mpi.sent) == sorted(pieces)


def test_a_slice_is_given_to_mpi_before_the_last_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending overlaps copying: the first is on its way while copies are left."""
    overlapped = 0
    for seed in range(12):
        with FakeGpu(seed) as gpu:
            mpi = FakeMpi(peers, seed)
            adapter = over(mpi, False)
            left, waits = [], adapter._await_copy

            def await_copy(part: object, requests: list[object], what: object) -> None:
                waits(part, requests, what)  # noqa: B023
                left.append((len(mpi._open), len(mpi.sent)))  # noqa: B023

            monkeypatch.setattr(adapter, "_await_copy", await_copy)
            sliced(gpu, adapter, mpi, monkeypatch)
            overlapped += left[-1][1] > 0
    assert overlapped


def test_received_slices_go_to_the_stream_of_the_exchange(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that makes progress has another current stream, and so may the one that waits."""
    mpi = FakeMpi(peers, gpu.random.randrange(100))
    adapter = over(mpi, False)
    monkeypatch.setattr(adapter, "_SLICE_BYTES", 16)
    comm, side = adapter.MpiCommunicator(mpi.COMM_WORLD), torch.cuda.Stream()
    with torch.cuda.stream(side):
        into = torch.zeros(11, device="cuda")
        pending = comm.exchange([], [Message(1, into)])
    into.record_stream(torch.cuda.current_stream())
    pending.wait()
    assert (into * 2).cpu().tolist() == [20.0] * 11


def test_a_copy_that_is_not_waited_for_is_sent_as_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = 0
    for seed in range(8):
        with FakeGpu(seed) as gpu:
            mpi = FakeMpi(peers, seed)
            adapter = over(mpi, False)
            monkeypatch.setattr(adapter, "_await_copy", lambda part, requests, what: None)
            exchanged(gpu, adapter, mpi)
            wrong += mpi.sent != [(1, numbers(5.0))]
    assert wrong


def test_memory_of_the_device_that_a_stream_still_uses_is_not_given_to_mpi(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi = FakeMpi(peers, gpu=gpu)
    adapter = over(mpi, True)
    monkeypatch.setattr(adapter, "_in_place", adapter._pieces)
    with pytest.raises(RaceError, match="a message on the host, but stream 1"):
        exchanged(gpu, adapter, mpi)


OPEN_MPI, CRAY = "Open MPI v5.0.3", "MPI VERSION    : CRAY MPICH version 8.1.28"


@pytest.mark.parametrize(
    ("version", "answer", "environment", "direct", "reason"),
    [
        (OPEN_MPI, 1, {}, True, "MPIX_Query_cuda_support"),
        (OPEN_MPI, 0, {}, False, "built without CUDA"),
        (OPEN_MPI, None, {}, False, "no MPIX_Query_cuda_support"),
        (OPEN_MPI, 1, {"HYFI_MPI_CUDA": "0"}, False, "HYFI_MPI_CUDA is 0"),
        (OPEN_MPI, 1, {"OMPI_MCA_opal_cuda_support": "false"}, False, "OMPI_MCA_opal_cuda_support is false"),
        (OPEN_MPI, 1, {"UCX_TLS": "rc,sm,cuda_copy,cuda_ipc"}, True, "MPIX_Query"),
        (OPEN_MPI, 1, {"UCX_TLS": "rc,sm"}, False, "UCX_TLS is rc,sm"),
        (OPEN_MPI, 1, {"UCX_TLS": "^cuda_ipc,cuda_copy"}, False, "UCX_TLS"),
        (OPEN_MPI, 1, {"UCX_TLS": "^rc"}, True, "MPIX_Query"),
        (OPEN_MPI, 1, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, False, "expandable_segments"),
        ("MPICH Version: 5.0.2", 1, {"MPIR_CVAR_ENABLE_GPU": "0"}, False, "MPIR_CVAR_ENABLE_GPU is 0"),
        (CRAY, 1, {}, False, "MPICH_GPU_SUPPORT_ENABLED is not set"),
        (CRAY, None, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True, "MPICH_GPU_SUPPORT_ENABLED is 1"),
        ("MVAPICH2 2.3.7", None, {"MV2_USE_CUDA": "1"}, True, "MV2_USE_CUDA is 1"),
    ],
)
def test_mpi_is_given_addresses_of_a_gpu_only_if_nothing_speaks_against_it(
    version: str, answer: int | None, environment: dict[str, str], direct: bool, reason: str
) -> None:
    query = None if answer is None else lambda: answer
    found = adapter_over(FakeMpi(peers)).gpu_support(version, query, environment)
    assert found.direct is direct and reason in found.reason
