"""`hyfi view`, started for a test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import ROOT


@contextmanager
def serving(*words: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start ``hyfi view`` and give the process and the first line that it printed; it is ended afterwards."""
    command = [sys.executable, "-m", "workflows.cli", "view", *map(str, words), "--no-browser"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
