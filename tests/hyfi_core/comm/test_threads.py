"""Ranks as threads: order, failures, groups."""

import pytest
import torch

from hyfi_core.comm.base import Communicator, Message
from hyfi_core.comm.threads import run_ranks


def test_messages_of_one_lane_arrive_in_order() -> None:
    def body(comm: Communicator) -> list[float]:
        if comm.rank == 0:
            for value in (1.0, 2.0, 3.0):
                comm.exchange([Message(1, torch.tensor([value]))], []).wait()
            return []
        boxes = [torch.empty(1) for _ in range(3)]
        comm.exchange([], [Message(0, box) for box in boxes]).wait()
        return [float(box) for box in boxes]

    assert run_ranks(2, body)[1] == [1.0, 2.0, 3.0]


def test_reductions_give_every_rank_the_same_bits() -> None:
    def body(comm: Communicator) -> list[float]:
        value = torch.tensor([0.1 * (comm.rank + 1), -float(comm.rank)], dtype=torch.float64)
        total, top = value.clone(), value.clone()
        comm.all_reduce(total)
        comm.all_reduce(top, "max")
        return [*total.tolist(), *top.tolist()]

    results = run_ranks(4, body)
    assert all(result == results[0] for result in results)
    assert results[0][0] == pytest.approx(1.0) and results[0][2:] == [0.4, 0.0]


def test_the_first_error_ends_all_ranks_and_is_the_one_raised() -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 1:
            raise KeyError("the first error")
        comm.barrier()

    with pytest.raises(KeyError, match="the first error"):
        run_ranks(3, body, timeout_s=20)


def test_a_dead_lock_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(TimeoutError, match="2 ranks"):
        run_ranks(2, lambda comm: comm.barrier() if comm.rank == 0 else None, timeout_s=0.5)


def test_groups_are_ordered_by_key_and_talk_among_themselves() -> None:
    def body(comm: Communicator) -> object:
        group = comm.split(comm.rank % 2 if comm.rank < 4 else None, key=-comm.rank)
        if group is None:
            return None
        value = torch.tensor([float(comm.rank)])
        group.all_reduce(value)
        return group.rank, group.size, float(value)

    assert run_ranks(5, body) == [(1, 2, 2.0), (1, 2, 4.0), (0, 2, 2.0), (0, 2, 4.0), None]


def test_a_message_of_another_size_is_refused() -> None:
    def body(comm: Communicator) -> None:
        size = 2 + comm.rank
        comm.exchange([Message(1 - comm.rank, torch.zeros(size))], [Message(1 - comm.rank, torch.zeros(size))]).wait()

    with pytest.raises(RuntimeError, match="expects"):
        run_ranks(2, body)


def test_objects_wait_until_they_are_asked_for() -> None:
    def body(comm: Communicator) -> object:
        if comm.rank == 0:
            comm.send_object({"step": 3}, 1, tag=7).wait()
            comm.barrier()
            return None
        comm.barrier()
        return comm.poll_object(7), comm.poll_object(7), comm.poll_object(8)

    assert run_ranks(2, body)[1] == ((0, {"step": 3}), None, None)
