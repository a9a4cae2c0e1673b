"""The arrows of the house: who may import whom, and what stays out of memory until it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A package may import itself and everything to its right.
PACKAGES = ("workflows", "pathology", "data", "hyfi_core")

# Inside the core; `errors` is open to all of it, `__init__` is the front door.
CORE = {
    "plan": {"plan"},
    "schedule": {"schedule", "plan"},
    "comm": {"comm", "plan"},
    "ops": {"ops", "comm", "plan"},
    "graph": {"graph", "ops", "comm", "plan"},
    "runtime": {"runtime", "graph", "ops", "comm", "plan", "schedule"},
    "cost": {"cost", "graph", "ops", "comm", "plan", "schedule"},
    "models": {"models"},
}
PURE = ("plan", "schedule")
ONLY_HERE = {"mpi4py": "hyfi_core/comm/mpi.py", "openslide": "pathology/sources.py"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the whole name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def wrong_imports(path: Path, allowed: set[str], known: set[str], depth: int) -> list[str]:
    """Return imports whose ``depth``-th name is one of ``known`` but not ``allowed``."""
    found = []
    for line, name in imports(path):
        parts = name.split(".")
        if len(parts) > depth and parts[depth] in known - allowed and (depth == 0 or parts[0] == "hyfi_core"):
            found.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_way(package: str) -> None:
    allowed = set(PACKAGES[PACKAGES.index(package) :])
    assert sources(package)
    assert [fault for path in sources(package) for fault in wrong_imports(path, allowed, set(PACKAGES), 0)] == []


@pytest.mark.parametrize("part", CORE)
def test_core_imports_one_way(part: str) -> None:
    paths = sources(f"hyfi_core/{part}")
    if not paths:
        assert part == "cost", f"hyfi_core/{part} is empty"
        pytest.skip(f"hyfi_core/{part} is not built yet")
    assert [fault for path in paths for fault in wrong_imports(path, CORE[part], set(CORE), 1)] == []


def test_every_part_of_the_core_has_its_arrows() -> None:
    folders = {path.name for path in (ROOT / "hyfi_core").iterdir() if any(path.glob("*.py"))}
    assert folders <= set(CORE)


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
    assert wrong_imports(wrong, {"data", "hyfi_core"}, set(PACKAGES), 0) == ["wrong.py:2 imports workflows.cli"]
    assert wrong_imports(wrong, CORE["plan"], set(CORE), 1) == ["wrong.py:4 imports hyfi_core.runtime.engine"]


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules in memory after ``code`` ran in a fresh interpreter."""
    program = f"import sys\n{code}\nprint('\\n' + ' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


HELP = "import contextlib, workflows.cli\nwith contextlib.suppress(SystemExit):\n    workflows.cli.app({words!r})"


@pytest.mark.parametrize(
    "code",
    ["import hyfi_core.plan", "import hyfi_core.schedule", "import hyfi_core.errors", HELP.format(words=["--help"])]
    + [HELP.format(words=[name, "--help"]) for name in ("train", "ingest", "predict")],
)
def test_light_things_stay_light(code: str) -> None:
    heavy = {"torch", "numpy", "zarr", "skimage", "tifffile", "openslide", "mpi4py"}
    assert loaded_by(code) & heavy == set()


def test_torch_would_be_seen() -> None:
    assert "torch" in loaded_by("import torch")
