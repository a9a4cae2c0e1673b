"""What was received is played back in its order, and nothing is sent again."""

from __future__ import annotations

import pytest
import torch

from hyfi_core.comm.base import Communicator, Message
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.comm.replay import RecordingCommunicator, ReplayingCommunicator
from hyfi_core.comm.threads import run_ranks


def test_a_forward_is_played_back_without_its_peers() -> None:
    def talk(comm: Communicator, rank: int) -> list[torch.Tensor]:
        peer, box, late = 1 - rank, torch.zeros(3), torch.zeros(2)
        pending = comm.exchange([Message(peer, torch.full((3,), 1.0 + rank))], [Message(peer, box)])
        started = comm.start_all_reduce(total := torch.full((2,), 10.0 + rank))
        pending.wait()
        other = comm.exchange([Message(peer, torch.full((2,), 5.0 + rank))], [Message(peer, late)])
        while not other.test():
            pass
        started.wait()
        comm.all_reduce(largest := torch.tensor([float(rank)]), "max")
        return [box, total, late, largest]

    def body(comm: Communicator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        recorder = RecordingCommunicator(CountedCommunicator(comm))
        first = [tensor.clone() for tensor in talk(recorder, comm.rank)]
        comm.barrier()
        if comm.rank:
            return first, first
        replaying = ReplayingCommunicator(recorder.log, comm.rank, comm.size)  # rank 1 has gone: nothing may be sent
        again = talk(replaying, comm.rank)
        with pytest.raises(AttributeError, match="split cannot be replayed"):
            replaying.split(0)
        assert not recorder.log
        return first, again

    for first, again in run_ranks(2, body):
        assert [tensor.tolist() for tensor in first] == [tensor.tolist() for tensor in again]
        assert first[1].tolist() == [21.0, 21.0]
