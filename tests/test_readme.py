"""What the README shows of Python runs, as it stands there: alone, and on two ranks."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MPIEXEC, PROGRAM_PATH, ROOT
from tests.patience import PATIENCE_S

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


@pytest.fixture
def block(tmp_path: Path) -> Path:
    """What the section shows, as a file."""
    found = shown((ROOT / "README.md").read_text(encoding="utf-8"))
    if found is None:
        pytest.skip(f"README.md has no section {HEADING!r}")
    assert found.lstrip().startswith(">>>"), "written for doctest: lines begin with >>>"
    (tmp_path / "shown.txt").write_text(found, encoding="utf-8")
    return tmp_path / "shown.txt"


@pytest.mark.captures_each
def test_bring_your_own_model_runs(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(block.parent)
    done = doctest.testfile(str(block), module_relative=False, encoding="utf-8")
    assert done.attempted > 0 and done.failed == 0


@pytest.mark.mpi
@pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec: pip install 'hyfi[local]'")
def test_bring_your_own_model_runs_on_two_ranks(block: Path) -> None:
    command = [str(MPIEXEC), "-n", "2", sys.executable, "-m", "doctest", block.name]
    environment = os.environ | {"PYTHONPATH": PROGRAM_PATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=block.parent, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
