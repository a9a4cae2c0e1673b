"""What people get wrong: the promised exit code, words that help, and nothing half written."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tifffile

from tests.conftest import ROOT, Hyfi
from tests.workflows.archive import make_config
from workflows.cli import app

SLIDES = 8
Answer = Callable[..., tuple[int, str]]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Answer]:
    """Runs a command in this process, in ``tmp_path``; returns its exit code and what it said on standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str | Path) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            app([str(word) for word in words])
        return int(ended.value.code or 0), capsys.readouterr().err

    yield run


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``slides/`` (synthetic, small) and ``store/``."""
    folder = tmp_path_factory.mktemp("archive")
    for words in (
        ["synth", "slides", "--slides", str(SLIDES), "--size", "512"],
        ["ingest", "slides/manifest.csv", "--out", "store", "--mpp", "1.0", "--workers", "1"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "workflows.cli", *words],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def config(archive: Path, tmp_path: Path) -> Path:
    """A run on one rank that would work; its paths are relative to ``tmp_path``."""
    shutil.copytree(archive / "store", tmp_path / "store")
    path = tmp_path / "config.yaml"
    path.write_text(
        "data: {store: store, size_px: 256, min_coverage: 0.0}\n"
        "model: {name: resnet10, options: {width: 4}}\n"
        "run: {dir: run, steps: 1}\n"
    )
    return path


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return everything below a folder: files with their bytes."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def rewrite_labels(store: Path, out: Path, change: Callable[[list[dict[str, str]]], None]) -> Path:
    """Write the store's manifest as a labels CSV, changed."""
    with (store / "manifest.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    change(rows)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return out


def write_tiff(path: Path, **options: object) -> Path:
    """Write a small tiled slide; says its resolution only where ``options`` do."""
    pixels = np.full((512, 512, 3), 240, np.uint8)
    pixels[100:400, 100:400] = (200, 90, 160)
    tifffile.imwrite(path, pixels, tile=(256, 256), photometric="rgb", compression="jpeg", metadata=None, **options)
    return path


def refused(said: tuple[int, str], *words: str) -> None:
    """Check a refusal: code 2, every one of ``words``, no traceback."""
    code, err = said
    assert code == 2, err
    assert "Traceback" not in err
    assert [word for word in words if word not in err] == [], err


def test_missing_config(answer: Answer, tmp_path: Path) -> None:
    refused(answer("train", "nowhere.yaml"), "nowhere.yaml", "no such file")
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.stor=x", ("data.stor", "did you mean data.store?")),
        ("data.view=tiles", ("data.view", "'tiles'", "pack or crop")),
        ("run.seed", ("run.seed", "section.key=value")),
    ],
)
def test_wrong_key_or_value(answer: Answer, config: Path, tmp_path: Path, override: str, words: Sequence[str]) -> None:
    before = tree(tmp_path)
    refused(answer("train", config, override), *words)
    assert tree(tmp_path) == before


