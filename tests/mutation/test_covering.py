"""The tests of a line are those that run it, spread over folders and files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.mutation.covering import Covering, _text_hash, record
from tests.mutation.mutants import mutant
from tests.mutation.survivors import outcomes
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
MODULE = "def double(x):\n    if x < 0:\n        raise ValueError(x)\n    return 2 * x\n\n\nLIMIT = 3\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "of_numbers.py").write_text(MODULE)
    return tmp_path


def covering(project: Path, lines: dict[int, list[int]]) -> Covering:
    tests = [(f"tests/{file}.py::test_{n}", float(n)) for n, file in enumerate(("a/x", "a/x", "a/y", "b/z", "b/z"))]
    return Covering(
        tests, {"plan/of_numbers.py": lines}, {"plan/of_numbers.py": _text_hash(project / "plan/of_numbers.py")}
    )


def test_tests_of_a_line_alternate_between_folders_and_files(project: Path) -> None:
    known = covering(project, {2: [0, 1, 2, 3, 4], 4: [1], 7: []})
    of = [name[6:] for name in known.of(project, "plan/of_numbers.py", [2]) or []]
    assert of == ["a/x.py::test_0", "b/z.py::test_3", "a/y.py::test_2", "b/z.py::test_4", "a/x.py::test_1"]
    assert known.of(project, "plan/of_numbers.py", [4]) == ["tests/a/x.py::test_1"]
    assert known.of(project, "plan/of_numbers.py", [3]) is None, "no test runs it"
    assert len(known.of(project, "plan/of_numbers.py", [7]) or []) == 5, "it runs on import: all tests of the module"


def test_a_changed_module_is_asked_as_a_whole(project: Path) -> None:
    known = covering(project, {2: [0], 4: [1]})
    (project / "plan" / "of_numbers.py").write_text("\n" + MODULE)
    assert len(known.of(project, "plan/of_numbers.py", [4]) or []) == 2
    assert len(known.of(project, "plan/of_numbers.py", [99]) or []) == 2, "its lines have other numbers now"


def test_costly_tests_are_left_out(project: Path) -> None:
    known = covering(project, {2: [0, 1, 2, 3, 4]})
    with mock.patch("tests.mutation.covering._MOST_S", 4.0):
        assert len(known.of(project, "plan/of_numbers.py", [2]) or []) == 3


def test_a_line_that_no_test_runs_is_said_so(project: Path) -> None:
    fault = mutant(project, "plan/of_numbers.py", 0)
    with (
        mock.patch("tests.mutation.survivors._import_libraries"),
        mock.patch("tests.mutation.survivors.nearest", return_value=[["tests/plan"]]),
        mock.patch("tests.mutation.survivors._exit_code", side_effect=AssertionError),
    ):
        (outcome,) = outcomes(project, [fault], 1e9, covering(project, {4: [1]}))
    assert (outcome.killed, outcome.by) == (False, "no test runs it")


def test_recorded_tests_run_alone_also_if_one_was_renamed(project: Path) -> None:
    """In a process of its own: pytest's worker has threads, and should not fork."""
    (project / "test_two.py").write_text("def test_a(): assert 0\ndef test_b(): pass\n")
    (project / "test_broken.py").write_text("raise ImportError\ndef test_a(): pass\n")
    asked = [
        (["test_two.py::test_a"], 1),
        (["test_two.py::test_b"], 0),
        (["test_two.py::test_of_old", "test_removed.py::test_a", "test_two.py::test_a"], 1),
        (["test_two.py::test_of_old", "test_removed.py::test_a"], 5),
        (["test_removed.py::test_a"], 5),
        (["test_broken.py::test_a"], 2),
    ]
    fault = mutant(project, "plan/of_numbers.py", 0)
    code = "from pathlib import Path, PosixPath; from tests.mutation.mutants import Mutant; import pytest\n"
    code += "from tests.mutation.survivors import _exit_code\n"
    code += f"print([_exit_code({project!r}, {fault!r}, tests, 60) for tests in {[tests for tests, _ in asked]}])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == str([code for _, code in asked]), done.stderr


def test_lines_are_recorded_by_test(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("coverage")
    tests = "from of_numbers import double\ndef test_first(): assert double(2) == 4\ndef test_second(): assert 1\n"
    (project / "test_of_numbers.py").write_text(tests)
    monkeypatch.syspath_prepend(str(project / "plan"))
    monkeypatch.setattr("tests.mutation.covering.PACKAGES", ("plan",))
    monkeypatch.chdir(project)
    record(project, project / "lines.json", ["test_of_numbers.py"])
    monkeypatch.delitem(sys.modules, "of_numbers", raising=False)
    known = Covering.read([project / "lines.json", project / "lines.json"])
    assert known.lines["plan/of_numbers.py"] == {1: [], 2: [0, 2], 4: [0, 2], 7: []}
    assert known.tests[0][0] == known.tests[2][0] == "test_of_numbers.py::test_first"
