from __future__ import annotations

from pathlib import Path

import pytest

from workflows.launch import peer_watch
from workflows.launch.status import EXIT_VARIABLE


def test_a_lost_rank_leaves_the_code_of_a_failure_for_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After ``os._exit(0)`` of one rank, mpiexec of MPICH returns 0."""
    monkeypatch.setenv(EXIT_VARIABLE, str(tmp_path / "code"))
    peer_watch._report_lost(1)
    assert (tmp_path / "code").read_text() == "70\n" and "rank 1 was killed or crashed" in capsys.readouterr().err
