"""The wheel is complete: every file that the packages read at run time is among its data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = sorted(PROJECT["tool"]["setuptools"]["package-data"])
NOT_INSTALLED = {"workflows/benchmarks/RESULTS.md", "workflows/benchmarks/LOG.md"}  # read by people


def files_beside_modules() -> set[str]:
    """Return the files of the packages that are not Python's, relative to the repository."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*"))
    kept = (path for path in found if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in kept} - NOT_INSTALLED


def test_every_file_beside_the_modules_is_package_data() -> None:
    listed: dict[str, list[str]] = PROJECT["tool"]["setuptools"]["package-data"]
    patterns = [f"{package}/{pattern}" for package, globs in listed.items() for pattern in globs]
    files = files_beside_modules()
    assert {"workflows/launch/templates/slurm.sh.j2", "workflows/recipes/demo.yaml"} <= files
    assert {name for name in files if not any(fnmatch(name, pattern) for pattern in patterns)} == set()


def test_the_container_is_built_from_what_the_wheel_needs() -> None:
    recipe = (ROOT / "Containerfile").read_text(encoding="utf-8")
    copied = {word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", recipe, re.MULTILINE) for word in line.split()}
    assert copied == {"pyproject.toml", PROJECT["project"]["readme"], "LICENSE", *PACKAGES}
    assert all((ROOT / name).exists() for name in copied)
    (version,) = re.findall(r"^ARG PYTHON=(3\.\d+)$", recipe, re.MULTILINE)
    assert PROJECT["project"]["requires-python"] == f">={version}"
    assert all(
        extra in PROJECT["project"]["optional-dependencies"] for extra in re.findall(r"\.whl\)\[(\w+)\]", recipe)
    )


@pytest.mark.soak
def test_the_wheel_runs_in_another_folder(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "elsewhere"
    folder.mkdir()
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *PACKAGES):  # a build writes beside its sources
        subprocess.run(["cp", "-r", ROOT / name, source], check=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, f"{source}{os.sep}"], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert files_beside_modules() <= set(zipfile.ZipFile(wheel).namelist())
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([tmp_path / "venv" / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", wheel], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))  # torch and the rest, not once more

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program: str, *words: str) -> str:
        command = [tmp_path / "venv" / "bin" / program, *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("python", "-c", "import workflows; print(workflows.__file__)").startswith(str(tmp_path / "venv"))
    assert run("hyfi", "--version") == f"hyfi {PROJECT['project']['version']}\n"
    run("hyfi", "synth", "slides", "--slides", "1", "--size", "512")
    run("hyfi", "ingest", "slides", "--out", "store", "--mpp", "1.0")
    run("hyfi", "inspect", "store")
    assert (folder / "store" / "contact.html").exists()  # by a template
