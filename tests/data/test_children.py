"""What processes pass on to their children."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.patience import PATIENCE_S

PROGRAM = """
import json, os, subprocess, sys
from data.children import open_closed_streams
open_closed_streams()
shown = "import json, os, sys; json.dump([os.readlink(f'/proc/self/fd/{n}') for n in range(3)], open(sys.argv[1], 'w'))"
subprocess.run([sys.executable, "-c", shown, sys.argv[1]], check=True)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc")
def test_streams_that_were_closed_are_open_in_children_too(tmp_path: Path) -> None:
    """A child's next file took the number of its closed standard error, and warnings of libraries went into it."""
    closed = [
        "bash",
        "-c",
        'exec "$0" "$@" <&- >&- 2>&-',
        sys.executable,
        "-c",
        PROGRAM,
        str(tmp_path / "streams.json"),
    ]
    subprocess.run(closed, cwd=ROOT, check=True, timeout=PATIENCE_S)
    assert json.loads((tmp_path / "streams.json").read_text()) == ["/dev/null"] * 3
