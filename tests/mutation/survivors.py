"""Runs the nearest tests against each mutant of a seeded sample.

Torch and the libraries of tests are imported once; each mutant is a child process that replaces its module when it is
imported, so that no file is changed and others may work in the same folder.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutation.covering import Covering
from tests.mutation.mutants import Mutant, count, mutant, mutated
from tests.mutation.nearest import PACKAGES, nearest

_NO_TESTS = 5
"""Pytest's exit code if it has collected nothing, such as of a file with soak tests only: nothing noticed the fault."""
_NEAREST_S, _FURTHER_S, _COVERING_S = 60, 150, 300
"""Processor time of a group of tests. If the nearest or recorded ones take longer, a loop has become endless."""


@dataclass(frozen=True)
class Outcome:
    """What the tests said of one mutant.

    Attributes:
        mutant: the fault.
        killed: whether a test failed.
        by: the group of tests that noticed it, or the last that did not; "no test runs it" where that is known.
    """

    mutant: Mutant
    killed: bool
    by: str


def sample(root: Path, seed: int, each: int) -> list[Mutant]:
    """Return ``each`` mutants of every package, drawn with a seed; packages alternate."""
    drawn = []
    for package in PACKAGES:
        paths = sorted(str(path.relative_to(root)) for path in (root / package).rglob("*.py"))
        every = [(path, number) for path in paths for number in range(count(root, path))]
        places = random.Random(f"{seed} {package}").sample(every, each)
        drawn.append([mutant(root, path, number) for path, number in places])
    return [one for turn in zip(*drawn, strict=True) for one in turn]


def outcomes(
    root: Path, drawn: Sequence[Mutant], seconds: float, covering: Covering | None = None
) -> Iterator[Outcome]:
    """Yield what the tests say of each mutant, until they have taken so much processor time.

    Args:
        root: of the project.
        drawn: the mutants.
        seconds: of processor time.
        covering: the tests that run each line, where they are recorded: after the file of tests that is named as the
            module, these are asked instead of those in folders beside it.
    """
    _import_libraries()
    for fault in drawn:
        if used_s() > seconds:
            return
        yield _outcome(root, fault, covering)


def _outcome(root: Path, fault: Mutant, covering: Covering | None) -> Outcome:
    groups = [
        (group, _NEAREST_S if number == 0 else _FURTHER_S) for number, group in enumerate(nearest(root, fault.path))
    ]
    by = "no tests"
    if covering is not None:
        tests = covering.of(root, fault.path, [fault.line]) or covering.of(root, fault.path, fault.statement)
        groups = [(group, limit_s) for group, limit_s in groups if group[0].endswith(".py")]
        groups += [(tests, _COVERING_S)] if tests else []
    for group, limit_s in groups:
        code = _exit_code(root, fault, group, limit_s)
        by = " ".join([*group[:3], *([f"and {len(group) - 3} more"] if len(group) > 3 else [])])
        too_slow = code in (-signal.SIGXCPU, -signal.SIGKILL) and limit_s == _FURTHER_S
        if code not in (0, _NO_TESTS) and not too_slow:
            return Outcome(fault, True, by)
    return Outcome(fault, False, by if covering is None or tests else "no test runs it")


def used_s() -> float:
    """Return the processor time of all tests so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _import_libraries() -> None:
    """Import what most tests import and no mutant changes."""
    for name in ("hypothesis", "numpy", "pytest", "scipy.ndimage", "skimage", "torch.export"):
        importlib.import_module(name)
    assert not any(name.split(".")[0] in ("hyfi_core", "data", "pathology") for name in sys.modules)


def _exit_code(root: Path, fault: Mutant, tests: Sequence[str], limit_s: int) -> int:
    """Return pytest's exit code in a child process; negative if the tests take too long."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            code = _run(root, fault, tests, limit_s)
        finally:
            os._exit(code)
    deadline_s = time.monotonic() + 6 * limit_s
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline_s:  # it waits for something
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)


def _run(root: Path, fault: Mutant, tests: Sequence[str], limit_s: int) -> int:
    import pytest

    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    os.nice(10)
    os.chdir(root)
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    sys.meta_path.insert(0, _Finder(root, fault))
    options = ["-x", "-q", "-m", "not soak", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly"]
    paths = [path for path in dict.fromkeys(test.split("::")[0] for test in tests) if Path(path).exists()]
    return int(pytest.main([*options, *paths], plugins=[_Named(tests)])) if paths else _NO_TESTS


class _Named:
    """A plugin of pytest: of files whose tests are named, only these run, in the order of the names.

    As arguments, the names of tests give pytest's exit code 4 both if one was renamed since it was recorded, and then
    none of them runs, and if the fault lets a file's import fail, which is noticed.
    """

    def __init__(self, tests: Sequence[str]) -> None:
        self._order = {name: at for at, name in enumerate(tests) if "::" in name}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self._order:
            named = [item for item in items if item.nodeid in self._order]
            items[:] = sorted(named, key=lambda item: self._order[item.nodeid])


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the mutated module, and no other."""

    def __init__(self, root: Path, fault: Mutant) -> None:
        self._path, self._number = root / fault.path, fault.number
        self._name = fault.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the module's place and its changed code."""
        if name != self._name:
            return None
        loader = _Loader(name, str(self._path), self._number)
        places = [str(self._path.parent)] if self._path.name == "__init__.py" else None
        spec = importlib.machinery.ModuleSpec(name, loader, origin=str(self._path), is_package=places is not None)
        spec.submodule_search_locations = places
        spec.has_location = True
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module with one fault."""

    def __init__(self, name: str, path: str, number: int) -> None:
        super().__init__(name, path)
        self._number = number

    def get_code(self, fullname: str) -> Any:
        """Return the changed code; nothing is stored."""
        source = Path(self.path).read_text("utf-8")
        return compile(mutated(source, self._number), self.path, "exec", dont_inherit=True)
