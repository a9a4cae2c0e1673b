"""The output of ranks as the launcher forwards it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S
from workflows.launch.mpiexec import Output

RANK = "for line in range(20_000): print('a line', line)\nprint('', 'last', '', '', sep='\\n')"


def test_ranks_are_read_after_the_reader_of_their_output_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full pipe blocks the ranks: 20,000 lines are more than it holds."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        output = Output(rank)
        try:
            assert rank.wait(timeout=PATIENCE_S) == 0
        finally:
            rank.kill()
        output.finish()


def test_lines_are_forwarded_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output = Output(rank)
    rank.wait(timeout=PATIENCE_S)
    output.finish()
    said = capsys.readouterr().out
    assert said.startswith("a line 0\na line 1\n") and said.endswith("a line 19999\n\nlast\n\n\n")
