"""Ranks as threads: order, failures, groups, turns."""

import statistics
import threading

import pytest
import torch

from hyfi_core.comm.base import Communicator, Message
from hyfi_core.comm.threads import DeadlockError, PeerFailedError, run_ranks


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


def test_a_subgroup_has_its_members_in_their_order() -> None:
    def body(comm: Communicator) -> object:
        groups = {0: [4, 0], 1: [1, 2], 2: [1, 2], 4: [4, 0]}
        group = comm.subgroup(groups.get(comm.rank, []))
        if group is None:
            return None
        value = torch.tensor([float(comm.rank)])
        group.all_reduce(value)
        return group.rank, group.size, float(value)

    assert run_ranks(5, body) == [(1, 2, 4.0), (0, 2, 3.0), (1, 2, 3.0), None, (0, 2, 4.0)]


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


def test_several_reductions_may_be_under_way() -> None:
    def body(comm: Communicator) -> list[float]:
        first, second = torch.tensor([1.0 + comm.rank]), torch.tensor([float(comm.rank)])
        pending = [comm.start_all_reduce(first), comm.start_all_reduce(second, "max")]
        comm.barrier()
        assert pending[1].test()
        for one in reversed(pending):
            one.wait()
        return [float(first), float(second)]

    assert run_ranks(3, body, strict=True) == [[6.0, 2.0]] * 3


def test_ranks_that_make_different_calls_are_told_which() -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce(torch.zeros(3 + comm.rank))

    with pytest.raises(RuntimeError, match=r"rank \d calls all_reduce sum of .* while rank \d calls all_reduce sum of"):
        run_ranks(2, body)


def test_strict_sends_wait_for_their_receives() -> None:
    def body(comm: Communicator) -> bool:
        aside = comm.split(0)
        assert aside is not None
        if comm.rank == 0:
            pending = comm.exchange([Message(1, torch.ones(2))], [])
            before = pending.test()
            aside.barrier()
            pending.wait()
            return before
        box = torch.zeros(2)
        aside.barrier()
        comm.exchange([], [Message(0, box)]).wait()
        return bool(box.sum() == 2)

    assert run_ranks(2, body, strict=True) == [False, True]


def test_strict_ranks_that_both_send_before_they_receive_are_told_that_they_are_dead_locked() -> None:
    def body(comm: Communicator) -> None:
        peer = 1 - comm.rank
        comm.exchange([Message(peer, torch.ones(2))], []).wait()
        comm.exchange([], [Message(peer, torch.ones(2))]).wait()

    run_ranks(2, body)  # buffered, it runs
    with pytest.raises(
        DeadlockError, match=r"rank 0 waits for rank 1 to receive .*; rank 1 waits for rank 0 to receive"
    ):
        run_ranks(2, body, strict=True)


def test_strict_ranks_may_not_lean_on_tags() -> None:
    def body(comm: Communicator) -> float:
        if comm.rank == 0:
            comm.exchange([Message(1, torch.ones(1), tag=1), Message(1, torch.zeros(1), tag=2)], []).wait()
            return 0.0
        first, second = torch.empty(1), torch.empty(1)
        comm.exchange([], [Message(0, second, tag=2), Message(0, first, tag=1)]).wait()
        return float(first)

    assert run_ranks(2, body)[1] == 1.0
    with pytest.raises(RuntimeError, match=r"rank 1 expects .* with tag . from rank 0, which sent .* with tag"):
        run_ranks(2, body, strict=True)


def test_strict_operations_of_a_group_do_not_overtake_each_other() -> None:
    def body(comm: Communicator) -> None:
        peer, box = 1 - comm.rank, torch.zeros(1)
        if comm.rank == 0:
            pending = comm.exchange([], [Message(peer, box)])
            comm.barrier()
            pending.wait()
        else:
            comm.barrier()
            comm.exchange([Message(peer, box)], []).wait()

    run_ranks(2, body)  # without one stream, it runs
    with pytest.raises(DeadlockError, match=r"rank 0 waits for barrier with ranks .*; rank 1 waits for barrier"):
        run_ranks(2, body, strict=True)


def test_a_tensor_that_is_changed_while_it_is_sent_is_found_out() -> None:
    def body(comm: Communicator) -> None:
        tensor, aside = torch.ones(2), comm.split(0)
        assert aside is not None
        if comm.rank == 0:
            pending = comm.exchange([Message(1, tensor)], [])
            tensor += 1
            aside.barrier()
            pending.wait()
        else:
            aside.barrier()
            comm.exchange([], [Message(0, tensor)]).wait()

    with pytest.raises(RuntimeError, match="rank 0 changed"):
        run_ranks(2, body, strict=True)


def test_a_rank_that_waits_for_one_that_has_ended_is_told_so() -> None:
    def body(comm: Communicator) -> None:
        group = comm.split(comm.rank // 2)
        assert group is not None
        if comm.rank == 3:
            group.barrier()

    with pytest.raises(DeadlockError, match=r"rank 3 waits for barrier with ranks \[0\]; rank 0 has ended"):
        run_ranks(4, body, strict=True)


def test_ranks_with_short_turns_run_one_at_a_time() -> None:
    inside: set[int] = set()

    def body(comm: Communicator) -> list[int]:
        value, seen = torch.zeros(8), []
        for _ in range(200):
            inside.add(comm.rank)
            for _ in range(10):
                value = value + 1
            seen.append(len(inside))
            inside.discard(comm.rank)
            comm.barrier()
        return seen

    assert statistics.median(number for seen in run_ranks(16, body) for number in seen[100:]) == 1


def test_ranks_that_wait_for_each_other_without_messages_all_get_a_turn() -> None:
    meeting = threading.Barrier(12, timeout=20)
    assert sorted(run_ranks(12, lambda comm: meeting.wait(), timeout_s=30)) == list(range(12))


def test_a_rank_that_polls_lets_others_run() -> None:
    def body(comm: Communicator) -> int:
        polls = 0
        for step in range(20):
            if comm.rank == 0:
                for peer in range(1, comm.size):
                    comm.send_object(step, peer, tag=1)
            while comm.rank and comm.poll_object(1, 0) is None:
                polls += 1
            comm.barrier()
        return polls

    run_ranks(4, body, timeout_s=30)


def test_an_abort_ends_ranks_that_wait() -> None:
    def body(comm: Communicator) -> None:
        comm.abort(3) if comm.rank == 2 else comm.barrier()

    with pytest.raises(PeerFailedError, match="aborted with code 3 by rank 2"):
        run_ranks(3, body, timeout_s=20)
