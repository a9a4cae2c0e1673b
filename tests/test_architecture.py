"""The shape of the code: who may import whom, how large things get, that names are used once and explained."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parent.parent

# A package may import itself and everything to its right.
PACKAGES = ("workflows", "pathology", "data", "hyfi_core")

# Inside a package a folder may import itself and the folders named here; modules at the package's top are open to all.
ARROWS = {
    "hyfi_core": {
        "plan": set(),
        "schedule": {"plan"},
        "comm": {"plan"},
        "ops": {"comm", "plan"},
        "capture": {"plan"},
        "rules": {"capture", "ops", "comm", "plan"},
        "lowering": {"rules", "capture", "ops", "comm", "plan"},
        "cost": {"lowering", "rules", "capture", "ops", "schedule", "plan"},
        "runtime": {"cells", "cost", "lowering", "rules", "capture", "ops", "comm", "schedule", "plan"},
        "cells": {"cost", "lowering", "rules", "capture", "ops", "comm", "schedule", "plan"},
        "tiles": {"runtime", "ops", "capture", "comm", "plan"},
        "models": set(),
    },
    "data": {
        "store": set(),
        "samples": {"store"},
        "loading": {"samples", "store"},
        "tiles": {"samples", "store"},
    },
    "pathology": {
        "readers": set(),
        "tissue": {"readers"},
        "ingest": {"tissue", "readers"},
        "predict": {"ingest", "tissue", "readers"},
        "view": {"predict", "ingest", "tissue", "readers"},
        "synthetic": set(),
    },
    "workflows": {
        "config": set(),
        "launch": {"config"},
        "finetuning": {"config"},
        "encoders": {"finetuning", "config"},
        "features": {"encoders", "finetuning", "config"},
        "tasks": {"config"},
        "evaluation": {"features", "encoders", "finetuning", "tasks", "launch", "config"},
        "export_model": {"training", "evaluation", "features", "encoders", "finetuning", "tasks", "launch", "config"},
    },
}
# Each of these may import all of those before it.
_TOP = ("training", "tile_plans", "cross_validation", "commands", "benchmarks", "gpu_check", "sweep")
for _folder in _TOP:
    ARROWS["workflows"][_folder] = set(ARROWS["workflows"])
ARROWS["workflows"]["training"].discard("export_model")
# Sizes that CONTRIBUTING states. Most files and functions are far smaller; these are where a reviewer need not argue.
LARGEST_FOLDER = 20
LONGEST_FILE_LINES = 400
LONGEST_FUNCTION_LINES = 60
# Files and folders that may be larger, as CONTRIBUTING lists them with their reasons.
_SIZES = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("**Sizes.**")[2].partition("**Names.**")[0]
MAY_BE_LARGER = frozenset(re.findall(r"^\| `([\w/.]+)` \| [^|]{10,} \|$", _SIZES, re.MULTILINE))
PURE = ("plan", "schedule")
ONLY_HERE = {"mpi4py": "hyfi_core/comm/mpi.py", "openslide": "pathology/readers/openslide_source.py"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@functools.cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Return (line, dotted name) of every import, also those inside functions; many tests ask for them."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the whole name"
            found += ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
    return tuple(found)


def wrong_imports(path: Path, inside: str, allowed: set[str], known: set[str]) -> list[str]:
    """Return the imports of ``inside``'s folders (of top-level packages where it is empty) that are not ``allowed``."""
    prefix = f"{inside}." if inside else ""
    found = []
    for line, name in imports(path):
        if name.startswith(prefix) and name.removeprefix(prefix).split(".")[0] in known - allowed:
            found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_way(package: str) -> None:
    allowed = set(PACKAGES[PACKAGES.index(package) :])
    assert sources(package)
    assert [fault for path in sources(package) for fault in wrong_imports(path, "", allowed, set(PACKAGES))] == []


