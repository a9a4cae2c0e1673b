"""The comparison of schedules with and without backwards in two parts, on threads and with short sleeps."""

from __future__ import annotations

import pytest

from hyfi_core.comm.threads import run_ranks
from workflows.benchmarks import dimensions


def test_both_schedules_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dimensions, "LONG_BLOCK_S", 0.0005)
    run_ranks(4, lambda comm: dimensions.compare_divided(comm, None, 1))
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows == ["schedule", "---", "1f1b", "zb_h1"]
