"""Ranks that take turns: what is asked once is answered as often as it is asked again."""

from __future__ import annotations

import contextlib

import pytest
import torch

from hyfi_core.comm.base import Message
from hyfi_core.comm.cooperative import CooperativeCommunicator, CooperativeGroup, WouldBlock


def ranks(size: int) -> tuple[CooperativeGroup, list[CooperativeCommunicator]]:
    turns = CooperativeGroup(size)
    return turns, [CooperativeCommunicator(turns, rank) for rank in range(size)]


def swapped(comm: CooperativeCommunicator, *values: float) -> list[float]:
    """Exchange values with the other one of two ranks, then add a maximum: an operator that communicates twice."""
    comm.begin()
    boxes = [torch.empty(1) for _ in values]
    peer = 1 - comm.rank
    comm.exchange([Message(peer, torch.tensor([v])) for v in values], [Message(peer, box) for box in boxes])
    top = torch.stack(boxes).amax(0)
    comm.all_reduce(top, "max")
    comm.end()
    return [*(float(box) for box in boxes), float(top)]


def test_an_operator_goes_on_where_it_had_to_wait_and_sends_nothing_twice() -> None:
    turns, (first, second) = ranks(2)
    with pytest.raises(WouldBlock):
        swapped(first, 1.0, 2.0)
    with pytest.raises(WouldBlock):  # has its messages, and waits for the other's share of the maximum
        swapped(second, 5.0, 3.0)
    assert swapped(first, 1.0, 2.0) == [5.0, 3.0, 5.0]
    happened = turns.happened
    assert swapped(second, 5.0, 3.0) == [1.0, 2.0, 5.0]
    assert turns.happened == happened, "the second time everything is there already"
    with pytest.raises(WouldBlock):  # and nothing is left over for the next operator
        swapped(first, 7.0, 8.0)


def test_sums_are_taken_in_rank_order_and_are_the_same_bits_for_all() -> None:
    _, comms = ranks(3)
    shares = [torch.tensor([0.1]), torch.tensor([0.2]), torch.tensor([0.3])]
    totals: dict[int, float] = {}
    for _ in range(2):
        for comm in (comm for comm in comms if comm.rank not in totals):
            comm.begin()
            total = shares[comm.rank].clone()
            with contextlib.suppress(WouldBlock):
                comm.all_reduce(total)
                comm.end()
                totals[comm.rank] = float(total)
    assert list(totals) == [2, 0, 1], "the last one to come need not wait"
    assert set(totals.values()) == {float(shares[0] + shares[1] + shares[2])}


def test_what_was_sent_must_stay_as_it_is() -> None:
    _, (first, second) = ranks(2)
    sent = torch.zeros(2)
    first.exchange([Message(1, sent)], [])
    sent.add_(1)
    with pytest.raises(RuntimeError, match="rank 0 changed"):
        second.exchange([], [Message(0, torch.empty(2))])


def test_a_message_of_another_shape_is_told() -> None:
    _, (first, second) = ranks(2)
    first.exchange([Message(1, torch.zeros(2))], [])
    with pytest.raises(RuntimeError, match=r"\(3,\) torch.float32 is expected from rank 0, which sent \(2,\)"):
        second.exchange([], [Message(0, torch.empty(3))])


def test_what_no_forward_calls_is_not_offered() -> None:
    _, (comm,) = ranks(1)
    with pytest.raises(AttributeError, match="broadcast is not offered"):
        comm.broadcast(torch.zeros(1))
