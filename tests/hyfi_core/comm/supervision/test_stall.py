"""Ranks that do not go on are told from those that wait, that take long for a reason, and from a stopped observer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from hyfi_core.comm.activity import Activity
from hyfi_core.comm.supervision.heartbeat import Beat, Heart
from hyfi_core.comm.supervision.stall import Place, StallRule
from tests.patience import PATIENCE_S

PLACES = {rank: Place(f"node{rank}", 100 + rank) for rank in range(3)}


def beat(step: int = 5, moved: bool = True, waits: bool = False, slow: bool = False, stops: bool = False) -> Beat:
    return Beat(step, f"step {step}, F0", moved, waits, slow, stops)


def rule_after(seconds: int, limit_s: float | None = None, step_s: int = 2, **last: Beat | None) -> StallRule:
    """Return the rule after ten steps of ``step_s``, and then ``seconds`` in which rank r says ``last["r<r>"]``."""
    rule = StallRule(PLACES, limit_s)
    for now in range(0, 10 * step_s, step_s):
        for rank in PLACES:
            rule.hear(rank, beat(step=1 + now // step_s), now)
    for now in range(10 * step_s, 10 * step_s + seconds):
        for rank in PLACES:
            said = last[f"r{rank}"]
            if said is not None:
                rule.hear(rank, said, now)
    return rule


WAITS = beat(10, moved=False, waits=True)


def test_a_frozen_rank_is_named_with_its_host_and_action() -> None:
    rule = rule_after(400, r0=WAITS, r1=None, r2=WAITS)
    stall = rule.frozen(420)
    assert stall is not None and stall.ranks == (1,)
    assert "rank 1 on node1 has shown no sign of life for 402 s" in stall.text and "step 10, F0" in stall.text
    assert "rank 0 on node0: step 10, F0" in stall.text
    assert rule.frozen(318) is None  # 300 s


def test_the_limit_grows_with_the_steps() -> None:
    assert rule_after(400, step_s=60, r0=WAITS, r1=None, r2=WAITS).frozen(1000) is None
    assert rule_after(700, step_s=60, r0=WAITS, r1=None, r2=WAITS).frozen(1300) is not None


@pytest.mark.parametrize(("limit_s", "after_s"), [(20.0, 22), (3.0, 5)])
def test_a_limit_that_is_given_counts(limit_s: float, after_s: int) -> None:
    rule = rule_after(after_s, limit_s=limit_s, r0=WAITS, r1=None, r2=WAITS)
    stall = rule.frozen(20 + after_s)
    assert stall is not None and f"run.stall_s: {limit_s:g} s" in stall.text


def test_zero_switches_it_off_until_a_stop_is_requested() -> None:
    assert rule_after(10_000, limit_s=0.0, r0=WAITS, r1=None, r2=WAITS).frozen(10_020) is None
    stops = beat(10, moved=False, waits=True, stops=True)
    assert rule_after(15, limit_s=0.0, r0=stops, r1=None, r2=WAITS).frozen(35) is not None


def test_a_rank_that_hangs_in_a_call_is_named_and_those_that_wait_are_not() -> None:
    hangs = beat(10, moved=False)
    rule = rule_after(400, r0=WAITS, r1=WAITS, r2=hangs)
    assert rule.frozen(420) is None
    stall = rule.stuck(420)
    assert stall is not None and stall.ranks == (2,) and "rank 2 on node2 has made no progress" in stall.text


@pytest.mark.parametrize("others", [beat(10), beat(10, moved=False, slow=True)])
def test_ranks_that_work_or_do_something_slow_are_not_stalled(others: Beat) -> None:
    assert rule_after(1000, r0=WAITS, r1=WAITS, r2=others).stuck(1020) is None


def test_all_ranks_may_wait_for_something_that_never_comes() -> None:
    stall = rule_after(400, r0=WAITS, r1=WAITS, r2=WAITS).stuck(420)
    assert stall is not None and stall.ranks == (0, 1, 2) and "all wait" in stall.text


def test_preparing_for_an_hour_is_no_stall() -> None:
    """Tissue masks of thousands of slides are read by one rank while the others wait."""
    rule = StallRule(PLACES)
    for now in range(3600):
        for rank in PLACES:
            rule.hear(rank, beat(step=0, moved=False, waits=rank > 0), now)
    assert rule.frozen(3600) is None and rule.stuck(3600) is None


def test_the_first_step_may_take_longer() -> None:
    rule = StallRule(PLACES)
    for now in range(1500):
        for rank in PLACES:
            rule.hear(rank, beat(step=1, moved=now == 0), now)
    assert rule.stuck(1500) is None


def test_an_observer_that_was_stopped_itself_forgives() -> None:
    rule = rule_after(1, r0=WAITS, r1=WAITS, r2=WAITS)
    rule.forgive(5000)
    assert rule.frozen(5001) is None and rule.stuck(5001) is None


def test_a_heart_sees_events_waits_and_children() -> None:
    activity = Activity()
    heart = Heart(activity=activity)
    heart.beat()
    assert not heart.beat().moved
    activity.count += 1
    assert heart.beat().moved and not heart.beat().moved
    activity.begun = activity.step = 3
    activity.action = "F0"
    with activity.waiting(lambda: "an exchange"):
        found = heart.beat()
        assert (found.begun, found.moved, found.waits) == (3, True, True)
        assert found.where == "step 3, F0, in an exchange"
    with activity.slowly("compiling"):
        assert heart.beat().slow and heart.beat().where == "step 3, F0, compiling"
    assert not heart.beat().slow


def test_a_child_that_computes_is_progress_and_one_that_is_stopped_is_named() -> None:
    activity = Activity()
    heart = Heart(activity=activity)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            activity.helpers.add(child.pid)
            heart.beat()
            deadline_s = time.monotonic() + PATIENCE_S
            while not heart.beat().moved:
                assert time.monotonic() < deadline_s
                time.sleep(0.3)
            os.kill(child.pid, signal.SIGSTOP)
            while "does not run" not in heart.beat().where:
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            heart.beat()
            assert f"child process {child.pid}" in heart.beat().where and not heart.beat().moved
        finally:
            child.kill()