def test_more_ranks_than_the_plan(answer: Answer, config: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    refused(answer("train", config, "--ranks", "5"), "5 ranks", "needs 1", "plan")
    assert tree(tmp_path) == before


def test_a_run_that_exists(answer: Answer, config: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(config, tmp_path / "run" / "config.yaml")
    before = tree(tmp_path)
    refused(answer("train", config), "run", "exists", "--resume")
    refused(answer("train", config, "--resume", "optimizer.lr=0.5"), "optimizer.lr", "0.5", "0.001")
    assert tree(tmp_path) == before


def test_a_run_in_a_folder_of_something_else(answer: Answer, config: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    refused(answer("train", config, "run.dir=store"), "store", "not a run")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        pytest.param(["data.target=grade"], ["grade", "manifest.csv", "data.target"], id="missing labels column"),
        pytest.param(["model.name=resnet19"], ["resnet19", "resnet18", "package.module:factory"], id="unknown model"),
        pytest.param(["data.mpp=0.3"], ["0.3", "mpp"], id="resolution that the store has not"),
        pytest.param(
            ["data.size_px=64", "data.min_coverage=0.9"],
            ["slide-0", "size_px", "mpp"],
            id="image too small for the tissue",
        ),
    ],
)
def test_a_value_that_does_not_fit_the_store(
    hyfi_here: Hyfi, config: Path, tmp_path: Path, overrides: list[str], told: list[str]
) -> None:
    before = tree(tmp_path)
    done = hyfi_here("train", config, *overrides)
    refused((done.returncode, done.stderr), *told)
    assert tree(tmp_path) == before


def test_slides_of_two_cases_that_the_table_calls_one(hyfi_here: Hyfi, config: Path, tmp_path: Path) -> None:
    def one_case(rows: list[dict[str, str]]) -> None:
        for row, split in zip(rows, ("train", "test"), strict=False):
            row["case_id"], row["split"] = "case-x", split

    labels = rewrite_labels(tmp_path / "store", tmp_path / "labels.csv", one_case)
    before = tree(tmp_path)
    done = hyfi_here("train", config, f"data.labels={labels}")
    refused((done.returncode, done.stderr), "labels.csv", "case_id contradicts the store's manifest.csv", "case-x")
    assert tree(tmp_path) == before


def test_an_unknown_class(hyfi_here: Hyfi, config: Path, tmp_path: Path) -> None:
    def slip(rows: list[dict[str, str]]) -> None:
        rows[0]["label"] = "malignnat"

    labels = rewrite_labels(tmp_path / "store", tmp_path / "labels.csv", slip)
    before = tree(tmp_path)
    done = hyfi_here("train", config, f"data.labels={labels}", "model.classes=[benign, malignant]")
    refused((done.returncode, done.stderr), "malignnat", "labels.csv", "benign", "malignant")
    assert tree(tmp_path) == before


def test_a_store_of_another_version(hyfi_here: Hyfi, config: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "store").glob("*.zarr/zarr.json"):
        group = json.loads(path.read_text())
        group["attributes"]["hyfi"]["format"] = 99
        path.write_text(json.dumps(group))
    before = tree(tmp_path)
    done = hyfi_here("train", config)
    refused((done.returncode, done.stderr), "slide-0", "99", "ingest")
    assert tree(tmp_path) == before


def test_no_mpi(config: Path, tmp_path: Path) -> None:
    """A Python without an mpiexec beside it or on the PATH."""
    other = tmp_path / "bin"
    other.mkdir()
    (other / "python").symlink_to(Path(sys.executable).resolve())
    before = tree(tmp_path)
    done = subprocess.run(
        [other / "python", "-m", "workflows.cli", "train", config, "plan.grids=[[1, 2]]"],
        cwd=tmp_path,
        env=os.environ | {"PATH": str(other), "PYTHONPATH": f"{ROOT}:{sysconfig.get_path('purelib')}"},
        capture_output=True,
        text=True,
    )
    refused((done.returncode, done.stderr), "mpiexec not found", "pip install 'hyfi[local]'", "srun")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("command", [("ingest",), ("predict", "checkpoint"), ("inspect",)])
def test_missing_slide(answer: Answer, tmp_path: Path, command: tuple[str, ...]) -> None:
    out = () if command == ("inspect",) else ("--out", "out")
    refused(answer(*command, "nowhere.svs", *out), "nowhere.svs" if "predict" not in command else "checkpoint")
    assert tree(tmp_path) == {}


def test_folder_with_no_slide(answer: Answer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(answer("ingest", "empty", "--out", "out"), "empty", "no slide")
    assert list(tree(tmp_path)) == ["empty"]


def test_manifest_without_paths(answer: Answer, tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("slide,label\na,benign\n")
    refused(answer("ingest", "m.csv", "--out", "out"), "m.csv", "path")
    assert list(tree(tmp_path)) == ["m.csv"]


def test_a_slide_that_does_not_say_its_mpp(answer: Answer, tmp_path: Path) -> None:
    """Fails alone: finished, with its reason, exit code 1; no store of it."""
    write_tiff(tmp_path / "bare.tif")
    code, err = answer("ingest", "bare.tif", "--out", "out", "--workers", "1")
    assert code == 1
    assert "bare" in err
    assert "--slide-mpp" in err
    assert "source_mpp" in err
    assert list((tmp_path / "out").glob("*.zarr")) == []
    with (tmp_path / "out" / "manifest.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["status"] == "failed"
    assert "mpp" in row["reason"]


@pytest.mark.parametrize(("name", "content"), [("zero.svs", b""), ("text.svs", b"not a slide\n" * 100)])
def test_a_file_that_is_no_slide(answer: Answer, tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    code, err = answer("ingest", name, "--out", "out", "--workers", "1")
    assert code == 1
    assert name.removesuffix(".svs") in err
    assert "Traceback" not in err
    assert list((tmp_path / "out").glob("*.zarr")) == []


@pytest.mark.parametrize("label", ["grade", ""])
def test_split_without_its_columns(answer: Answer, tmp_path: Path, label: str) -> None:
    (tmp_path / "labels.csv").write_text("slide_id,label\na,0\nb,1\nc,1\n")
    words = ["--stratify", label] if label else ["--group", "patient"]
    refused(answer("split", "labels.csv", "--out", "splits.csv", *words), "labels.csv", label or "patient")
    assert list(tree(tmp_path)) == ["labels.csv"]


def test_split_of_missing_labels(answer: Answer, tmp_path: Path) -> None:
    refused(answer("split", "labels.csv", "--out", "splits.csv"), "labels.csv")
    assert tree(tmp_path) == {}


def test_a_corrupt_checkpoint(answer: Answer, archive: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "model.json").write_text('{"format": 1, "model"')
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes(b"\x00" * 64)
    before = tree(tmp_path)
    slide = archive / "slides" / "slide-0000.tiff"
    refused(answer("predict", "checkpoint", slide, "--out", "out"), "checkpoint", "model.")
    refused(answer("validate", "checkpoint", "--store", archive / "store"), "checkpoint", "model.")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "words",
    [
        ("synth", "{out}", "--slides", "1", "--size", "512"),
        ("ingest", "{slides}", "--out", "{out}"),
        ("split", "{slides}/manifest.csv", "--out", "{out}"),
        ("predict", "checkpoint", "{slides}", "--out", "{out}"),
        ("demo", "--out", "{out}"),
    ],
)
@pytest.mark.parametrize("out", ["/proc/hyfi", "file/below"])
def test_unwritable_folder(answer: Answer, archive: Path, tmp_path: Path, words: Sequence[str], out: str) -> None:
    (tmp_path / "file").write_text("a file, not a folder")
    before = tree(tmp_path)
    given = [word.format(out=out, slides=archive / "slides") for word in words]
    refused(answer(*given), out, "cannot be written", "choose another path")
    assert tree(tmp_path) == before


def test_unwritable_run_folder(answer: Answer, config: Path, tmp_path: Path) -> None:
    before = tree(tmp_path)
    refused(answer("train", config, "run.dir=/proc/run"), "/proc/run", "cannot be written")
    assert tree(tmp_path) == before


def test_demo_into_a_folder_of_something_else(answer: Answer, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    before = tree(tmp_path)
    refused(answer("demo", "--out", "thesis"), "thesis", "not written by hyfi demo")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "words",
    [
        ["ingest", "slides", "--out", "https://bucket/store"],
        ["train", "run.yaml", "run.dir=gs://bucket/run"],
        ["synth", "s3://bucket/x", "--slides", "1", "--size", "256"],
    ],
)
def test_addresses_of_object_stores_are_refused(hyfi_here: Hyfi, tmp_path: Path, words: list[str]) -> None:
    """They became local folders named ``s3:``, with exit code 0."""
    make_config(tmp_path, tmp_path / "store")
    (tmp_path / "slides").mkdir()
    before = sorted(tmp_path.rglob("*"))
    done = hyfi_here(*words)
    assert done.returncode == 2, done.stderr
    assert "://bucket/" in done.stderr and "local folder" in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_passwords_are_not_printed_by_commands(answer: Answer) -> None:
    said = answer("ingest", "slides", "--out", "https://me:s3cret@host/store")
    assert said[0] == 2 and "s3cret" not in said[1] and "me:***@host/store" in said[1]


def test_a_file_that_may_not_be_read_is_named_in_a_line(
    answer: Answer, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the refusal is played."""

    def denied(store: Path) -> None:
        raise PermissionError(13, "Permission denied", str(store / "manifest.csv"))

    monkeypatch.setattr("workflows.commands.split.load_manifest", denied)
    code, err = answer(
        "split", archive / "slides" / "manifest.csv", "--out", "splits.csv", "--store", archive / "store"
    )
    assert "Traceback" not in err and err.count("\n") == 1 and code not in (0, 1, 2, 3)
    assert "manifest.csv: Permission denied; let its owner give you access" in err
