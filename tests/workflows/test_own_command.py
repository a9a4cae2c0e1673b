"""Commands that another command starts: they end, also if they do not listen."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from workflows import own_command
from workflows.exit_codes import FAULT, STOPPED
from workflows.own_command import run_command


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have ``hyfi`` be a shell script."""
    program = folder / "hyfi"
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(own_command, "_WATCHED_EVERY_S", 0.05)


def test_a_watched_command_that_does_not_stop_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A search waited without end for a run that it had given up."""
    monkeypatch.setattr(own_command, "_SECONDS_TO_STOP_WATCHED", 0.3)
    ready = tmp_path / "ready"
    stand_in(tmp_path, monkeypatch, f"exec 0<&- 1>&- 2>&-; trap '' TERM; touch {ready}; exec sleep {PATIENCE_S}")
    before_s = time.monotonic()
    assert run_command(["train"], watch=ready.exists) == STOPPED
    assert time.monotonic() - before_s < PATIENCE_S / 2
    assert "did not end within 0 s after a request to stop, and was killed" in capsys.readouterr().err


def test_a_watched_command_has_its_own_code_if_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = tmp_path / "ready"
    stand_in(tmp_path, monkeypatch, f"trap 'exit 3' TERM; touch {ready}; while true; do sleep 0.02; done")
    assert run_command(["train"], watch=ready.exists) == 3
    stand_in(tmp_path, monkeypatch, "exit 5")
    assert run_command(["train"], watch=lambda: False) == 5
    stand_in(tmp_path, monkeypatch, "kill -9 $$")
    assert run_command(["train"], watch=lambda: False) == FAULT
