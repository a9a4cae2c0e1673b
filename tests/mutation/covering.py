"""Which tests run each line: ``python -m tests.mutation.covering LINES.json tests/hyfi_core tests/data``.

Tests run in this process, one after the other, with coverage.py's tracer. What a test runs in processes of its own is
not recorded. ``python -m tests.mutation --covering LINES.json`` asks these tests after the nearest ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from tests.mutation.nearest import PACKAGES

_MOST_TESTS = 400
_MOST_S = 90.0
"""Of all tests of a line: what they took when they were recorded."""


@dataclass(frozen=True)
class Covering:
    """The tests that run each line of the modules.

    Attributes:
        tests: the name of each test for pytest, and the seconds of processor that it took.
        lines: for each module and line, the positions in ``tests`` of those that run it.
        texts: for each module, the hash of its text: lines of another text are not these.
    """

    tests: list[tuple[str, float]]
    lines: dict[str, dict[int, list[int]]]
    texts: dict[str, str]

    def of(self, root: Path, path: str, lines: Iterable[int]) -> list[str] | None:
        """Return tests that run one of the lines: first those beside the module, then others of all folders.

        Args:
            root: of the project.
            path: of the module, from the root.
            lines: of one statement.

        Returns:
            Of each kind at most 400 tests of at most 90 s in all, the cheapest one of each file first; those that run
            any line of the module if its text has changed since, or if the line runs on import only; None if none runs
            the line.
        """
        module = self.lines.get(path)
        if not module:
            return None
        recorded = [line for line in lines if line in module]
        changed = self.texts[path] != _text_hash(root / path)
        if not recorded and not changed:
            return None
        if changed or any(not module[line] for line in recorded):
            recorded = list(module)
        tests = [self.tests[at] for at in sorted({at for line in recorded for at in module[line]})]
        package = next((f"tests/{name}/" for name in PACKAGES if path.startswith(f"{name}/")), "tests/")
        beside = [test for test in tests if test[0].startswith(package)]
        return _spread(beside) + _spread(test for test in tests if test not in beside)

    @classmethod
    def read(cls, files: Sequence[Path]) -> Covering:
        """Return what was recorded in one or several files, which name different tests."""
        tests, texts = list[tuple[str, float]](), dict[str, str]()
        lines: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for file in files:
            stored = json.loads(file.read_text("utf-8"))
            for path, of_module in stored["lines"].items():
                for line, numbers in of_module.items():
                    lines[path][int(line)] += [len(tests) + number for number in numbers]
            tests += [(name, seconds) for name, seconds in stored["tests"]]
            texts |= stored["texts"]
        return cls(tests, lines, texts)


def _spread(tests: Iterable[tuple[str, float]]) -> list[str]:
    """Return names of tests: in turns, one of each folder, then one of each file, the cheapest first."""
    folders: dict[str, dict[str, list[tuple[str, float]]]] = defaultdict(lambda: defaultdict(list))
    for name, seconds in sorted(tests, key=lambda test: test[1]):
        file = name.split("::")[0]
        folders[str(Path(file).parent)][file].append((name, seconds))
    of_folders = [list(_in_turns(files.values())) for files in folders.values()]
    chosen, left_s = list[str](), _MOST_S
    for name, seconds in _in_turns(of_folders):
        if len(chosen) < _MOST_TESTS and seconds <= left_s:
            chosen.append(name)
            left_s -= seconds
    return chosen


def _in_turns(lists: Iterable[Sequence[Any]]) -> Iterator[Any]:
    """Yield the first of each, then the second of each."""
    return (one for one in chain.from_iterable(zip_longest(*lists)) if one is not None)


def _text_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Recorder:
    """A plugin of pytest: coverage's context is the test that runs; set-up of a module belongs to its first test."""

    def __init__(self, coverage: Any) -> None:
        self._coverage, self.seconds = coverage, dict[str, float]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._coverage.switch_context(nodeid)
        self.seconds[nodeid] = -time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.seconds[nodeid] += time.process_time()
        self._coverage.switch_context("")


def record(root: Path, file: Path, tests: Sequence[str]) -> None:
    """Run the tests and write which lines of ``PACKAGES`` each of them runs.

    Args:
        root: of the project.
        file: written; JSON.
        tests: files and folders of tests.
    """
    import coverage
    import pytest

    measured = coverage.Coverage(data_file=None, config_file=False, source=[str(root / name) for name in PACKAGES])
    recorder = _Recorder(measured)
    options = ["-q", "-m", "not soak and not mpi", "-n", "0", "-p", "no:cacheprovider", "--timeout", "0"]
    measured.start()
    pytest.main([*options, *tests], plugins=[recorder])
    measured.stop()
    data, names = measured.get_data(), sorted(recorder.seconds)
    number = {name: at for at, name in enumerate(names)}
    lines, texts = {}, {}
    for path in sorted(data.measured_files()):
        name = str(Path(path).relative_to(root))
        texts[name] = _text_hash(Path(path))
        contexts = data.contexts_by_lineno(path)
        lines[name] = {line: [number[test] for test in by if test] for line, by in sorted(contexts.items())}
    seconds = [(name, round(max(0.0, recorder.seconds[name]), 2)) for name in names]
    file.write_text(json.dumps({"tests": seconds, "lines": lines, "texts": texts}), "utf-8")


if __name__ == "__main__":
    os.nice(5)
    record(Path.cwd(), Path(sys.argv[1]), sys.argv[2:])
