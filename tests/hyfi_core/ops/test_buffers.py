"""Buffers of messages: never two holders, and nothing new after the first steps."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.models import resnet
from hyfi_core.ops import boundary as boundary_module
from hyfi_core.ops import buffers as buffers_module
from hyfi_core.ops.buffers import Buffers
from hyfi_core.plan import ParallelPlan
from hyfi_core.runtime.parallelize import parallelize
from tests.fake_gpu import CUDA, FakeGpu

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=30))
def test_what_somebody_holds_is_not_handed_out(moves: list[tuple[int, int]]) -> None:
    buffers, held = Buffers(), []
    for number, (size, dropped) in enumerate(moves):
        taken = buffers.take((size, 2), torch.float32, CPU).fill_(number)
        held.append((number, taken))
        buffers.give_back(tensor for _, tensor in held[:dropped])
        del held[:dropped]
        assert all((tensor == wanted).all() for wanted, tensor in held)


def test_a_buffer_comes_back_for_its_size_and_type_alone() -> None:
    buffers = Buffers()
    first = buffers.take((3, 4), torch.float32, CPU)
    place = first.data_ptr()
    buffers.give_back([first])
    assert buffers.take((2, 6), torch.float32, CPU).data_ptr() == place
    assert buffers.take((12,), torch.int32, CPU).data_ptr() != place
    assert buffers.bytes == 2 * 12 * 4


def test_one_that_is_never_given_back_is_nobody_elses_and_one_cannot_be_given_back_twice() -> None:
    buffers = Buffers()
    lost, given = buffers.take((4,), torch.float32, CPU), buffers.take((4,), torch.float32, CPU)
    buffers.give_back([given])
    assert buffers.take((4,), torch.float32, CPU).data_ptr() == given.data_ptr() != lost.data_ptr()
    buffers.give_back([given])
    with pytest.raises(AssertionError, match="twice"):
        buffers.give_back([given])


def test_dense_copies_only_what_is_not() -> None:
    whole = torch.arange(12.0).view(3, 4)
    assert Buffers().dense(whole).data_ptr() == whole.data_ptr()
    column = Buffers().dense(whole[:, 1:2])
    assert column.is_contiguous() and torch.equal(column, whole[:, 1:2])


@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(grids=((2, 2),), fused_halo=1),
        ParallelPlan(grids=((1, 2), (1, 1)), cuts=("layer2",), microbatches=2, schedule="1f1b", fused_halo=1),
    ],
)
def test_no_message_takes_new_memory_after_the_first_step(plan: ParallelPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Buffers] = []
    plain = Buffers.__init__
    monkeypatch.setattr(Buffers, "__init__", lambda self: (made.append(self), plain(self))[1])

    def body(comm: Communicator) -> Any:
        torch.manual_seed(0)
        engine = parallelize(resnet.resnet6(2), (2, 3, 96, 96), plan, comm)
        after = []
        for _ in range(3):
            engine.accumulate(torch.ones(2, 3, 96, 96), torch.tensor([0, 1]))
            comm.barrier()
            after.append(sum(buffers.bytes for buffers in made))
            comm.barrier()
        return after

    # Between stages a send may still be under way when the next is packed: how often is a matter of timing.
    most = 1.0 if plan.stages == 1 else 1.5
    for first, *later in run_ranks(plan.ranks, body):
        assert first > 0 and max(later) <= most * first


def test_buffers_on_a_gpu_are_freed_as_soon_as_they_are_given_back() -> None:
    with FakeGpu():
        buffers = Buffers()
        taken = buffers.take((2, 3), torch.bfloat16, CUDA)
        assert taken.is_cuda and taken.shape == (2, 3)
        memory = StorageWeakRef(taken.untyped_storage())
        buffers.give_back([taken])
        del taken
        assert memory.expired() and buffers.bytes == 0


class Made(TorchDispatchMode):
    """Memory that operators have made for maps of few samples, and for messages."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(tensor, torch.Tensor):
                continue
            # Weights and their gradients have more rows.
            is_map = tensor.dim() == 4 and len(tensor) <= 2
            if is_map or (tensor.dtype == torch.uint8 and tensor.numel() > 1000):
                self._made.append(StorageWeakRef(tensor.untyped_storage()))
        return result

    def alive(self, images: torch.Tensor) -> int:
        """Return how many pieces of memory there still are, beside that of the images."""
        known = {images.untyped_storage()._cdata}
        return len({memory.cdata for memory in self._made if not memory.expired()} - known)


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        (ParallelPlan(grids=((1, 1),), cells=(2, 2), interleave=4, recompute=True), 1),
        (ParallelPlan(grids=((1, 1),), interleave=4, recompute=True), 1),
        (ParallelPlan(grids=((1, 2),), fused_halo=1), 2),
        (ParallelPlan(grids=((1, 2), (1, 1)), cuts=("layer2.0.conv1",), microbatches=2, fused_halo=1), 3),
    ],
)
def test_no_map_stays_between_steps_where_buffers_are_not_kept(
    plan: ParallelPlan, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In cells, cuts within blocks and messages of two values included; nor waits memory for the collector."""
    for module in (buffers_module, boundary_module):
        monkeypatch.setattr(module, "is_kept", lambda device: False)
    images, labels = torch.randn(2, 3, 96, 96), torch.tensor([0, 1])

    def body(comm: Communicator) -> int:
        torch.manual_seed(0)
        model = resnet.resnet6(2)
        engine = parallelize(model, (2, 3, 96, 96), plan, comm)
        engine.accumulate(images, labels)  # makes constants of operators
        gc.disable()
        try:
            with Made() as made:
                engine.accumulate(images, labels)
            return made.alive(images)
        finally:
            gc.enable()

    assert not any(run_ranks(ranks, body) if ranks > 1 else [body(AloneCommunicator())])
