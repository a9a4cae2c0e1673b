"""Buffers of messages: never two holders, and nothing new after the first steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hyfi_core.comm.base import Communicator
from hyfi_core.comm.threads import run_ranks
from hyfi_core.models import resnet
from hyfi_core.ops.buffers import Buffers
from hyfi_core.plan import ParallelPlan
from hyfi_core.runtime.parallelize import parallelize

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
        engine = parallelize(resnet.resnet10(2), (2, 3, 96, 96), plan, comm)
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
