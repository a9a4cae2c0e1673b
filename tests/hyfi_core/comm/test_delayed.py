"""Late messages: not before their time, nothing else delayed, and the waiting is counted."""

from __future__ import annotations

import time

import torch

from hyfi_core.comm.base import Communicator, Message
from hyfi_core.comm.delayed import DelayedCommunicator, Latency
from hyfi_core.comm.threads import run_ranks


def test_a_message_is_there_when_its_latency_has_passed() -> None:
    def body(comm: Communicator) -> tuple[float, Latency]:
        latency = Latency(0.5)
        late = DelayedCommunicator(comm, latency).split(0, comm.rank)
        assert late is not None
        boxes = torch.zeros(3), torch.zeros(2)
        start_s = time.perf_counter()  # before the other rank can have sent
        comm.barrier()
        sends = [Message(1 - comm.rank, torch.ones(3)), Message(1 - comm.rank, torch.ones(2))]
        pending = late.exchange(sends, [Message(1 - comm.rank, box) for box in boxes])
        assert not pending.test()
        pending.wait()
        assert pending.test() and all(bool(box.all()) for box in boxes)
        return time.perf_counter() - start_s, latency

    for waited_s, latency in run_ranks(2, body, strict=True):
        assert waited_s >= 0.5
        assert latency.injected_s == 0.5 and 0 < latency.visible_s <= 0.5


def test_what_was_computed_meanwhile_is_not_waited_for_again() -> None:
    def body(comm: Communicator) -> float:
        latency = Latency(0.05)
        box = torch.zeros(1)
        late = DelayedCommunicator(comm, latency)
        pending = late.exchange([Message(1 - comm.rank, torch.ones(1))], [Message(1 - comm.rank, box)])
        comm.barrier()
        time.sleep(0.06)
        pending.wait()
        return latency.visible_s

    assert run_ranks(2, body) == [0.0, 0.0]
