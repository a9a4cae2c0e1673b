"""Two checkouts are compared pair by pair, so that what slows both of a pair changes no ratio."""

from __future__ import annotations

import io
import sys

import pytest

from workflows.benchmarks.trees.__main__ import summary
from workflows.benchmarks.trees.work import WARM_STEPS, serve


def test_ratios_are_of_pairs_and_memory_is_the_least_of_all_rounds() -> None:
    calm = [(1.1, 1.0)] * 20
    busy = [(3.3 * factor, 3.0 * factor) for factor in (1.0, 2.0, 5.0, 1.5)] * 5
    result = summary([(calm, (4_000_000, 2_000_000)), (busy, (3_000_000, 2_500_000))])
    assert result["ratio"] == 1.1 and result["interval"] == [1.1, 1.1]
    assert result["of_rounds"] == [1.1, 1.1]
    assert result["grown_mb"] == [3.0, 2.0] and result["grown_ratio"] == 1.5


def test_the_interval_holds_what_the_median_of_noisy_ratios_may_be() -> None:
    pairs = [(1.0 + number / 100, 1.0) for number in range(100)]
    result = summary([(pairs, (1, 1))])
    assert result["ratio"] == 1.495 and result["interval"] == [1.4, 1.6]
    assert summary([(pairs[:1], (1, 0))]) == summary([(pairs[:1], (1, 0))]) | {
        "interval": [1.0, 1.0],
        "grown_ratio": None,
    }


def test_shortest_steps_are_those_of_each_process() -> None:
    rounds = [[(9.0, 9.0), (1.0 + slower, 8.0), (8.0, 2.0)] for slower in (0.0, 0.2, 0.1)]
    assert summary([(pairs, (1, 1)) for pairs in rounds])["shortest_ratio"] == 0.55


def test_a_process_takes_a_step_for_each_line_until_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = []
    monkeypatch.setattr(sys, "stdin", io.StringIO("step\nstep\nend\nstep\n"))
    serve(lambda: steps.append(0))
    lines = capsys.readouterr().out.split()
    assert len(steps) == WARM_STEPS + 2
    assert lines[0] == "ready" and len([float(line) for line in lines[1:]]) == 2
