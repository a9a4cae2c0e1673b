"""Where operations run in order, exchanges have a communicator for each ordered pair of ranks."""

from __future__ import annotations

import pytest
import torch

from hyfi_core.comm.base import Communicator, Message
from hyfi_core.comm.pair_channels import PairChannels, with_pair_channels
from hyfi_core.comm.threads import DeadlockError, run_ranks


def crossing(comm: Communicator) -> float:
    """Send and receive as a pipeline does: each rank posts a receive before it sends what the other waits for."""
    peer, box, other = 1 - comm.rank, torch.zeros(1), torch.zeros(1)
    if comm.rank == 0:
        sent = comm.exchange([Message(peer, torch.ones(1))], [])
        back = comm.exchange([], [Message(peer, box)])
        again = comm.exchange([Message(peer, torch.full((1,), 2.0))], [])
        for pending in (back, sent, again):
            pending.wait()
        return float(box)
    first, second = comm.exchange([], [Message(peer, box)]), comm.exchange([], [Message(peer, other)])
    first.wait()
    sent = comm.exchange([Message(peer, torch.full((1,), 5.0))], [])
    second.wait()
    sent.wait()
    return float(box + other)


def test_one_stream_for_all_messages_dead_locks_and_one_for_each_pair_does_not() -> None:
    assert run_ranks(2, crossing) == [5.0, 3.0]
    with pytest.raises(DeadlockError, match="rank 0 waits for"):
        run_ranks(2, crossing, strict=True)
    assert run_ranks(2, lambda comm: crossing(with_pair_channels(comm)), strict=True) == [5.0, 3.0]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_every_rank_has_a_channel_to_and_from_every_other(size: int) -> None:
    def body(comm: Communicator) -> list[float]:
        channels = with_pair_channels(comm)
        assert isinstance(channels, PairChannels) and channels.size == size
        others = [peer for peer in range(size) if peer != comm.rank]
        boxes = [torch.zeros(1) for _ in others]
        pending = channels.exchange(
            [Message(peer, torch.tensor([10.0 * comm.rank + peer])) for peer in others],
            [Message(peer, box) for peer, box in zip(others, boxes, strict=True)],
        )
        while not pending.test():
            pass
        pending.wait()
        return [float(box) for box in boxes]

    for rank, found in enumerate(run_ranks(size, body, strict=True)):
        assert found == [10.0 * peer + rank for peer in range(size) if peer != rank]


def test_without_order_nothing_changes() -> None:
    assert all(run_ranks(2, lambda comm: with_pair_channels(comm) is comm))
