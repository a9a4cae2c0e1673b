"""Parts of a check that run other programs: the tests marked ``cuda``, and the measurement for the planner."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from workflows.exit_codes import DONE
from workflows.gpu_check.measure_step import Row
from workflows.gpu_check.setting import Setting

_ROOT = Path(__file__).parents[2]
_MARK = "mark.cuda"


def tests(setting: Setting, _: str) -> Iterator[Row]:
    """Run the tests marked ``cuda``, which skip without a GPU."""
    # Only files with the mark: collecting all tests would take longer than running these.
    marked = [
        path for path in sorted((_ROOT / "tests").rglob("test_*.py")) if _MARK in path.read_text(encoding="utf-8")
    ]
    if not marked:
        yield {"what": "tests marked cuda", "not run": f"there are none in {_ROOT / 'tests'}: check out the repository"}
        return
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *map(str, marked)]
    completed = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    lines = completed.stdout.strip().splitlines() or completed.stderr.strip().splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    yield {"what": "tests marked cuda", "passed": completed.returncode == 0, "result": lines[-1], "failures": failed}


def machine(setting: Setting, _: str) -> Iterator[Row]:
    """Measure the machine for the planner, as ``hyfi doctor --measure`` does."""
    from workflows.commands.bench import measure

    target = setting.out / "machine.yaml"
    code = measure.run(target)
    row: Row = {"what": "machine file", "passed": code == DONE, "file": target.name}
    if code == DONE:
        row["name"] = yaml.safe_load(target.read_text(encoding="utf-8"))["name"]
    yield row
