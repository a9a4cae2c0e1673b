"""Modules of the user with the names of our packages: which file hides which."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hyfi_core import RequestError
from hyfi_core.models.by_name import build_model
from tests.conftest import ROOT

FACTORY = "from torch import nn\n{import_}\ndef make(classes):\n    return nn.Linear(1, classes)\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with a module of theirs that has the name of one of our packages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "data.py").write_text("VALUE = 1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("module", "import_"),
    [("clash_name", "from data import VALUE"), ("clash_attribute", "import data\ndata.VALUE")],
)
def test_a_factory_that_imports_a_hidden_module_names_both(project: Path, module: str, import_: str) -> None:
    (project / f"{module}.py").write_text(FACTORY.format(import_=import_))
    with pytest.raises(
        RequestError, match=r"'data' is a package of hyfi \(.*data\), not your .*data\.py; rename yours"
    ):
        build_model({"name": f"{module}:make", "classes": 2})


def test_a_factory_in_a_hidden_folder_names_both(project: Path) -> None:
    (project / "workflows").mkdir()
    with pytest.raises(RequestError, match=r"'workflows' is a package of hyfi .*, not your .*workflows; rename"):
        build_model({"name": "workflows.models:make", "classes": 2})


def test_a_factory_whose_own_import_is_missing_is_not_looked_for(project: Path) -> None:
    (project / "needs_more.py").write_text(FACTORY.format(import_="import a_package_that_is_not_installed"))
    with pytest.raises(RequestError, match=r"No module named 'a_package_that_is_not_installed'$"):
        build_model({"name": "needs_more:make", "classes": 2})
    with pytest.raises(RequestError, match="is its folder on PYTHONPATH"):
        build_model({"name": "no_such_module:make", "classes": 2})


@pytest.mark.parametrize("name", ["data.py", "data/__init__.py", "data/mine.py"])
def test_a_module_that_hides_ours_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import pathology"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    if name == "data/mine.py":  # a folder without __init__.py comes after every package
        assert done.returncode == 0, done.stderr
    else:
        assert f"ImportError: {tmp_path / name} hides the package 'data' of hyfi" in done.stderr