@pytest.mark.parametrize(("package", "folder"), [(package, folder) for package in ARROWS for folder in ARROWS[package]])
def test_folders_import_one_way(package: str, folder: str) -> None:
    allowed, known = ARROWS[package][folder] | {folder}, set(ARROWS[package])
    paths = sources(f"{package}/{folder}")
    assert paths
    assert [fault for path in paths for fault in wrong_imports(path, package, allowed, known)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_has_its_arrows(package: str) -> None:
    assert {path.name for path in (ROOT / package).iterdir() if any(path.glob("*.py"))} == set(ARROWS[package])


def crowded(package: Path) -> dict[str, int]:
    """Return the folders of a package, itself one, that hold too many Python files, ``__init__.py`` among them."""
    files = Counter(path.parent.relative_to(package.parent).as_posix() for path in package.rglob("*.py"))
    return {name: count for name, count in files.items() if count > LARGEST_FOLDER and name not in MAY_BE_LARGER}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_is_crowded(package: str) -> None:
    assert crowded(ROOT / package) == {}


def test_what_may_be_larger_exists() -> None:
    assert MAY_BE_LARGER and [name for name in MAY_BE_LARGER if not (ROOT / name).exists()] == []


def test_a_crowded_folder_is_seen(tmp_path: Path) -> None:
    for folder, files in {"few": LARGEST_FOLDER, "deep/many": LARGEST_FOLDER}.items():
        (tmp_path / folder).mkdir(parents=True)
        for n in range(files):
            (tmp_path / folder / f"{n}.py").touch()
    (tmp_path / "deep" / "many" / "__init__.py").touch()
    assert crowded(tmp_path) == {f"{tmp_path.name}/deep/many": LARGEST_FOLDER + 1}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of ``graph`` that reach themselves."""
    done: set[str] = set()

    def reaches(module: str, goal: str, seen: set[str]) -> bool:
        for after in graph[module] - seen - done:
            seen.add(after)
            if after == goal or reaches(after, goal, seen):
                return True
        return False

    found = []
    for module in sorted(graph):
        if reaches(module, module, set()):
            found.append(module)
        else:
            done.add(module)
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    paths = {module_name(path): path for package in PACKAGES for path in sources(package)}
    graph = {}
    for module, path in paths.items():
        named = {name for _, name in imports(path)}
        graph[module] = {name if name in paths else name.rpartition(".")[0] for name in named} & set(paths) - {module}
    assert circles(graph) == []


def test_a_circle_is_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


@pytest.mark.parametrize("part", PURE)
def test_pure_parts_need_only_the_standard_library(part: str) -> None:
    own = {"hyfi_core"} | set(sys.stdlib_module_names)
    paths = sources(f"hyfi_core/{part}")
    foreign = [(path.name, name) for path in paths for _, name in imports(path) if name.split(".")[0] not in own]
    assert foreign == []


@pytest.mark.parametrize(("module", "home"), ONLY_HERE.items())
def test_a_library_has_one_door(module: str, home: str) -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in sources(package)
        if any(name.split(".")[0] == module for _, name in imports(path))
    }
    assert users == {home}


def test_the_check_sees_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from workflows import cli\n\nimport hyfi_core.runtime.engine\n")
    assert wrong_imports(wrong, "", {"data", "hyfi_core"}, set(PACKAGES)) == ["wrong.py:2 imports workflows.cli"]
    found = wrong_imports(wrong, "hyfi_core", {"plan"}, set(ARROWS["hyfi_core"]))
    assert found == ["wrong.py:4 imports hyfi_core.runtime.engine"]


def definitions(tree: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every class and function, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def too_long(path: Path) -> list[str]:
    """Return what is longer in a file than this project allows."""
    text = path.read_text(encoding="utf-8")
    lines = text.count("\n")
    may_be_longer = path.relative_to(ROOT).as_posix() in MAY_BE_LARGER
    found = [f"{path.name}: {lines} lines"] if lines > LONGEST_FILE_LINES and not may_be_longer else []
    for node in definitions(ast.parse(text)):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if not isinstance(node, ast.ClassDef) and length > LONGEST_FUNCTION_LINES:
            found.append(f"{path.name}:{node.lineno}: {node.name} has {length} lines")
    return found


def unexplained(path: Path) -> list[str]:
    """Return the public names of a module without a docstring: itself, classes, functions, methods."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [] if ast.get_docstring(tree) else [path.name]

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_":
                decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
                if not ast.get_docstring(node) and not decorators & {"overload", "setter", "override"}:
                    found.append(f"{path.name}:{node.lineno}: {prefix}{node.name}")
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{node.name}.")

    visit(tree.body, "")
    return found


def used_twice(paths: list[Path]) -> dict[str, list[str]]:
    """Return class names, leading underscores left out, that are defined more than once, with the places."""
    places = defaultdict(list)
    for path in paths:
        for node in definitions(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


@pytest.mark.parametrize("package", PACKAGES)
def test_files_and_functions_are_short(package: str) -> None:
    assert [fault for path in sources(package) for fault in too_long(path)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_docstrings(package: str) -> None:
    assert [fault for path in sources(package) for fault in unexplained(path)] == []


def test_no_class_name_is_used_twice() -> None:
    assert used_twice([path for package in PACKAGES for path in sources(package)]) == {}


def test_long_unexplained_and_repeated_things_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("class A:\n    def f(self):\n" + "        1\n" * 60 + "\nclass _A: ...\n" + "\n" * 400)
    assert too_long(wrong) == ["wrong.py: 464 lines", "wrong.py:2: f has 61 lines"]
    assert unexplained(wrong) == ["wrong.py", "wrong.py:1: A", "wrong.py:2: A.f"]
    assert used_twice([wrong]) == {"A": ["wrong.py:1", "wrong.py:64"]}


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules in memory after ``code`` ran in a fresh interpreter."""
    program = f"import sys\n{code}\nprint('\\n' + ' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


HELP = "import contextlib, workflows.cli\nwith contextlib.suppress(SystemExit):\n    workflows.cli.app({words!r})"


@pytest.mark.parametrize(
    "code",
    ["import hyfi_core.plan", "import hyfi_core.schedule", "import hyfi_core.errors", HELP.format(words=["--help"])]
    + [HELP.format(words=[name, "--help"]) for name in ("train", "ingest", "predict", "view", "features")],
)
def test_light_things_stay_light(code: str) -> None:
    heavy = {"torch", "numpy", "zarr", "skimage", "tifffile", "openslide", "mpi4py", "starlette", "uvicorn"}
    assert loaded_by(code) & heavy == set()


def test_torch_would_be_seen() -> None:
    assert "torch" in loaded_by("import torch")


# English as in PyTorch's and zarr's documents: short, active, subject first.
TRANSLATED = re.compile(r"(, |each |words |slides )of which|is told|what is kept of|by people|of so many bytes")


def test_sentences_are_active() -> None:
    """Phrases that stand where a shorter sentence says who does what."""
    paths = [path for package in PACKAGES for path in sources(package)]
    paths += [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if TRANSLATED.search(line)
    ]
    assert found == []
