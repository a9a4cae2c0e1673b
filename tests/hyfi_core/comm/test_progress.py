"""A helper thread makes the calls while a rank computes, and stops before anybody else does."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from hyfi_core.comm import progress
from hyfi_core.comm.alone import AloneCommunicator
from hyfi_core.comm.counted import CountedCommunicator
from hyfi_core.comm.progress import OWN_CORE, SHARED_CORE, Patience, backed_off, polled, set_patience
from hyfi_core.comm.replay import RecordingCommunicator
from tests.patience import PATIENCE_S


class Slow:
    """Goes on only inside calls; done after so many."""

    needs_polls = True

    def __init__(self, calls: int, error: Exception | None = None) -> None:
        self.left, self.error = calls, error
        self.callers: list[str] = []

    def test(self) -> bool:
        self.callers.append(threading.current_thread().name)
        if self.error is not None and len(self.callers) > 1:
            raise self.error
        self.left -= 1
        return self.left <= 0

    def wait(self) -> None:
        while not self.test():
            pass


def until(ready: object) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not ready() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(1e-3)


def test_it_is_polled_to_its_end_and_not_beyond() -> None:
    pending = Slow(4)
    with polled(pending):
        until(lambda: pending.left <= 0)
    assert pending.left == 0 and pending.callers[1:] == ["hyfi-progress"] * 3


def test_nobody_polls_once_the_body_is_done() -> None:
    pending = Slow(10**9)
    with polled(pending):
        until(lambda: len(pending.callers) > 2)
    seen = len(pending.callers)
    time.sleep(0.02)
    assert len(pending.callers) == seen


def test_an_error_is_left_to_whoever_waits() -> None:
    pending = Slow(10**9, OSError("the network"))
    with polled(pending):
        until(lambda: len(pending.callers) > 1)
        time.sleep(0.02)
    assert len(pending.callers) == 2
    with pytest.raises(OSError, match="the network"):
        pending.wait()


@pytest.mark.parametrize("patience", [OWN_CORE, SHARED_CORE])
def test_a_rank_that_shares_its_core_sleeps_sooner_and_wakes_more_often(
    patience: Patience, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(progress, "_patience", OWN_CORE)  # restored afterwards
    set_patience(patience)
    monkeypatch.setattr(time, "sleep", slept.append)
    begin_s = time.perf_counter()
    backed_off(lambda: len(slept) >= 30, lambda: "a message")
    assert time.perf_counter() - begin_s >= patience.yield_s
    assert max(slept) == patience.sleep_most_s and min(slept) < max(slept)


@pytest.mark.parametrize(
    "wrapped", [CountedCommunicator, lambda comm: RecordingCommunicator(CountedCommunicator(comm))]
)
def test_a_communicator_that_wraps_another_says_what_that_needs(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = AloneCommunicator()
    monkeypatch.setattr(inner, "exchange", lambda sends, receives: Slow(1))
    monkeypatch.setattr(inner, "start_all_reduce", lambda tensor, op="sum": Slow(1))
    comm = wrapped(inner)
    assert comm.exchange([], []).needs_polls and comm.start_all_reduce(torch.zeros(1)).needs_polls
