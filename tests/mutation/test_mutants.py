"""Faults are those that were meant, and tests notice nearly all of a sample."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from tests.conftest import ROOT
from tests.mutation.mutants import count, mutant, mutated
from tests.mutation.nearest import nearest
from tests.mutation.survivors import outcomes, sample

SOURCE = '''
"""Text 1."""

def f(x: int = 3) -> bool:
    """Text 2."""
    if not x < 2 and any(x):
        log(x)
    if x is None:
        raise ValueError(f"{x + 1}")
    return min(x // 2, x) in zip(x.reshape(-1, a), strict=True)

class Read(Protocol):
    def of(self, level: int = 0) -> int:
        """Text 3."""
        ...
    def at(self, level: int = 5) -> int: ...
'''


def test_every_fault_changes_one_place(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(SOURCE)
    found = [mutant(tmp_path, "module.py", number) for number in range(count(tmp_path, "module.py"))]
    assert {fault.after for fault in found} == {
        "def f(x: int=4) -> bool:",
        "if x < 2 and any(x):",
        "if not x < 2 or any(x):",
        "if not x <= 2 and any(x):",
        "if not x < 3 and any(x):",
        "if not x < 2 and all(x):",
        "pass",
        "if x is not None:",
        "return max(x // 2, x) in zip(x.reshape(-1, a), strict=True)",
        "return min(x * 2, x) in zip(x.reshape(-1, a), strict=True)",
        "return min(x // 3, x) in zip(x.reshape(-1, a), strict=True)",
        "return min(x // 2, x) not in zip(x.reshape(-1, a), strict=True)",
    }
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    for fault in found:
        changed = ast.unparse(mutated(SOURCE, fault.number)).splitlines()
        ((before, after),) = [pair for pair in zip(plain, changed, strict=True) if pair[0] != pair[1]]
        assert (before.strip(), after.strip()) == (fault.before, fault.after)


def test_samples_are_the_same_for_a_seed_and_tests_exist() -> None:
    drawn = sample(ROOT, seed=1, each=2)
    assert drawn == sample(ROOT, seed=1, each=2) != sample(ROOT, seed=2, each=2)
    assert all((ROOT / test).exists() for fault in drawn for group in nearest(ROOT, fault.path) for test in group)


@pytest.mark.parametrize(("code", "killed"), [(0, False), (1, True), (5, False)])
def test_a_group_without_tests_notices_nothing(code: int, killed: bool) -> None:
    drawn = sample(ROOT, seed=1, each=1)[:1]
    with (
        mock.patch("tests.mutation.survivors._import_libraries"),
        mock.patch("tests.mutation.survivors._exit_code", return_value=code),
    ):
        assert [outcome.killed for outcome in outcomes(ROOT, drawn, seconds=1e9)] == [killed]


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_nearly_all_faults_are_noticed(tmp_path: Path) -> None:
    """In a process of its own: none of the modules may be imported before they are mutated."""
    run = partial(subprocess.run, cwd=ROOT, check=True, capture_output=True, text=True)
    lines, tests = tmp_path / "lines.json", ("tests/hyfi_core", "tests/data", "tests/pathology")
    run([sys.executable, "-m", "tests.mutation.covering", str(lines), *tests])
    said = run([sys.executable, "-m", "tests.mutation", "--seed", "1", "--each", "10", "--covering", str(lines)]).stdout
    survivors = said.count("SURVIVES")
    assert survivors <= 0.05 * (survivors + said.count("killed by")), said
