"""What the README shows of Python runs, as it stands there: alone, and on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MPIEXEC, ROOT

HEADING = "Bring your own model"


def shown(text: str) -> str | None:
    """Return the first fenced block of the section; None where there is no such section."""
    found = re.search(rf"^#+ {HEADING}\n(.*?)(?=^#+ |\Z)", text, re.DOTALL | re.MULTILINE)
    if found is None:
        return None
    block = re.search(r"^```(?:python|pycon)\n(.*?)^```", found.group(1), re.DOTALL | re.MULTILINE)
    assert block is not None, f"the section {HEADING!r} shows no Python"
    return block.group(1)


def test_the_section_is_found_up_to_the_next_heading() -> None:
    text = f"# A\n```python\nno\n```\n## {HEADING}\nSo:\n```python\n>>> 1 + 1\n2\n```\n## B\n```python\nno\n```\n"
    assert shown(text) == ">>> 1 + 1\n2\n"
    assert shown("# A\n") is None


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.mpi)])
def test_bring_your_own_model_runs(ranks: int, tmp_path: Path) -> None:
    block = shown((ROOT / "README.md").read_text(encoding="utf-8"))
    if block is None:
        pytest.skip(f"README.md has no section {HEADING!r}")
    if ranks > 1 and MPIEXEC is None:
        pytest.skip("no mpiexec: pip install 'hyfi[local]'")
    assert block.lstrip().startswith(">>>"), "written for doctest: lines begin with >>>"
    (tmp_path / "shown.txt").write_text(block, encoding="utf-8")
    command = [sys.executable, "-m", "doctest", "shown.txt"]
    start = [str(MPIEXEC), "-n", str(ranks)] if ranks > 1 else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*start, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
