"""What the documents show is true: Python runs, commands and configurations are accepted, links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

import data
import pathology
from pathology.pages import FLAG_MEANINGS
from pathology.tissue.quality import BLACK_SHARE, BLURRED_SHARE, PEN_SHARE
from tests.conftest import ROOT, Hyfi
from tests.patience import PATIENCE_S
from tests.workflows.archive import make_store
from workflows.cli import app
from workflows.config.load import load_config
from workflows.config.tasks import TASKS
from workflows.launch.scripts import Site
from workflows.tasks.bootstrap import DRAWS, LEVEL
from workflows.tasks.class_metrics import CALIBRATION_BINS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FIRST_PROJECT = ROOT / "docs" / "first-project.md"
LANGUAGES = {"sh", "yaml", "python", "csv", "json", "text"}
TYPED_BEFORE_HYFI = re.compile(r"^(srun|mpiexec) -n \d+ ")


def blocks(page: Path, language: str = "") -> list[str]:
    """Return the fenced blocks of a page, of one language or of all."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if language in ("", name)]


def commands(text: str) -> list[list[str]]:
    """Return the words of each command of a shell block that calls hyfi, without comments and launchers."""
    lines = [TYPED_BEFORE_HYFI.sub("", line) for line in text.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("hyfi ")]


def merged(tree: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return nested mappings put over others."""
    both = {key: merged(tree[key], over[key]) for key in tree.keys() & over.keys() if isinstance(over[key], dict)}
    return {**tree, **over, **both}


def run_doctest(shown: Path) -> None:
    """Run a text's examples in its folder; what differs is printed."""
    with contextlib.chdir(shown.parent):
        done = doctest.testfile(str(shown), module_relative=False, encoding="utf-8")
    assert done.attempted > 0 and done.failed == 0


def pages_with(language: str) -> list[Any]:
    return [pytest.param(page, id=page.stem) for page in PAGES if blocks(page, language)]


def test_blocks_are_of_languages_that_are_checked_here() -> None:
    found = {name for page in PAGES for name in re.findall(r"^```(\w+)\n", page.read_text("utf-8"), re.MULTILINE)}
    assert found <= LANGUAGES


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_are_accepted(page: Path) -> None:
    group = typer.main.get_command(app)
    for words in [words for text in blocks(page, "sh") for words in commands(text)]:
        command = group.commands[words[1]]  # type: ignore[attr-defined]
        command.make_context(words[1], words[2:])  # raises what the command line would say


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_configurations_are_accepted(page: Path, tmp_path: Path) -> None:
    base = {"data": {"store": "store", "size_px": 512}, "run": {"dir": "runs/first", "epochs": 1}}
    for text in blocks(page, "yaml"):
        shown = yaml.safe_load(text)
        if "program" in shown:  # a site.yaml of `hyfi launch`
            (tmp_path / "site.yaml").write_text(text)
            Site.load(tmp_path / "site.yaml")
            continue
        tree = merged(base, shown)
        if tree["data"].keys() & {"tiles", "features"}:
            del tree["data"]["size_px"]
        grids = tree.get("plan", {}).get("grids", [[1, 1]])
        assert grids
        whole = tree.get("plan", {}).get("replicas", 1) * tree.get("plan", {}).get("microbatches", 1)
        tree["data"].setdefault("batch_size", whole)
        file = tmp_path / "some.yaml"
        file.write_text(yaml.safe_dump(tree))
        load_config(file)


AFTER_FIRST_PROJECT = ("api", "heatmaps", "qupath-napari")
"""Pages whose Python reads what the first project has written."""


@pytest.mark.captures_each
@pytest.mark.parametrize("page", [p for p in pages_with("python") if p.id not in ("README", *AFTER_FIRST_PROJECT)])
def test_python_runs(page: Path, tmp_path: Path) -> None:
    make_store(tmp_path)
    (tmp_path / "shown.txt").write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    run_doctest(tmp_path / "shown.txt")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.timeout(900)
def test_the_first_project_runs_as_it_is_shown(hyfi_here: Hyfi, tmp_path: Path) -> None:
    page = FIRST_PROJECT.read_text(encoding="utf-8")
    (text,) = blocks(FIRST_PROJECT, "yaml")
    (tmp_path / "mine.yaml").write_text(text)
    for words in [words for text in blocks(FIRST_PROJECT, "sh") for words in commands(text)]:
        done = hyfi_here(*words[1:], OMP_NUM_THREADS="1")
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    manifest = (tmp_path / "SLIDES" / "manifest.csv").read_text()
    assert manifest.startswith(blocks(FIRST_PROJECT, "csv")[0])
    for name in re.findall(r"`((?:results|store)/[\w./-]+\.\w+)`", page):
        assert (tmp_path / name).is_file(), name
    for package in (data, pathology):
        with contextlib.chdir(tmp_path):
            done_here = doctest.testmod(package)
        assert done_here.attempted > 0 and done_here.failed == 0
    for name in AFTER_FIRST_PROJECT:
        shown = tmp_path / f"{name}.txt"
        shown.write_text("\n".join(blocks(ROOT / "docs" / f"{name}.md", "python")), encoding="utf-8")
        run_doctest(shown)


def pages_of(nav: list[Any]) -> list[str]:
    """Return the pages of a navigation of MkDocs, nested sections too."""
    values = [value for entry in nav for value in entry.values()]
    return [page for value in values for page in ([value] if isinstance(value, str) else pages_of(value))]


def test_the_site_has_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    listed = pages_of(site["nav"])
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md")) and site["strict"] is True


def test_the_api_names_what_exists_and_is_explained() -> None:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)
    assert {"pathology.open_slide", "data.open_store", "hyfi_core.runtime.parallelize.parallelize"} <= set(names)
    for name in names:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        assert found.__module__ == module and found.__doc__, name


