"""Child processes of a rank: a child that nobody hears any more has ended."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from workflows.launch import child_process
from workflows.launch.child_process import ChildMessage, ChildProcess

CLOSES = """
import os, sys, time
os.close(int(sys.argv[-2]))
{then}
"""


def last_word(program: Path) -> ChildMessage:
    child = ChildProcess([str(program)], {})
    deadline_s = time.monotonic() + PATIENCE_S
    while (message := child.receive()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    return message


@pytest.mark.parametrize(
    ("then", "how"),
    [("time.sleep(600)", "a closed connection, after which it did not end"), ("sys.exit(5)", "exit code 5")],
)
def test_a_child_that_closes_its_connection_is_waited_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, how: str
) -> None:
    """Its rank waited without end, and all others with it."""
    monkeypatch.setattr(child_process, "_SECONDS_TO_END", 2.0)
    (tmp_path / "child.py").write_text(CLOSES.format(then=then))
    assert last_word(tmp_path / "child.py") == {"kind": "died", "how": how}