def test_flags_and_metrics_are_all_explained() -> None:
    text = (ROOT / "docs" / "flags-metrics.md").read_text("utf-8")
    flags, metrics = text.partition("## Metrics")[::2]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", flags, re.MULTILINE))
    assert rows == FLAG_MEANINGS
    assert set(re.findall(r"^\| `(\w+)` \|", metrics, re.MULTILINE)) == {
        name for facts in TASKS.values() for name in ("loss", *facts.metrics)
    }
    assert (
        f"more than {BLURRED_SHARE:.0%}".replace("%", " %") in flags
        and f"more than {BLACK_SHARE:.0%}".replace("%", " %") in flags
        and f"more than {PEN_SHARE:.1%}".replace("%", " %") in flags
    )
    assert f"middle {LEVEL:.0%}".replace("%", " %") in metrics and f"{DRAWS:,} bootstrap draws" in metrics
    assert f"in {CALIBRATION_BINS} bins" in metrics


@pytest.mark.soak
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parallelize" in (tmp_path / "api" / "index.html").read_text("utf-8")


@functools.cache
def defined_names() -> set[str]:
    """Return what the packages define: modules, classes, functions, arguments, attributes and constants."""
    names: set[str] = set()
    for package in ("hyfi_core", "data", "pathology", "workflows"):
        for path in (ROOT / package).rglob("*.py"):
            names.add(path.stem)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                    names.add(node.name)
                elif isinstance(node, ast.arg):
                    names.add(node.arg)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
    return names


def test_the_glossary_names_what_the_code_has() -> None:
    lines = (ROOT / "docs" / "glossary.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "word"]
    words = [row[0] for row in rows]
    assert len(words) == len(set(words)) > 40
    names = [re.findall(r"`(\w+)`", row[2]) for row in rows]
    assert [word for word, found in zip(words, names, strict=True) if not found] == []
    assert {name for found in names for name in found} - defined_names() == set()


def test_where_things_go_names_what_the_code_has() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    table = text[text.index("## Where things go") : text.index("## Libraries considered")]
    quoted = re.findall(r"`([^`]+)`", table)
    paths = [name for name in quoted if re.fullmatch(r"[\w/]+(/|\.py|\.md)", name)]
    assert len(paths) > 15
    assert [name for name in paths if not (ROOT / name).exists() and not list(ROOT.glob(f"*/**/{name}"))] == []
    words = {name for name in quoted if re.fullmatch(r"(_|[A-Z])\w+", name)}  # classes, constants, private functions
    assert len(words) > 8 and words - defined_names() == set()
